// Values of launch expressions, with Python's arithmetic: exact fractions, floor division, None, tuples.
//
// `expressions.py` translates an expression into calls of these functions.
#pragma once
#include <cmath>
#include <memory>

#include "call.h"

namespace opsmith {

// An expression without a value, with the reason.
struct NoValue : std::exception {
  std::string text;
  explicit NoValue(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

struct Term {
  enum Kind : int32_t { NONE, FRACTION, REAL, SEQUENCE, A_TENSOR };
  Kind kind = NONE;
  int64_t over = 0, under = 1;  // a fraction in lowest terms; a whole number has 1 below
  double real = 0;
  std::shared_ptr<const std::vector<Term>> items;  // of a sequence
  const RawTensor* tensor = nullptr;
  int32_t dtype = -1;  // of the tensor
};

inline Term fraction(__int128 over, __int128 under) {
  if (under == 0) throw NoValue("it divides by zero");
  if (under < 0) over = -over, under = -under;
  __int128 a = over < 0 ? -over : over, b = under;
  while (b) {
    const __int128 rest = a % b;
    a = b, b = rest;
  }
  over /= a, under /= a;
  constexpr __int128 most = INT64_MAX;
  if (over > most || over < -most || under > most) throw NoValue("a number in it exceeds 64 bits");
  Term term;
  term.kind = Term::FRACTION, term.over = int64_t(over), term.under = int64_t(under);
  return term;
}
inline Term whole(int64_t value) { return fraction(value, 1); }
inline Term none() { return {}; }
inline Term real(double value) {
  Term term;
  term.kind = Term::REAL, term.real = value;
  return term;
}
inline Term sequence(std::vector<Term> items) {
  Term term;
  term.kind = Term::SEQUENCE, term.items = std::make_shared<const std::vector<Term>>(std::move(items));
  return term;
}
inline Term view_of(const RawTensor& raw, int32_t dtype) {
  Term term;
  term.kind = Term::A_TENSOR, term.tensor = &raw, term.dtype = dtype;
  return term;
}

// ---- Numbers.

inline void refuse_no_number(const Term& term) {
  if (term.kind != Term::FRACTION && term.kind != Term::REAL) throw NoValue("a part of it is not a number");
}
inline double approximate(const Term& term) {
  refuse_no_number(term);
  return term.kind == Term::REAL ? term.real : double(term.over) / double(term.under);
}
inline bool are_exact(const Term& one, const Term& other) {
  refuse_no_number(one), refuse_no_number(other);
  return one.kind == Term::FRACTION && other.kind == Term::FRACTION;
}
inline __int128 wide(int64_t value) { return value; }
inline double nonzero(double value) {
  if (value == 0) throw NoValue("it divides by zero");
  return value;
}
inline Term added(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(approximate(a) + approximate(b));
  return fraction(wide(a.over) * b.under + wide(b.over) * a.under, wide(a.under) * b.under);
}
inline Term negated(const Term& a) {
  refuse_no_number(a);
  return a.kind == Term::REAL ? real(-a.real) : fraction(-wide(a.over), a.under);
}
inline Term subtracted(const Term& a, const Term& b) { return added(a, negated(b)); }
inline Term multiplied(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(approximate(a) * approximate(b));
  return fraction(wide(a.over) * b.over, wide(a.under) * b.under);
}
// Python divides a floating-point number by a whole one exactly.
inline Term exact(const Term& a) {
  if (a.kind != Term::REAL || !std::isfinite(a.real)) return a;
  double value = a.real;
  int64_t under = 1;
  for (; value != std::floor(value) && under < int64_t(1) << 60; under *= 2) value *= 2;
  return value == std::floor(value) && std::fabs(value) < 9e18 ? fraction(int64_t(value), under) : a;
}
inline Term divided(const Term& real_or_not, const Term& b) {
  const Term a = b.kind == Term::FRACTION ? exact(real_or_not) : real_or_not;
  if (!are_exact(a, b)) return real(approximate(a) / nonzero(approximate(b)));
  return fraction(wide(a.over) * b.under, wide(a.under) * b.over);
}
inline Term from_real(double value) {
  if (!(std::fabs(value) < 9e18)) throw NoValue("a number in it exceeds 64 bits");
  return whole(int64_t(value));
}
inline Term floored(const Term& a) {
  refuse_no_number(a);
  if (a.kind == Term::REAL) return from_real(std::floor(a.real));
  return whole(a.over / a.under - (a.over % a.under < 0));
}
inline Term ceiled(const Term& a) { return negated(floored(negated(a))); }
inline Term quotient(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(std::floor(approximate(a) / nonzero(approximate(b))));
  return floored(divided(a, b));
}
inline Term remainder(const Term& a, const Term& b) { return subtracted(a, multiplied(quotient(a, b), b)); }

// ---- Comparisons and conditions.

inline Term yes(bool value) { return whole(value); }
inline bool less(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return approximate(a) < approximate(b);
  return wide(a.over) * b.under < wide(b.over) * a.under;
}
inline bool equal(const Term& a, const Term& b) {
  if (a.kind == Term::NONE || b.kind == Term::NONE) return a.kind == b.kind;
  if (a.kind == Term::SEQUENCE && b.kind == Term::SEQUENCE)
    return a.items->size() == b.items->size() && std::equal(a.items->begin(), a.items->end(), b.items->begin(), equal);
  if (a.kind == Term::A_TENSOR || b.kind == Term::A_TENSOR) throw NoValue("it compares a tensor");
  if (a.kind == Term::SEQUENCE || b.kind == Term::SEQUENCE) return false;
  return are_exact(a, b) ? a.over == b.over && a.under == b.under : approximate(a) == approximate(b);
}
// `is` is for None alone.
inline bool is_none(const Term& a, const Term& b) {
  if (a.kind != Term::NONE && b.kind != Term::NONE) throw NoValue("`is` compares two values, of which none is None");
  return a.kind == b.kind;
}
inline bool holds(const Term& a) {
  switch (a.kind) {
    case Term::NONE: return false;
    case Term::FRACTION: return a.over != 0;
    case Term::REAL: return a.real != 0;
    case Term::SEQUENCE: return !a.items->empty();
    case Term::A_TENSOR: break;
  }
  throw NoValue("it takes a tensor for a condition");
}

// ---- Sequences and tensors.

inline const std::vector<Term>& items_of(const Term& a) {
  if (a.kind != Term::SEQUENCE) throw NoValue("it indexes a value that has no items");
  return *a.items;
}
inline Term item(const Term& a, const Term& index) {
  const std::vector<Term>& items = items_of(a);
  const int64_t count = int64_t(items.size());
  if (index.kind != Term::FRACTION || index.under != 1) throw NoValue("an index in it is not a whole number");
  if (index.over < -count || index.over >= count)
    throw NoValue("an index in it is out of range: there are " + std::to_string(count));
  return items[size_t(index.over < 0 ? index.over + count : index.over)];
}
inline const RawTensor& tensor_of(const Term& a) {
  if (a.kind != Term::A_TENSOR) throw NoValue("a part of it is no tensor, as None is none");
  return *a.tensor;
}
inline Term dim_of(const Term& a) { return whole(tensor_of(a).dim); }
inline Term itemsize_of(const Term& a) { return tensor_of(a), whole(int64_t(item_size(a.dtype))); }
inline int64_t elements(const RawTensor& raw) {
  int64_t count = 1;
  for (int64_t at = 0; at < raw.dim; at++) count *= raw.sizes[at];
  return count;
}
inline Term numel_of(const Term& a) { return whole(elements(tensor_of(a))); }
inline Term shape_of(const Term& a) {
  const RawTensor& raw = tensor_of(a);
  std::vector<Term> sizes;
  for (int64_t at = 0; at < raw.dim; at++) sizes.push_back(whole(raw.sizes[at]));
  return sequence(std::move(sizes));
}
inline Term length(const Term& a) {
  if (a.kind == Term::A_TENSOR && a.tensor->dim) return whole(a.tensor->sizes[0]);
  return whole(int64_t(items_of(a).size()));
}
inline Term extreme(std::vector<Term> given, bool least) {
  if (given.size() == 1) given = items_of(given[0]);
  if (given.empty()) throw NoValue("the least or the largest of nothing");
  Term found = given[0];
  for (const Term& each : given)
    if (least ? less(each, found) : less(found, each)) found = each;
  return refuse_no_number(found), found;
}
inline Term least(std::vector<Term> given) { return extreme(std::move(given), true); }
inline Term largest(std::vector<Term> given) { return extreme(std::move(given), false); }

// ---- The values that an expression may name.

struct Scope {
  const Signed& signature;
  const Value* values;    // arguments, results, scratch buffers
  const int32_t* dtypes;  // of each that is a tensor
  size_t count;

  Term value(size_t at) const {
    const Value& value = values[at];
    const int32_t type = at < signature.size() ? signature[at].type : int32_t(TENSOR);
    if (!value.given) return none();
    switch (type) {
      case TENSOR: return view_of(value.tensor, dtypes[at]);
      case INTEGER: return whole(value.integer);
      case NUMBER: return real(value.number);
      case FLAG: return yes(value.flag);
      case TENSORS: return listed<RawTensor>(value.list, [&](const RawTensor& raw) { return view_of(raw, dtypes[at]); });
      case INTEGERS: return listed<int64_t>(value.list, [](int64_t each) { return whole(each); });
      case NUMBERS: return listed<double>(value.list, [](double each) { return real(each); });
      case FLAGS: return listed<bool>(value.list, [](bool each) { return yes(each); });
    }
    throw NoValue("it names a text");
  }

 private:
  template <class T, class Make>
  static Term listed(const RawList& list, Make make) {
    std::vector<Term> items;
    const T* from = static_cast<const T*>(list.data);
    for (int64_t at = 0; at < list.size; at++) items.push_back(make(from[at]));
    return sequence(std::move(items));
  }
};

// A rule appends the values of its parts.
using Rule = void (*)(const Scope& scope, std::vector<Term>& parts);

inline std::vector<Term> values_of(Rule rule, const Scope& scope) {
  std::vector<Term> parts;
  rule(scope, parts);
  if (parts.size() == 1 && parts[0].kind == Term::SEQUENCE) return *parts[0].items;
  return parts;
}

inline std::vector<int64_t> whole_numbers(Rule rule, const Scope& scope) {
  std::vector<int64_t> numbers;
  for (const Term& each : values_of(rule, scope)) {
    if (each.kind != Term::FRACTION || each.under != 1) throw NoValue("a value of it is not a whole number");
    numbers.push_back(each.over);
  }
  return numbers;
}
}  // namespace opsmith
