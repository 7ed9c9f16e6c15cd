// A histogram, to which all blocks add, and a sum in two launches.

// Each block counts in shared memory, and adds what it has to the counts of all, which begin at 0.
__global__ void histogram(Contiguous<const int64_t> x, int bins, Contiguous<int64_t, 1> counts) {
  int* own = opsmith::shared_memory<int>();
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) own[bin] = 0;
  __syncthreads();
  OPSMITH_EACH(i, x.numel()) {
    if (x[i] >= 0 && x[i] < bins) atomicAdd(&own[x[i]], 1);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x)
    if (own[bin]) atomicAdd((unsigned long long*)&counts[bin], (unsigned long long)own[bin]);
}

// The sum of a number of each thread; the first thread of the block has it.
template <class T>
__device__ T sum_of_block(T sum) {
  __shared__ T held[32];
  for (int step = 16; step; step /= 2) sum += __shfl_down_sync(0xffffffff, sum, step);
  if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return sum;
  for (int warp = 1; warp < int(blockDim.x / 32); warp++) sum += held[warp];
  return sum;
}

template <class T>
__global__ void partial_sums(Contiguous<const T> x, Contiguous<T, 1> sums) {
  T sum = 0;
  OPSMITH_EACH(i, x.numel()) sum += x[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class T>
__global__ void fold(Contiguous<const T, 1> sums, Contiguous<T, 0> y) {
  T sum = 0;
  for (int64_t i = threadIdx.x; i < sums.numel(); i += blockDim.x) sum += sums[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) y[0] = sum;
}
