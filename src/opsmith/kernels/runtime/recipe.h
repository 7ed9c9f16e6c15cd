// The evaluator of sizes: programs of whole numbers, which recipe.py makes of expressions.
//
// A process with Python gets them as it gets plans; a library without Python has them as constants. They compute exact
// fractions of 64 bits. A value that exceeds them, or divides by zero, is undefined: its call goes where calls without
// a plan go.
#pragma once
#include <algorithm>

#include "opsmith.h"

namespace opsmith {

// In the order of `CODES` in recipe.py. Behind the first two stands a number: a constant, or the place of a number.
enum Code : int64_t { CONSTANT, PLACE, ADD, SUBTRACT, MULTIPLY, DIVIDE, QUOTIENT, REMAINDER, NEGATE, CEIL, FLOOR, LEAST,
                      LARGEST, LESS, LESS_OR_EQUAL, EQUAL, NOT, SELECT };

constexpr int most_operands = 32;  // recipe.py refuses what needs more
constexpr int most_letters = 64;

struct Fraction {
  int64_t over = 0, under = 1;  // in lowest terms; under is 0 if it is undefined, and over is 1 if a letter is unknown
  bool defined() const { return under != 0; }
};
constexpr Fraction undefined{0, 0}, unknown{1, 0};

inline Fraction reduced(__int128 over, __int128 under) {
  if (under == 0) return undefined;
  if (under < 0) over = -over, under = -under;
  __int128 divisor = over < 0 ? -over : over, rest = under;
  while (rest) {
    const __int128 next = divisor % rest;
    divisor = rest, rest = next;
  }
  if (divisor > 1) over /= divisor, under /= divisor;
  const bool fits = over == int64_t(over) && under == int64_t(under);
  return fits ? Fraction{int64_t(over), int64_t(under)} : undefined;
}

inline Fraction floored(Fraction a) { return {a.over / a.under - (a.over % a.under < 0), 1}; }
inline Fraction product(Fraction a, Fraction b) {
  return reduced(__int128(a.over) * b.over, __int128(a.under) * b.under);
}
inline Fraction quotient(Fraction a, Fraction b) {
  return reduced(__int128(a.over) * b.under, __int128(a.under) * b.over);
}
inline Fraction difference(Fraction a, Fraction b) {
  return reduced(__int128(a.over) * b.under - __int128(b.over) * a.under, __int128(a.under) * b.under);
}
inline bool less(Fraction a, Fraction b) { return __int128(a.over) * b.under < __int128(b.over) * a.under; }

inline Fraction remainder(Fraction a, Fraction b) {
  const Fraction ratio = quotient(a, b);
  if (!ratio.defined()) return undefined;
  const Fraction whole = product(floored(ratio), b);
  return whole.defined() ? difference(a, whole) : undefined;
}

inline Fraction binary(int64_t code, Fraction a, Fraction b) {
  switch (code) {
    case ADD: return reduced(__int128(a.over) * b.under + __int128(b.over) * a.under, __int128(a.under) * b.under);
    case SUBTRACT: return difference(a, b);
    case MULTIPLY: return product(a, b);
    case DIVIDE: return quotient(a, b);
    case QUOTIENT: {
      const Fraction ratio = quotient(a, b);
      return ratio.defined() ? floored(ratio) : undefined;
    }
    case REMAINDER: return remainder(a, b);
    case LEAST: return less(b, a) ? b : a;
    case LARGEST: return less(a, b) ? b : a;
    case LESS: return {less(a, b), 1};
    case LESS_OR_EQUAL: return {!less(b, a), 1};
    case EQUAL: return {a.over == b.over && a.under == b.under, 1};
  }
  return undefined;
}

inline Fraction unary(int64_t code, Fraction a) {
  switch (code) {
    case NEGATE: return reduced(-__int128(a.over), a.under);
    case CEIL: return {a.over / a.under + (a.over % a.under > 0), 1};
    case FLOOR: return floored(a);
    case NOT: return {a.over == 0, 1};
  }
  return undefined;
}

// Computes a program, which begins with the count of its numbers.
inline Fraction evaluated(const int64_t* program, const Fraction* places) {
  Fraction stack[most_operands];
  Fraction* top = stack;
  for (const int64_t *at = program + 1, *end = at + *program; at != end;) {
    const int64_t code = *at++;
    if (code == CONSTANT) {
      *top++ = {*at++, 1};
    } else if (code == PLACE) {
      *top++ = places[*at++];
    } else if (code == SELECT) {  // condition, then, else
      top -= 2;
      top[-1] = !top[-1].defined() ? top[-1] : top[-1].over ? top[0] : top[1];
    } else if (code == NEGATE || code == CEIL || code == FLOOR || code == NOT) {
      if (top[-1].defined()) top[-1] = unary(code, top[-1]);
    } else {
      const Fraction b = *--top, a = top[-1];
      if (a.defined() && b.defined()) top[-1] = binary(code, a, b);
      else top[-1] = {(!a.defined() && a.over) || (!b.defined() && b.over), 0};
    }
  }
  return *stack;
}

// Computes the sizes of results from `shapes=`, which `sizing` in recipe.py encodes; UNKNOWN for tensors that do not
// have the declared shapes.
inline SizesStatus declared_sizes(const int64_t* sizing, const Value* values, Shape* shapes) {
  const int64_t* at = sizing;
  Fraction letters[most_letters];
  std::fill_n(letters, *at++, unknown);
  for (int64_t left = *at++; left > 0; left--, at += 2)
    if (values[at[1]].given) letters[at[0]] = {values[at[1]].integer, 1};
  const RawTensor* led = nullptr;  // the first tensor with leading dimensions
  int64_t leads = 0;
  const int64_t* const arguments = at;
  for (bool binds : {true, false}) {  // letters first; then numbers and expressions are compared
    at = arguments;
    for (int64_t left = *at++; left > 0; left--) {
      const Value& value = values[*at++];
      const RawTensor& raw = value.tensor;
      const bool leading = *at++ != 0;
      const int64_t count = *at++, before = raw.dim - count;
      if (value.given && (leading ? before < 0 : before != 0)) return UNKNOWN;
      if (value.given && leading && led == nullptr) led = &raw, leads = before;
      if (value.given && leading && (leads != before || !std::equal(raw.sizes, raw.sizes + before, led->sizes)))
        return UNKNOWN;
      for (int64_t dim = 0; dim < count; dim++, at += 1 + *at) {
        const bool letter = *at == 2 && at[1] == PLACE;
        if (!value.given || *at == 0 || letter != binds) continue;
        const int64_t found = raw.sizes[before + dim];
        const Fraction wanted = evaluated(at, letters);
        if (wanted.defined() ? wanted.over != found : wanted.over == undefined.over) return UNKNOWN;
        if (letter) letters[at[2]] = {found, 1};
      }
    }
  }
  for (int64_t left = *at++; left > 0; left--, shapes++) {
    const bool leading = *at++ != 0;
    const int64_t count = *at++;
    if ((leading && led == nullptr) || (leading ? leads : 0) + count > most_dims) return UNKNOWN;
    for (int64_t dim = 0; leading && dim < leads; dim++) shapes->push(led->sizes[dim]);
    for (int64_t dim = 0; dim < count; dim++, at += 1 + *at) {
      const Fraction size = evaluated(at, letters);
      if (!size.defined() || size.over < 0) return UNKNOWN;
      shapes->push(size.over);
    }
  }
  return KNOWN;
}
}  // namespace opsmith
