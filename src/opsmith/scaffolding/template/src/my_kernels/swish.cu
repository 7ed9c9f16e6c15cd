// swish for a GPU. `opsmith_cuda.h` is included already; numbers of 16 bits are computed in float.

template <class T>
__global__ void swish(Contiguous<const T> x, Contiguous<const T, 1> beta, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) {
    const float number = float(x[i]);
    y[i] = T(number / (1 + expf(-float(beta[i % beta.size(0)]) * number)));
  }
}
