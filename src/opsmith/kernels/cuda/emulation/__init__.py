"""CUDA C++ kernels on the CPU: threads run as fibers, with a check of every memory access."""
