// The evaluator of sizes: programs of whole numbers, which recipe.py makes of expressions.
//
// A process with Python gets programs in the same way as plans; a library without Python has them as constants. They
// compute exact fractions of 64-bit numbers. A value that exceeds 64 bits, or divides by zero, is undefined; then the
// call is treated as a call without a plan.
#pragma once
#include <algorithm>

#include "opsmith.h"

namespace opsmith {

// In the order of `CODES` in recipe.py. A number follows each of the first two codes: a constant, or the place of a
// number. The codes from VALUE on are followed by the index of the call's value that they read. SIZE and the codes after
// it read an item of this value, at the index on top of the stack. SINGLE reads a number's bits in single precision.
enum Code : int64_t { CONSTANT, PLACE, ADD, SUBTRACT, MULTIPLY, DIVIDE, QUOTIENT, REMAINDER, NEGATE, CEIL, FLOOR, LEAST,
                      LARGEST, LESS, LESS_OR_EQUAL, EQUAL, NOT, SELECT, VALUE, TRUTH, GIVEN, DIMENSIONS, ELEMENTS,
                      ITEMSIZE, LENGTH, SINGLE, SIZE, ITEM, TRUTH_ITEM, SINGLE_ITEM, BYTE_ITEM };

constexpr int most_operands = 32;  // recipe.py refuses programs that need more
constexpr int most_letters = 64;

struct Fraction {
  int64_t over = 0, under = 1;  // in lowest terms; under is 0 if the value is undefined
  bool defined() const { return under != 0; }
  bool is_unknown() const { return under == 0 && over == 1; }
  bool is_nothing() const { return under == 0 && over == 2; }
};
constexpr Fraction undefined{0, 0}, unknown{1, 0}, nothing{2, 0};

// Input of programs: numbers by place, and the values of a call: first its arguments, then its results and buffers.
struct Inputs {
  const Fraction* places;
  const Value* values = nullptr;
  const int64_t* item_sizes = nullptr;  // bytes of an element of each that is a tensor
};

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

// Equal numbers have equal bits; this also applies to both zeros, and to all nan.
inline Fraction single_bits(double number) {
  const float single = float(number) + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof bits);
  return {single == single ? bits : 0x7fc00000u, 1};
}

inline Fraction read(int64_t code, int64_t at, const Inputs& inputs, Fraction index) {
  const Value& value = inputs.values[at];
  const RawTensor& raw = value.tensor;
  if (code == GIVEN) return {value.given, 1};
  if (!value.given) return code == VALUE || code == TRUTH ? nothing : undefined;
  switch (code) {
    case VALUE: return {value.integer, 1};
    case TRUTH: return {value.flag, 1};
    case DIMENSIONS: return {raw.dim, 1};
    case ITEMSIZE: return {inputs.item_sizes[at], 1};
    case LENGTH: return {value.list.size, 1};
    case SINGLE: return single_bits(value.number);
    case ELEMENTS: {
      Fraction count{1, 1};
      for (int64_t dim = 0; count.defined() && dim < raw.dim; dim++) count = product(count, {raw.sizes[dim], 1});
      return count;
    }
  }
  const int64_t count = code == SIZE ? raw.dim : value.list.size;
  if (index.under != 1 || index.over < -count || index.over >= count) return undefined;
  const int64_t place = index.over + (index.over < 0 ? count : 0);
  switch (code) {
    case SIZE: return {raw.sizes[place], 1};
    case ITEM: return {static_cast<const int64_t*>(value.list.data)[place], 1};
    case TRUTH_ITEM: return {static_cast<const bool*>(value.list.data)[place], 1};
    case SINGLE_ITEM: return single_bits(static_cast<const double*>(value.list.data)[place]);
    case BYTE_ITEM: return {static_cast<const unsigned char*>(value.list.data)[place], 1};
  }
  return undefined;
}

// Computes a program, which begins with the count of its numbers.
inline Fraction evaluated(const int64_t* program, const Inputs& inputs) {
  Fraction stack[most_operands];
  Fraction* top = stack;
  for (const int64_t *at = program + 1, *end = at + *program; at != end;) {
    const int64_t code = *at++;
    if (code == CONSTANT) {
      *top++ = {*at++, 1};
    } else if (code == PLACE) {
      *top++ = inputs.places[*at++];
    } else if (code >= SIZE) {
      top[-1] = read(code, *at++, inputs, top[-1]);
    } else if (code >= VALUE) {
      *top++ = read(code, *at++, inputs, undefined);
    } else if (code == SELECT) {  // condition, then, else
      top -= 2;
      if (top[-1].is_nothing()) top[-1] = top[1];
      else if (top[-1].defined()) top[-1] = top[-1].over ? top[0] : top[1];
    } else if (code == NEGATE || code == CEIL || code == FLOOR || code == NOT) {
      if (top[-1].defined()) top[-1] = unary(code, top[-1]);
      else if (top[-1].is_nothing()) top[-1] = code == NOT ? Fraction{1, 1} : undefined;
    } else {
      const Fraction b = *--top, a = top[-1];
      const bool comparable = (a.defined() || a.is_nothing()) && (b.defined() || b.is_nothing());
      if (a.defined() && b.defined()) top[-1] = binary(code, a, b);
      else if (code == EQUAL && comparable) top[-1] = {a.is_nothing() && b.is_nothing(), 1};
      else top[-1] = a.is_unknown() || b.is_unknown() ? unknown : undefined;
    }
  }
  return *stack;
}

// Computes the sizes of results from `shapes=`, which `sizing_of` in recipe.py encodes, or from an exported call. It
// returns UNKNOWN for a call without the declared shapes, or if a condition is false.
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
      const int64_t item = *at++;  // in a list; -1 for a single tensor
      if (item >= 0 && (!value.given || item >= value.list.size)) return UNKNOWN;
      const RawTensor& raw = item < 0 ? value.tensor : static_cast<const RawTensor*>(value.list.data)[item];
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
        const Fraction wanted = evaluated(at, {letters, values, nullptr});
        if (wanted.defined() ? wanted.over != found : wanted.over == undefined.over) return UNKNOWN;
        if (letter) letters[at[2]] = {found, 1};
      }
    }
  }
  for (int64_t left = *at++; left > 0; left--, at += 1 + *at) {
    const Fraction holds = evaluated(at, {letters, values, nullptr});
    if (holds.defined() ? holds.over == 0 : !holds.is_unknown()) return UNKNOWN;
  }
  for (int64_t left = *at++; left > 0; left--, shapes++) {
    const bool leading = *at++ != 0;
    const int64_t count = *at++;
    if ((leading && led == nullptr) || (leading ? leads : 0) + count > most_dims) return UNKNOWN;
    for (int64_t dim = 0; leading && dim < leads; dim++) shapes->push(led->sizes[dim]);
    for (int64_t dim = 0; dim < count; dim++, at += 1 + *at) {
      const Fraction size = evaluated(at, {letters, values, nullptr});
      if (!size.defined() || size.over < 0) return UNKNOWN;
      shapes->push(size.over);
    }
  }
  return KNOWN;
}
}  // namespace opsmith
