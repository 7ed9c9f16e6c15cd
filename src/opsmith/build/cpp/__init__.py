"""C++ kernels: the author's function over views of tensors, and all that is between it and the dispatcher."""
