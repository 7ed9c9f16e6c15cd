"""Dynamic axes as `dynamic=` gives them: negative ones count from the end."""

from __future__ import annotations

import torch

from opsmith.exporting.model import read_axes


def test_a_negative_axis_counts_from_the_end() -> None:
    axes = read_axes({"x": {-1: "width", 0: "batch"}}, ["x"], [torch.ones(2, 3, 4)])
    assert axes.of == ({2: "width", 0: "batch"},)
