// A kernel in a file of its own, beside the test that declares it.
template <class T>
void twice(Contiguous<const T> x, double by, Contiguous<T> y) {
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * T(by);
}
