"""Differentiation of operators: reverse mode, forward mode, and transforms of `torch.func`."""
