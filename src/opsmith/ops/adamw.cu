// A step of AdamW: each row of the grid updates one tensor. The step is counted in a launch of its own, once all
// blocks of the first have read it.
#include "rows.cuh"

template <class A>
struct Step {
  A decay, beta1, beta2, step_size, correction, eps;

  template <class T>
  __device__ void operator()(T& parameter, T given, T& mean, T& square) const {
    const A derivative = A(given), new_mean = A(mean) + (derivative - A(mean)) * (1 - beta1);
    const A new_square = A(square) * beta2 + derivative * derivative * (1 - beta2);
    mean = T(new_mean);
    square = T(new_square);
    parameter = T(A(parameter) * decay - step_size * new_mean / (sqrt(new_square) * correction + eps));
  }
};

// True if the elements of both tensors lie alike, and fill one piece of memory.
template <class T, class U>
__device__ bool alike(const View<T>& x, const View<U>& y) {
  int64_t last = 0;
  for (int dim = 0; dim < x.dim; dim++) {
    if (x.sizes[dim] > 1 && x.strides[dim] != y.strides[dim]) return false;
    if (x.sizes[dim] > 1) last += (x.sizes[dim] - 1) * x.strides[dim];
  }
  return last + 1 == x.numel();
}

// Tensors of a list at most: the parameters of a launch are up to 32764 bytes, and a view is 152.
constexpr int TENSORS = 50;

template <class T>
__global__ void __launch_bounds__(256)
adamw_(List<View<T>, TENSORS> parameters, List<View<const T>, TENSORS> derivatives, List<View<T>, TENSORS> means,
       List<View<T>, TENSORS> squares, View<Wide<T>, 0> step, double learning_rate, double beta1, double beta2,
       double eps, double weight_decay) {
  using A = Wide<T>;
  __shared__ Step<A> update;
  if (threadIdx.x == 0) {  // powers in double are slow
    const double count = double(step()) + 1;
    update = {A(1 - learning_rate * weight_decay),           A(beta1), A(beta2),
              A(learning_rate / (1 - pow(beta1, count))), A(1 / sqrt(1 - pow(beta2, count))), A(eps)};
  }
  __syncthreads();
  const View<T>&parameter = parameters[blockIdx.y], &mean = means[blockIdx.y], &square = squares[blockIdx.y];
  const View<const T>& derivative = derivatives[blockIdx.y];
  const bool together = alike(parameter, derivative) && alike(parameter, mean) && alike(parameter, square);
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < parameter.numel(); i += threads) {
    if (together)
      update(parameter.data[i], derivative.data[i], mean.data[i], square.data[i]);
    else
      update(element(parameter, i), element(derivative, i), element(mean, i), element(square, i));
  }
}

template <class T>
__global__ void count(View<Wide<T>, 0> step) {
  step() += 1;
}
