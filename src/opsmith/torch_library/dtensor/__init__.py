"""Operators on DTensors: where they run, and where their results lie."""
