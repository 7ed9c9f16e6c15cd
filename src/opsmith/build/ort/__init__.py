"""Kernels in C++ as a library of custom operators for ONNX Runtime."""
