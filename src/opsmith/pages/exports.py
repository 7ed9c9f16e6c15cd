"""What becomes of an operator in ONNX: an export in each kind of body, compared with PyTorch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from opsmith import errors
from opsmith.core.operator import Operator
from opsmith.exporting.request import Body
from opsmith.pages.samples import first_call

BODIES: Mapping[str, str] = {
    "function": "a node of the operator's name, with its reference as a function in the file",
    "inline": "the nodes of the reference",
    "node": "a node of the operator's name, for which a runtime needs a kernel",
}
assert set(BODIES) == {*get_args(Body)}


@dataclass(frozen=True)
class Exported:
    """An export, or why there is none.

    Args:
        body: `function`, `inline` or `node`.
        means: What that is.
        refused: Why it was not exported; empty where it was.
        opset: Version of ONNX's operators.
        nodes: How many nodes call each operator.
        difference: The largest difference from PyTorch, as a part of the largest value.
        allowed: The largest that there may be.
        notes: What was said of it.
    """

    body: str
    means: str
    refused: str = ""
    opset: int = 0
    nodes: Mapping[str, int] = field(default_factory=dict)
    difference: float = 0.0
    allowed: float = 0.0
    notes: tuple[str, ...] = ()


def exports_of(operator: Operator[..., Any]) -> tuple[Exported, ...]:
    """Export the first sample's call in each kind of body, into a folder that goes again.

    Raises:
        MissingSamplesError: If there is no sample.
        MissingExtraError: If a package of ONNX is missing.
    """
    call = first_call(operator)
    from opsmith.exporting import export_onnx  # the packages of ONNX take a second to import

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for body, means in BODIES.items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    made = export_onnx(
                        operator,
                        tuple(call.args),
                        Path(folder) / f"{body}.onnx",
                        kwargs=dict(call.kwargs),
                        body=body,  # type: ignore[arg-type]
                    )
                except errors.MissingExtraError:
                    raise
                except errors.OpsmithError as error:
                    found.append(Exported(body, means, refused=str(error)))
                    continue
            notes = (*made.left_out, *(str(each.message) for each in said if each.category is UserWarning))
            allowed = max((each.allowed for each in made.comparisons), default=0.0)
            found.append(Exported(body, means, "", made.opset, made.nodes, made.difference, allowed, notes))
    return tuple(found)
