"""Draw graphs: the recorded graph of autograd, the calls of a module, the parts of an operator."""

from opsmith.drawing.graph import Edge, Form, Graph, Group, Node, Saved
from opsmith.drawing.graphviz import to_dot
from opsmith.drawing.grouping import fitting, folded
from opsmith.drawing.page import Figure, figure, to_page
from opsmith.drawing.picture import draw, encoded
from opsmith.drawing.subject import Options
from opsmith.drawing.tracer import trace

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
