"""Immutable values that describe an operator, and the handle that holds them.

Nothing here registers anything with torch: `opsmith.torch_library` does.
"""
