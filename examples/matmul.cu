// A product of matrices in tiles: a block computes TILE x TILE numbers of the result. Each number that it reads from
// memory lies in shared memory for TILE products. They are summed in float.
template <class T, int TILE>
__global__ void matmul(View<const T, 2> x, View<const T, 2> y, View<T, 2> z) {
  __shared__ float left[TILE][TILE], right[TILE][TILE];
  const int down = threadIdx.y, across = threadIdx.x;
  const int64_t i = int64_t(blockIdx.x) * TILE + down, j = int64_t(blockIdx.y) * TILE + across, inner = x.size(1);
  float sum = 0;
  for (int64_t k = 0; k < inner; k += TILE) {
    // What is outside of the matrices is zero: every thread comes to the barriers.
    left[down][across] = i < z.size(0) && k + across < inner ? float(x(i, k + across)) : 0;
    right[down][across] = j < z.size(1) && k + down < inner ? float(y(k + down, j)) : 0;
    __syncthreads();  // the tiles are there
#pragma unroll
    for (int at = 0; at < TILE; at++) sum += left[down][at] * right[at][across];
    __syncthreads();  // and have been read, before the next ones are written
  }
  if (i < z.size(0) && j < z.size(1)) z(i, j) = T(sum);
}
