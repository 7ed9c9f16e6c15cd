"""Properties of kernels: memory, resources, interpreters and the sizes that they take."""
