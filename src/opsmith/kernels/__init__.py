"""Kernels that are built from source, as an operator has them."""
