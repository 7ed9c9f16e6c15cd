// swish for the CPU. The parameters are the operator's arguments, and then its result; `opsmith.h` and
// <cmath> are included.

template <class T>
void swish(Contiguous<const T> x, Contiguous<const T, 1> beta, Contiguous<T> y) {
  const int64_t channels = beta.numel(), rows = channels ? x.numel() / channels : 0;
#pragma omp parallel for if (x.numel() > 16384)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t c = 0; c < channels; c++) {
      const int64_t i = row * channels + c;
      y[i] = x[i] / (1 + std::exp(-beta[c] * x[i]));
    }
  }
}
