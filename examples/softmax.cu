// Softmax of rows, and its gradient: a warp of 32 threads computes a row, and its threads exchange numbers from
// register to register. They are computed in float.

__device__ float sum_of_warp(float mine) {
  for (int by = 16; by > 0; by /= 2) mine += __shfl_xor_sync(0xffffffff, mine, by);
  return mine;
}
__device__ float largest_of_warp(float mine) {
  for (int by = 16; by > 0; by /= 2) mine = fmaxf(mine, __shfl_xor_sync(0xffffffff, mine, by));
  return mine;
}
__device__ int64_t row_of_warp() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

template <class T>
__global__ void softmax(View<const T, 2> x, View<T, 2> y) {
  const int64_t row = row_of_warp(), n = x.size(1);
  if (row >= x.size(0)) return;  // all threads of the warp or none: a shuffle waits for all 32
  float largest = float(x(row, 0)), sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += 32) largest = fmaxf(largest, float(x(row, i)));
  largest = largest_of_warp(largest);
  for (int64_t i = threadIdx.x; i < n; i += 32) sum += expf(float(x(row, i)) - largest);
  sum = sum_of_warp(sum);
  for (int64_t i = threadIdx.x; i < n; i += 32) y(row, i) = T(expf(float(x(row, i)) - largest) / sum);
}

template <class T>
__global__ void softmax_backward(View<const T, 2> grad, View<const T, 2> y, View<T, 2> grad_x) {
  const int64_t row = row_of_warp(), n = y.size(1);
  if (row >= y.size(0)) return;
  float along = 0;
  for (int64_t i = threadIdx.x; i < n; i += 32) along += float(grad(row, i)) * float(y(row, i));
  along = sum_of_warp(along);
  for (int64_t i = threadIdx.x; i < n; i += 32) grad_x(row, i) = T(float(y(row, i)) * (float(grad(row, i)) - along));
}
