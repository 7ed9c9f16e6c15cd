"""Kernels in C++ under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of their own."""
