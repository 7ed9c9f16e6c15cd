"""Libraries that give kernels in C++ to torch's dispatcher without Python."""
