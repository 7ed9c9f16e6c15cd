"""Numerical analysis: derivatives, finite differences, their noise, rounding bounds and comparisons."""
