"""The graph of an operator, as a part of a page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opsmith.core.operator import Operator
from opsmith.drawing import Figure, figure, trace


def graph_of(operator: Operator[..., Any]) -> Figure:
    """Reference, what is saved, and formulas, on the first sample, to pan, search and unfold.

    Raises:
        MissingSamplesError: If there is no sample.
    """
    made = figure(trace(operator))
    # A page has a heading of the first level already, and this is no other page.
    return replace(made, markup=made.markup.replace("<h1>", '<p class="title">').replace("</h1>", "</p>"))
