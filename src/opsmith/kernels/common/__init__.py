"""Parts that the languages of kernels share."""
