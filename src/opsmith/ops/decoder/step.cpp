template <class T>
void begin_decode_step(View<T, 2> x, View<T, 2> residual, View<int64_t, 1> positions, View<int64_t, 1> slots,
                       View<int64_t, 1> lengths, View<const int64_t, 1> tokens, View<const T, 2> embedding,
                       View<const int64_t, 2> block_table, int64_t block_size) {
  const int64_t count = x.size(0), width = x.size(1);
  OPSMITH_CHECK(block_size > 0, "block_size is %lld", (long long)block_size);
  for (int64_t n = 0; n < count; n++) {
    OPSMITH_CHECK(tokens(n) >= 0 && tokens(n) < embedding.size(0), "token %lld of sequence %lld is not in the embedding, "
                  "which has %lld tokens", (long long)tokens(n), (long long)n, (long long)embedding.size(0));
    OPSMITH_CHECK(lengths(n) >= 0 && lengths(n) < block_table.size(1) * block_size,
                  "sequence %lld has %lld tokens, but its %lld blocks hold no more tokens", (long long)n,
                  (long long)lengths(n), (long long)block_table.size(1));
    OPSMITH_CHECK(block_table(n, lengths(n) / block_size) >= 0, "sequence %lld has no block for one more token",
                  (long long)n);
  }
  for (int64_t n = 0; n < count; n++) {
    const int64_t at = lengths(n);
    positions(n) = at;
    slots(n) = block_table(n, at / block_size) * block_size + at % block_size;
    lengths(n) = at + 1;
    for (int64_t i = 0; i < width; i++) {
      x(n, i) = embedding(tokens(n), i);
      residual(n, i) = 0;
    }
  }
}
