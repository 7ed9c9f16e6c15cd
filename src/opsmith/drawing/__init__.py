"""Drawing graphs: what autograd recorded, what a module computes, what an operator consists of."""

from opsmith.drawing.dot import to_dot
from opsmith.drawing.drawing import draw, encoded
from opsmith.drawing.folding import fitting, folded
from opsmith.drawing.graph import Edge, Form, Graph, Group, Node, Saved
from opsmith.drawing.page import Figure, figure, to_page
from opsmith.drawing.tracing import Options, trace

__all__ = [
    "Edge",
    "Figure",
    "Form",
    "Graph",
    "Group",
    "Node",
    "Options",
    "Saved",
    "draw",
    "encoded",
    "figure",
    "fitting",
    "folded",
    "to_dot",
    "to_page",
    "trace",
]
