"""Samples of an operator: the author's, those derived from them, and their layouts and values."""
