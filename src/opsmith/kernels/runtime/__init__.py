"""The library between torch's dispatcher and kernels: their calls by plans, without Python."""
