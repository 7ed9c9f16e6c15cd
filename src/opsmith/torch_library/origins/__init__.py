"""Operators adopted from `autograd.Function` classes: their context, forward, backward and node."""
