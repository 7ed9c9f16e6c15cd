// A step of AdamW. The first launch counts the step, and computes the factors that all elements share. In the
// second launch each row of the grid updates one tensor.
#include "rows.cuh"

template <class A>
struct Step {
  A decay, beta1, beta2, step_size, correction, eps;

  __device__ explicit Step(const Contiguous<const A, 1>& x)
      : decay(x[0]), beta1(x[1]), beta2(x[2]), step_size(x[3]), correction(x[4]), eps(x[5]) {}
  __device__ void operator()(A& parameter, A derivative, A& mean, A& square) const {
    mean += (derivative - mean) * (1 - beta1);
    square = square * beta2 + derivative * derivative * (1 - beta2);
    parameter = parameter * decay - step_size * mean / (sqrt(square) * correction + eps);
  }
};

// N elements of each of the four tensors, from element i * N on; they are contiguous.
template <int N, class T, class A>
__device__ void update_together(const Step<A>& update, int64_t i, const Row<T>& parameter,
                                const Row<const T>& derivative, const Row<T>& mean, const Row<T>& square) {
  A p[N], g[N], m[N], v[N];
  parameter.load(i, p);
  derivative.load(i, g);
  mean.load(i, m);
  square.load(i, v);
#pragma unroll
  for (int at = 0; at < N; at++) update(p[at], g[at], m[at], v[at]);
  parameter.store(i, p);
  mean.store(i, m);
  square.store(i, v);
}

// True if both tensors have the same dense layout.
template <class T, class U>
__device__ bool alike(const View<T>& x, const View<U>& y) {
  int64_t last = 0;
  for (int dim = 0; dim < x.dim; dim++) {
    if (x.sizes[dim] > 1 && x.strides[dim] != y.strides[dim]) return false;
    if (x.sizes[dim] > 1) last += (x.sizes[dim] - 1) * x.strides[dim];
  }
  return last + 1 == x.numel();
}

// Maximum number of tensors of a list: the parameters of a launch are at most 32764 bytes, a view has 152.
constexpr int TENSORS = 50;

// Powers are computed in double, which is slow, so only one thread does it.
template <class T>
__global__ void count(View<Wide<T>, 0> step, double learning_rate, double beta1, double beta2, double eps,
                      double weight_decay, Contiguous<Wide<T>, 1> same) {
  using A = Wide<T>;
  step() += 1;
  const double count = double(step());
  same[0] = A(1 - learning_rate * weight_decay);
  same[1] = A(beta1);
  same[2] = A(beta2);
  same[3] = A(learning_rate / (1 - pow(beta1, count)));
  same[4] = A(1 / sqrt(1 - pow(beta2, count)));
  same[5] = A(eps);
}

template <class T>
__global__ void __launch_bounds__(256)
adamw_(List<View<T>, TENSORS> parameters, List<View<const T>, TENSORS> derivatives, List<View<T>, TENSORS> means,
       List<View<T>, TENSORS> squares, Contiguous<const Wide<T>, 1> same) {
  const View<T>& parameter = parameters[blockIdx.y];
  const int64_t n = parameter.numel(), begin = int64_t(blockIdx.x) * blockDim.x, first = begin + threadIdx.x;
  if (begin >= n) return;  // the grid is as wide as the largest tensor needs
  const Step<Wide<T>> update(same);
  const View<T>&mean = means[blockIdx.y], &square = squares[blockIdx.y];
  const View<const T>& derivative = derivatives[blockIdx.y];
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  if (!(alike(parameter, derivative) && alike(parameter, mean) && alike(parameter, square))) {
    for (int64_t i = first; i < n; i += threads)
      update_together<1>(update, 0, Row<T>{&element(parameter, i), 1}, Row<const T>{&element(derivative, i), 1},
                         Row<T>{&element(mean, i), 1}, Row<T>{&element(square, i), 1});
    return;
  }
  const Row<T> p{parameter.data, 1}, m{mean.data, 1}, v{square.data, 1};
  const Row<const T> g{derivative.data, 1};
  constexpr int N = PACK<T>;
  const int64_t packs = p.in_packs() && g.in_packs() && m.in_packs() && v.in_packs() ? n / N : 0;
  for (int64_t i = first; i < packs; i += threads) update_together<N>(update, i, p, g, m, v);
  for (int64_t i = packs * N + first; i < n; i += threads) update_together<1>(update, i, p, g, m, v);
}
