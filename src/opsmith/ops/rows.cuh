// Rows of tensors, along the last dimension, computed in float, or in double for double.
#pragma once

template <class T> struct Widening { using type = float; };
template <> struct Widening<double> { using type = double; };
template <class T> using Wide = typename Widening<T>::type;

// Elements that a thread reads or writes at once: 16 bytes if they are contiguous.
template <class T> constexpr int PACK = 16 / sizeof(T);

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// A row of a tensor, whose elements are `stride` apart.
template <class T>
struct Row {
  T* data;
  int64_t stride;

  __device__ T& operator[](int64_t i) const { return data[i * stride]; }
  __device__ bool in_packs() const { return stride == 1 && reinterpret_cast<size_t>(data) % 16 == 0; }

  // Reads or writes elements i N to i N + N - 1.
  template <class A, int N>
  __device__ void load(int64_t i, A (&to)[N]) const {
    if constexpr (N == 1) {
      to[0] = A((*this)[i]);
    } else {
      const auto read = reinterpret_cast<const Pack<T, N>*>(data)[i];
#pragma unroll
      for (int p = 0; p < N; p++) to[p] = A(read.at[p]);
    }
  }
  template <class A, int N>
  __device__ void store(int64_t i, const A (&from)[N]) const {
    if constexpr (N == 1) {
      (*this)[i] = T(from[0]);
    } else {
      Pack<T, N> written;
#pragma unroll
      for (int p = 0; p < N; p++) written.at[p] = T(from[p]);
      reinterpret_cast<Pack<T, N>*>(data)[i] = written;
    }
  }
};

// True if each row of a tensor, along its last dimension, is contiguous and begins at a multiple of a pack.
template <class T, int N>
__device__ bool each_row_in_packs(const View<T, N>& x) {
  bool found = Row<T>{x.data, x.stride(-1)}.in_packs();
  for (int at = 0; at + 1 < x.dim; at++) found &= x.sizes[at] == 1 || x.strides[at] % PACK<T> == 0;
  return found;
}

// The rows of a tensor, in the order of its elements.
template <class T>
struct Rows {
  const View<T>& x;
  bool evenly;  // all rows have the same distance

  __device__ explicit Rows(const View<T>& x) : x(x), evenly(true) {
    for (int at = 0; at + 2 < x.dim; at++) evenly &= x.strides[at] == x.strides[at + 1] * x.sizes[at + 1];
  }
  __device__ Row<T> operator()(int64_t row) const { return evenly ? at<true>(row) : at<false>(row); }
  template <bool EVENLY>
  __device__ Row<T> at(int64_t row) const {
    T* data = x.data;
    int dim = int(x.dim) - 2;
    for (; !EVENLY && dim > 0; dim--) {
      data += row % x.sizes[dim] * x.strides[dim];
      row /= x.sizes[dim];
    }
    return {dim < 0 ? data : data + row * x.strides[dim], x.stride(-1)};
  }
};

template <class T>
__device__ Row<T> row_of(const View<T>& x, int64_t row) {
  return Rows<T>(x)(row);
}

// Element number `index` of a tensor, the last dimension fastest.
template <class T, int N>
__device__ T& element(const View<T, N>& x, int64_t index) {
  T* data = x.data;
  for (int at = int(x.dim) - 1; at >= 0; at--) {
    data += index % x.sizes[at] * x.strides[at];
    index /= x.sizes[at];
  }
  return *data;
}

// Number of the row of this thread: blockDim.x threads share a row, and blockDim.y rows a block.
__device__ inline int64_t row_of_thread() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

// Sums numbers over the threads that share a row, a warp or a whole block; each thread gets the sums.
template <class A, int N>
__device__ void sum_over_row(A (&sums)[N]) {
#pragma unroll
  for (int at = 0; at < N; at++)
    for (int by = 16; by > 0; by /= 2) sums[at] += __shfl_xor_sync(0xffffffff, sums[at], by);
  if (blockDim.x == 32) return;
  __shared__ A parts[N][32];
  __syncthreads();  // all threads have read the parts of an earlier sum
  if (threadIdx.x % 32 == 0)
    for (int at = 0; at < N; at++) parts[at][threadIdx.x / 32] = sums[at];
  __syncthreads();
#pragma unroll
  for (int at = 0; at < N; at++) {
    sums[at] = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) sums[at] += parts[at][warp];
  }
}

template <class A>
__device__ A sum_over_row(A sum) {
  A sums[1] = {sum};
  sum_over_row(sums);
  return sums[0];
}
