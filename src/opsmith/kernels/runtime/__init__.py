"""The library between torch's dispatcher and kernels, which runs calls by plans, without Python."""
