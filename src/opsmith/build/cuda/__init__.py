"""CUDA C++ from source: NVRTC to a cubin, and the CUDA driver to a running kernel; no header of torch."""
