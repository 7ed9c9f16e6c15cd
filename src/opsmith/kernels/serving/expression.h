// Values of launch expressions, with Python's arithmetic: exact fractions, floor division, None, tuples.
//
// `expressions.py` translates an expression into calls of these functions.
#pragma once
#include <cmath>
#include <memory>

#include "library.h"

namespace opsmith {

// An expression without a value, with the reason.
struct NoValue : std::exception {
  std::string text;
  explicit NoValue(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

using Wide = __int128;

struct Term {
  enum Kind : int32_t { NONE, FRACTION, REAL, SEQUENCE, A_TENSOR };
  Kind kind = NONE;
  Wide over = 0, under = 1;  // a fraction in lowest terms, of less than 126 bits; a whole number has 1 below
  double real = 0;
  std::shared_ptr<const std::vector<Term>> items;  // of a sequence
  const RawTensor* tensor = nullptr;
  int32_t dtype = -1;  // of the tensor
};

inline Wide bounded(Wide value) {
  constexpr Wide limit = Wide(1) << 126;
  if (value >= limit || value <= -limit) throw NoValue("a number in it exceeds 126 bits");
  return value;
}
inline Wide times(Wide one, Wide other) {
  Wide product;
  if (__builtin_mul_overflow(one, other, &product)) throw NoValue("a number in it exceeds 126 bits");
  return bounded(product);
}
inline Term fraction(Wide over, Wide under) {
  if (under == 0) throw NoValue("it divides by zero");
  if (under < 0) over = -over, under = -under;
  Wide a = over < 0 ? -over : over, b = under;
  while (b) {
    const Wide rest = a % b;
    a = b, b = rest;
  }
  Term term;
  term.kind = Term::FRACTION, term.over = bounded(over / a), term.under = bounded(under / a);
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
// The double nearest to a fraction: 62 bits or more of it, the last one set if there are others.
inline double nearest(Wide over, Wide under) {  // under > 0
  const Wide size_over = over < 0 ? -over : over;
  Wide bits = size_over / under, rest = size_over % under;
  int exponent = 0;
  for (; rest && !(bits >> 62); exponent--) {
    rest *= 2, bits *= 2;
    if (rest >= under) rest -= under, bits++;
  }
  bool more = rest != 0;
  for (; bits >> 63; exponent++) more = more || bits % 2, bits /= 2;
  const double size = std::ldexp(double(uint64_t(bits) | uint64_t(more)), exponent);
  return over < 0 ? -size : size;
}
inline double approximate(const Term& term) {
  refuse_no_number(term);
  return term.kind == Term::REAL ? term.real : nearest(term.over, term.under);
}
inline bool are_exact(const Term& one, const Term& other) {
  refuse_no_number(one), refuse_no_number(other);
  return one.kind == Term::FRACTION && other.kind == Term::FRACTION;
}
inline Term added(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(approximate(a) + approximate(b));
  return fraction(times(a.over, b.under) + times(b.over, a.under), times(a.under, b.under));
}
inline Term negated(const Term& a) {
  refuse_no_number(a);
  return a.kind == Term::REAL ? real(-a.real) : fraction(-a.over, a.under);
}
inline Term subtracted(const Term& a, const Term& b) {
  return are_exact(a, b) ? added(a, negated(b)) : real(approximate(a) - approximate(b));
}
inline Term multiplied(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(approximate(a) * approximate(b));
  return fraction(times(a.over, b.over), times(a.under, b.under));
}
// Python divides a floating-point number by a whole one exactly, and none that is not finite.
inline Term exact(const Term& a) {
  if (a.kind != Term::REAL) return a;
  if (!std::isfinite(a.real)) throw NoValue("a number in it is not finite");
  int exponent = 0;
  int64_t digits = int64_t(std::ldexp(std::frexp(a.real, &exponent), 53));
  for (exponent -= 53; digits && digits % 2 == 0; exponent++) digits /= 2;
  if (digits == 0) return whole(0);
  if (std::abs(exponent) > 125) throw NoValue("a number in it exceeds 126 bits");
  const Wide power = Wide(1) << std::abs(exponent);
  return exponent < 0 ? fraction(digits, power) : fraction(times(digits, power), 1);
}
inline Term divided(const Term& real_or_not, const Term& b) {
  refuse_no_number(real_or_not), refuse_no_number(b);
  if (b.kind == Term::REAL) {
    if (b.real == 0) throw NoValue("it divides by zero");
    if (real_or_not.kind == Term::REAL && !std::isfinite(real_or_not.real)) return exact(real_or_not);
    return real((approximate(real_or_not) + 0.0) / b.real);  // a fraction of Python has no -0.0
  }
  const Term a = exact(real_or_not);
  return fraction(times(a.over, b.under), times(a.under, b.over));
}
inline Term floored(const Term& a) {
  if (a.kind == Term::REAL) return floored(exact(real(std::floor(a.real))));
  refuse_no_number(a);
  return fraction(a.over / a.under - (a.over % a.under < 0), 1);
}
inline Term ceiled(const Term& a) { return negated(floored(negated(a))); }

// Quotient and remainder of Python's `//` and `%`: `float_floor_div` and `float_rem` of CPython, Objects/floatobject.c.
struct Division {
  double quotient, remainder;
};
inline Division floor_division(double a, double b) {
  if (b == 0) throw NoValue("it divides by zero");
  double remainder = std::fmod(a, b), quotient = (a - remainder) / b;
  if (remainder == 0) {
    remainder = std::copysign(0.0, b);
  } else if ((b < 0) != (remainder < 0)) {
    remainder += b, quotient -= 1;
  }
  if (quotient == 0) return {std::copysign(0.0, a / b), remainder};
  const double floor = std::floor(quotient);
  return {quotient - floor > 0.5 ? floor + 1 : floor, remainder};
}
inline Term quotient(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(floor_division(approximate(a), approximate(b)).quotient);
  return floored(divided(a, b));
}
inline Term remainder(const Term& a, const Term& b) {
  if (!are_exact(a, b)) return real(floor_division(approximate(a), approximate(b)).remainder);
  return subtracted(a, multiplied(quotient(a, b), b));
}

// ---- Comparisons and conditions.

inline Term yes(bool value) { return whole(value); }
enum Order : int32_t { BEFORE = -1, SAME, AFTER, UNORDERED };  // with NaN there is none
template <class T>
Order order_of(T a, T b) {
  return a < b ? BEFORE : a > b ? AFTER : a == b ? SAME : UNORDERED;
}
// Compares the whole parts of two fractions; where they are equal, what is left, turned over.
inline Order order_of_fractions(Wide a, Wide under_a, Wide b, Wide under_b) {
  const Wide first = a / under_a - (a % under_a < 0), second = b / under_b - (b % under_b < 0);
  if (first != second) return order_of(first, second);
  const Wide rest_a = a - first * under_a, rest_b = b - second * under_b;
  if (rest_a == 0 || rest_b == 0) return order_of(rest_a != 0, rest_b != 0);
  return order_of_fractions(under_b, rest_b, under_a, rest_a);
}
// As Python: exact, also between a whole number and one of floating point.
inline Order order(const Term& one, const Term& other) {
  if (!are_exact(one, other)) {
    const Order rounded = order_of(approximate(one), approximate(other));
    if (rounded != SAME || one.kind == other.kind) return rounded;
  }
  const Term a = exact(one), b = exact(other);
  return order_of_fractions(a.over, a.under, b.over, b.under);
}
inline bool less(const Term& a, const Term& b) { return order(a, b) == BEFORE; }
inline bool equal(const Term& a, const Term& b) {
  if (a.kind == Term::NONE || b.kind == Term::NONE) return a.kind == b.kind;
  if (a.kind == Term::SEQUENCE && b.kind == Term::SEQUENCE)
    return a.items->size() == b.items->size() && std::equal(a.items->begin(), a.items->end(), b.items->begin(), equal);
  if (a.kind == Term::A_TENSOR || b.kind == Term::A_TENSOR) throw NoValue("it compares a tensor");
  if (a.kind == Term::SEQUENCE || b.kind == Term::SEQUENCE) return false;
  return order(a, b) == SAME;
}
inline bool less_or_equal(const Term& a, const Term& b) {
  const Order found = order(a, b);
  return found == BEFORE || found == SAME;
}
// `is` is for None alone.
inline bool is_none(const Term& a, const Term& b) {
  if (a.kind != Term::NONE && b.kind != Term::NONE) throw NoValue("one side of `is` must be None");
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
  if (a.kind != Term::A_TENSOR) throw NoValue("a part of it must be a tensor");
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
    if (each.over != int64_t(each.over)) throw NoValue("a number in it exceeds 64 bits");
    numbers.push_back(int64_t(each.over));
  }
  return numbers;
}
}  // namespace opsmith
