// Copies keys and values into their slots: whole rows where a row lies in one piece on both sides.
template <class T>
void copy(View<T, 4> cache, View<const T, 3> rows, const int64_t* slots, int64_t token) {
  const int64_t size = cache.size(1), heads = rows.size(1), dim = rows.size(2);
  T* to = cache.data + slots[token] / size * cache.stride(0) + slots[token] % size * cache.stride(1);
  const T* from = rows.data + token * rows.stride(0);
  for (int64_t head = 0; head < heads; head++) {
    T* out = to + head * cache.stride(2);
    const T* in = from + head * rows.stride(1);
    if (cache.stride(3) == 1 && rows.stride(2) == 1) {
      std::memcpy(out, in, size_t(dim) * sizeof(T));
    } else {
      for (int64_t at = 0; at < dim; at++) out[at * cache.stride(3)] = in[at * rows.stride(2)];
    }
  }
}

template <class T>
void write_kv_cache(View<T, 4> key_cache, View<T, 4> value_cache, View<const T, 3> key, View<const T, 3> value,
                    Contiguous<const int64_t, 1> slots) {
  const int64_t tokens = slots.size(0), places = key_cache.size(0) * key_cache.size(1);
  if (tokens == 0) return;
  for (int64_t token = 0; token < tokens; token++)
    OPSMITH_CHECK(slots(token) < places, "slot %lld of token %lld is beyond the cache, which has %lld slots",
                  (long long)(slots(token)), (long long)(token), (long long)(places));
  const int64_t* to = &slots(0);
#pragma omp parallel for if (tokens * (key.size(1) * key.size(2) + value.size(1) * value.size(2)) > 65536)
  for (int64_t token = 0; token < tokens; token++) {
    if (to[token] < 0) continue;
    copy(key_cache, key, to, token);
    copy(value_cache, value, to, token);
  }
}
