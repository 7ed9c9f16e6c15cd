"""Kernels in C++ as custom operators of ONNX Runtime."""
