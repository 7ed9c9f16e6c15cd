"""Samples of an operator: the author's and derived samples, with their layouts and values."""
