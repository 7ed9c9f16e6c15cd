"""Judging of numbers: right answers with a bound of their rounding errors, and one comparison with them."""
