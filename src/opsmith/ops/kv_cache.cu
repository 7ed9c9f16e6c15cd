// Copies keys and values into their slots. A block copies a token; its threads cover a head (x) and the heads
// (y).
#include "rows.cuh"

// Copies the heads of a token, N numbers of a head at a time.
template <int N, class T>
__device__ void copy(const View<const T, 3>& rows, int64_t token, const View<T, 4>& cache, T* to) {
  const T* from = rows.data + token * rows.stride(0);
#pragma unroll 1
  for (int64_t at = threadIdx.x; at < rows.size(2) / N; at += blockDim.x) {
#pragma unroll 1
    for (int64_t head = threadIdx.y; head < rows.size(1); head += blockDim.y) {
      T numbers[N];
      Row<const T>{from + head * rows.stride(1), rows.stride(2)}.load(at, numbers);
      Row<T>{to + head * cache.stride(2), cache.stride(3)}.store(at, numbers);
    }
  }
}

template <class T>
__device__ void copy(const View<const T, 3>& rows, int64_t token, int64_t slot, const View<T, 4>& cache) {
  const int64_t size = cache.size(1);
  T* to = cache.data + slot / size * cache.stride(0) + slot % size * cache.stride(1);
  if (rows.size(2) % PACK<T> == 0 && each_row_in_packs(rows) && each_row_in_packs(cache))
    copy<PACK<T>>(rows, token, cache, to);
  else
    copy<1>(rows, token, cache, to);
}

template <class T>
__global__ void __launch_bounds__(256)
write_kv_cache(View<T, 4> key_cache, View<T, 4> value_cache, View<const T, 3> key, View<const T, 3> value,
               View<const int64_t, 1> slots) {
  const int64_t token = blockIdx.x, slot = slots(token);
  if (slot < 0) return;
  assert(slot < key_cache.size(0) * key_cache.size(1));
  copy(key, token, slot, key_cache);
  copy(value, token, slot, value_cache);
}
