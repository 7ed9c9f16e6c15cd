"""Judging of numbers: right answers with bounds of their rounding errors, and a comparison with them."""
