"""Child processes: isolated properties, and kernels under sanitizers."""
