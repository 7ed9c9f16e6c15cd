"""Numeric properties: results and derivatives have the right values."""
