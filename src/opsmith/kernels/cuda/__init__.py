"""Kernels in CUDA C++: NVRTC compiles them, and the CUDA driver launches them."""
