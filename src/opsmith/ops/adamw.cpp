#include "rows.h"

// True if the elements of a tensor fill a piece of memory without gaps, in any order.
template <class T>
bool dense(const View<T>& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t dim = 0; dim < x.dim; dim++)
    if (x.sizes[dim] > 1) dims.emplace_back(x.strides[dim], x.sizes[dim]);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

template <class T, class U>
bool same_sizes(const View<T>& x, const View<U>& y) {
  return x.dim == y.dim && std::equal(x.sizes, x.sizes + x.dim, y.sizes);
}

template <class T, class U>
bool same_strides(const View<T>& x, const View<U>& y) {
  for (int64_t dim = 0; dim < x.dim; dim++)
    if (x.sizes[dim] > 1 && x.strides[dim] != y.strides[dim]) return false;
  return true;
}

template <class A>
struct Step {
  A decay, beta1, beta2, step_size, correction, eps;

  // Updates n elements; each tensor has its own stride.
  template <class T>
  void operator()(T* p, const T* g, T* m, T* v, int64_t n, const std::array<int64_t, 4>& by) const {
    const Step step = *this;
    auto update = [=](T& parameter, T given, T& mean, T& square) {
      const A derivative = A(given);
      const A new_mean = A(mean) + (derivative - A(mean)) * (1 - step.beta1);
      const A new_square = A(square) * step.beta2 + derivative * derivative * (1 - step.beta2);
      mean = T(new_mean);
      square = T(new_square);
      parameter = T(A(parameter) * step.decay - step.step_size * new_mean / (std::sqrt(new_square) * step.correction + step.eps));
    };
    if (by == std::array<int64_t, 4>{1, 1, 1, 1}) {
#pragma omp simd
      for (int64_t i = 0; i < n; i++) update(p[i], g[i], m[i], v[i]);
    } else {
      for (int64_t i = 0; i < n; i++) update(p[i * by[0]], g[i * by[1]], m[i * by[2]], v[i * by[3]]);
    }
  }
};

template <class T>
void adamw_(List<View<T>> parameters, List<View<const T>> derivatives, List<View<T>> means, List<View<T>> squares,
            View<Wide<T>, 0> step, double learning_rate, double beta1, double beta2, double eps, double weight_decay) {
  using A = Wide<T>;
  auto refuse_other = [&](const char* name, const auto& tensors) {
    OPSMITH_CHECK(tensors.size == parameters.size, "%s has %lld tensors for %lld parameters", name,
                  (long long)tensors.size, (long long)parameters.size);
    for (int64_t at = 0; at < parameters.size; at++)
      OPSMITH_CHECK(same_sizes(parameters[at], tensors[at]), "%s[%lld] has a different shape from parameters[%lld]",
                    name, (long long)at, (long long)at);
  };
  refuse_other("derivatives", derivatives);
  refuse_other("means", means);
  refuse_other("squares", squares);

  const double count = double(step()) + 1, correction = 1 / std::sqrt(1 - std::pow(beta2, count));
  const Step<A> update{A(1 - learning_rate * weight_decay),           A(beta1), A(beta2),
                       A(learning_rate / (1 - std::pow(beta1, count))), A(correction), A(eps)};
  step() = A(count);

  // Threads share pieces of about this many elements of all tensors, since models have many small tensors.
  constexpr int64_t PIECE = 16384;
  struct Piece {
    int64_t tensor, begin, end;
    bool rows;  // begin and end count rows if the layouts differ
  };
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (int64_t at = 0; at < parameters.size; at++) {
    const View<T>& x = parameters[at];
    const int64_t elements = x.numel();
    if (elements == 0) continue;
    total += elements;
    const bool rows = !(dense(x) && same_strides(x, derivatives[at]) && same_strides(x, means[at]) &&
                        same_strides(x, squares[at]));
    const int64_t length = rows ? elements / x.size(-1) : elements;
    const int64_t piece = rows ? std::max<int64_t>(1, PIECE / x.size(-1)) : PIECE;
    for (int64_t begin = 0; begin < length; begin += piece)
      pieces.push_back({at, begin, std::min(begin + piece, length), rows});
  }
#pragma omp parallel for schedule(static) if (total > WORTH_THREADS)
  for (size_t at = 0; at < pieces.size(); at++) {
    const Piece& piece = pieces[at];
    const View<T>&x = parameters[piece.tensor], &mean = means[piece.tensor], &square = squares[piece.tensor];
    const View<const T>& derivative = derivatives[piece.tensor];
    if (!piece.rows) {
      const int64_t begin = piece.begin;
      update(x.data + begin, derivative.data + begin, mean.data + begin, square.data + begin, piece.end - begin,
             {1, 1, 1, 1});
      continue;
    }
    const Rows<T> to(x), first(mean), second(square);
    const Rows<const T> from(derivative);
    for (int64_t row = piece.begin; row < piece.end; row++)
      update(to(row), from(row), first(row), second(row), x.size(-1),
             {to.inner, from.inner, first.inner, second.inner});
  }
}
