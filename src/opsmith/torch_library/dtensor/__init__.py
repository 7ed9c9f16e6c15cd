"""Operators on DTensors: their computation, and the placements of their results."""
