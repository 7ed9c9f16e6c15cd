template <class T> __global__ void scaled(Contiguous<const T, 1> x, double by, Contiguous<T, 1> y) {
  OPSMITH_EACH(i, x.numel()) y[i] = x[i] * T(by);
}
