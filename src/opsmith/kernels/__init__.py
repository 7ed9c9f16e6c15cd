"""Kernels of operators that are built from source."""
