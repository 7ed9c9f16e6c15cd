"""Fixtures that the core shares with torch_library."""

from variant_fixtures import _seeded, inputs, name, reference, variant

__all__ = ["_seeded", "inputs", "name", "reference", "variant"]
