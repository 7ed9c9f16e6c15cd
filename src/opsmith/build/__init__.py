"""Build kernels from source: the compiler, the cache of its output, source text and symbols."""
