#include "product.h"

template <class T> void scaled(Contiguous<const T, 1> x, double by, Contiguous<T, 1> y) {
  for (int64_t i = 0; i < x.numel(); i++) y.data[i] = product(x.data[i], T(by));
}
