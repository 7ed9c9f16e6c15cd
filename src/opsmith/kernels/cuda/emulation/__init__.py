"""CUDA C++ kernels run on the CPU: threads as fibers, with every access to memory checked."""
