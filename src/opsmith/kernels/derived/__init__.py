"""Kernels that are derived from the reference: fused forwards and backwards, compiled by Inductor."""
