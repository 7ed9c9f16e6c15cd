"""Kernels in Triton: their source, Triton's interpreter, and cubins compiled ahead of time."""
