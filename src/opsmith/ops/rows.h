// Rows of a tensor, which lie along its last dimension, computed in float, or in double for double.
#pragma once
#ifndef __clang__
#pragma GCC optimize("unroll-loops")  // a short loop over memory in the cache takes up to twice the time
#endif

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

template <class T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Below this many elements, threads cost more than they bring.
constexpr int64_t WORTH_THREADS = 32768;

// Where the rows of a tensor begin.
template <class T>
struct Rows {
  T* data;
  int64_t inner;

  template <int N>
  explicit Rows(const View<T, N>& x)
      : data(x.data), inner(x.stride(-1)), sizes(x.sizes), strides(x.strides), outer(x.dim - 1) {
    evenly = true;
    for (int64_t dim = 0; dim + 1 < outer; dim++) evenly &= strides[dim] == strides[dim + 1] * sizes[dim + 1];
  }

  T* operator()(int64_t row) const {
    if (outer == 0) return data;
    if (evenly) return data + row * strides[outer - 1];
    T* begin = data;
    for (int64_t dim = outer - 1; dim >= 0; dim--) {
      begin += row % sizes[dim] * strides[dim];
      row /= sizes[dim];
    }
    return begin;
  }

 private:
  const int64_t *sizes, *strides;
  int64_t outer;
  bool evenly;
};

// The numbers of a row in the dtype that is computed in: where they lie, or in `buffer`.
template <class T>
const Wide<T>* widened(const T* row, int64_t stride, int64_t n, Wide<T>* buffer) {
  if (stride == 1) {
    if constexpr (std::is_same_v<T, Wide<T>>) return row;
    for (int64_t i = 0; i < n; i++) buffer[i] = Wide<T>(row[i]);
  } else {
    for (int64_t i = 0; i < n; i++) buffer[i] = Wide<T>(row[i * stride]);
  }
  return buffer;
}

// Σ term(i) over 0 <= i < n, block by block: a sum of many numbers is rounded less so.
template <class A, class Term>
A sum_of(int64_t n, Term term) {
  constexpr int64_t BLOCK = 2048;
  A sum = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = n - begin < BLOCK ? n : begin + BLOCK;
    A block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t i = begin; i < end; i++) block += term(i);
    sum += block;
  }
  return sum;
}
