// Involution (Li et al., CVPR 2021): a kernel for each pixel, the same for all channels of a group.
//
//   y[b, c, p, q] = sum over i, j of x[b, c, p S + i - pad, q S + j - pad] weight[b, g(c), i, j, p, q]
//
// K and S are constants, so that loops over the kernel are unrolled and divisions by S are cheap; sizes are
// not, so that one cubin serves all of them.

template <class T, int K, int S>
__global__ void involution(Contiguous<const T, 4> x, Contiguous<const T, 6> weight, int stride, int padding,
                           Contiguous<T, 4> y) {
  const int C = x.size(1), H = x.size(2), W = x.size(3), G = weight.size(1), P = y.size(2), Q = y.size(3);
  OPSMITH_EACH(at, y.numel()) {
    const int q = at % Q, p = at / Q % P, c = at / Q / P % C;
    const int64_t b = at / Q / P / C, g = c / (C / G);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < K; i++) {
      const int h = p * S + i - padding;
      if (h < 0 || h >= H) continue;
#pragma unroll
      for (int j = 0; j < K; j++) {
        const int w = q * S + j - padding;
        if (w < 0 || w >= W) continue;
        sum += float(x[((b * C + c) * H + h) * W + w]) *
               float(weight[((((b * G + g) * K + i) * K + j) * P + p) * Q + q]);
      }
    }
    y[at] = T(sum);
  }
}

template <class T, int K, int S>
__global__ void involution_grad_x(Contiguous<const T, 4> dy, Contiguous<const T, 6> weight, int height,
                                  int width, int stride, int padding, Contiguous<T, 4> grad_x) {
  const int C = dy.size(1), P = dy.size(2), Q = dy.size(3), G = weight.size(1);
  OPSMITH_EACH(at, grad_x.numel()) {
    const int w = at % width, h = at / width % height, c = at / width / height % C;
    const int64_t b = at / width / height / C, g = c / (C / G);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < K; i++) {
      const int ps = h + padding - i;
      if (ps < 0 || ps % S || ps / S >= P) continue;
#pragma unroll
      for (int j = 0; j < K; j++) {
        const int qs = w + padding - j;
        if (qs < 0 || qs % S || qs / S >= Q) continue;
        const int p = ps / S, q = qs / S;
        sum += float(dy[((b * C + c) * P + p) * Q + q]) *
               float(weight[((((b * G + g) * K + i) * K + j) * P + p) * Q + q]);
      }
    }
    grad_x[at] = T(sum);
  }
}

template <class T, int K, int S>
__global__ void involution_grad_weight(Contiguous<const T, 4> dy, Contiguous<const T, 4> x, int groups,
                                       int size, int stride, int padding, Contiguous<T, 6> grad_weight) {
  const int C = x.size(1), H = x.size(2), W = x.size(3), P = dy.size(2), Q = dy.size(3);
  OPSMITH_EACH(at, grad_weight.numel()) {
    const int q = at % Q, p = at / Q % P, j = at / Q / P % K, i = at / Q / P / K % K;
    const int g = at / Q / P / (K * K) % groups, h = p * S + i - padding, w = q * S + j - padding;
    const int64_t b = at / Q / P / (K * K) / groups;
    float sum = 0;
    if (h >= 0 && h < H && w >= 0 && w < W)
      for (int c = g * (C / groups); c < (g + 1) * (C / groups); c++)
        sum += float(dy[((b * C + c) * P + p) * Q + q]) * float(x[((b * C + c) * H + h) * W + w]);
    grad_weight[at] = T(sum);
  }
}
