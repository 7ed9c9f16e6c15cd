"""The stages of the tour, in order. To add one, write a module with `run(context)`, and name it here."""

from __future__ import annotations

from opsmith.tour import checks, digits, exported, line, pictures
from opsmith.tour.stage import Stage

STAGES = (
    Stage("checks", "check every operator that the tour uses", checks.run),
    Stage("linear", "learn a plane with the linear operator", line.run),
    Stage("digits", "read handwritten digits with a network of our own operators", digits.run, ("sklearn",)),
    Stage(
        "onnx",
        "export both models to ONNX, and run them in ONNX Runtime",
        exported.run,
        ("sklearn", "onnx", "onnxscript", "onnxruntime"),
    ),
    Stage(
        "pictures",
        "draw it all, time involution, and write a page about each operator",
        pictures.run,
        ("sklearn", "jinja2", "matplotlib", "onnx", "onnxscript", "onnxruntime", "pygraphviz"),
    ),
)
