"""The values of an operator that are no tensors, as attributes of a node."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.build.ort.generating import BITS
from opsmith.core.encoded import OBJECT
from opsmith.core.schema import Argument
from opsmith.core.specification import Specification
from opsmith.exporting.packages import onnx_ir

INTS, FLOATS, STRINGS = "INT", "FLOAT", "STRING"

FORMS = {"SymInt": INTS, "int": INTS, "bool": INTS, "float": FLOATS, "str": STRINGS, "complex": FLOATS}
"""The form of an attribute by an argument's type in torch's schema; what is not here becomes a string."""


def attribute(specification: Specification, leaf: Argument, value: Any) -> Any:
    """An attribute for the value of an argument; None where there is nothing to write.

    A single number for a pair stands there twice, a complex number as its two parts. `FLOAT` has single
    precision: what a body computes with is the value itself.

    Raises:
        ExportError: If the value is not known before the file runs.
    """
    kind = leaf.kind
    if value is None or kind.base is OBJECT:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    if kind.spread and not isinstance(value, list | tuple):
        items = [value] * (kind.length or 1)
    if any(isinstance(item, torch.fx.Node | torch.SymInt | torch.SymFloat | torch.SymBool) for item in items):
        raise errors.ExportError(
            "an argument that is no tensor follows from a dynamic axis, and an attribute is fixed",
            operator=specification.name,
            argument=leaf.name,
            expected=f"{kind.annotation()} that is the same in every call",
            got=", ".join(map(str, items)),
            where=specification.where,
            hint="let the reference take it from the shape of a tensor, or leave that axis out of `dynamic=`",
        )
    form = FORMS.get(kind.base.schema, STRINGS)
    if kind.base.schema == "Scalar":
        form = INTS if isinstance(value, int) else FLOATS
    plain = _plain(items, form)
    several = kind.sequence or kind.base.schema == "complex"
    suffix = "S" if several else ""
    return onnx_ir.Attr(leaf.name, onnx_ir.AttributeType[form + suffix], plain if several else plain[0])


def bits(leaf: Argument, value: Any) -> Any:
    """An attribute with numbers as they are, which single precision would change; None where it does not.

    Each is the whole number that has the same 64 bits.
    """
    if value is None or leaf.kind.base.schema != "float":
        return None
    items = value if isinstance(value, list | tuple) else [value]
    wide = struct.unpack(f"<{len(items)}q", struct.pack(f"<{len(items)}d", *items))
    single = torch.tensor([float(item) for item in items], dtype=torch.float64)
    if torch.allclose(single.float().double(), single, rtol=0.0, atol=0.0, equal_nan=True):
        return None
    made = onnx_ir.AttrInt64s if leaf.kind.sequence else onnx_ir.AttrInt64
    return made(leaf.name + BITS, wide if leaf.kind.sequence else wide[0])


def _plain(items: Sequence[Any], form: str) -> list[Any]:
    if form == INTS:
        return [int(item) for item in items]
    if form == STRINGS:
        return [item if isinstance(item, str) else str(item).removeprefix("torch.") for item in items]
    return [
        part
        for item in items
        for part in ((item.real, item.imag) if isinstance(item, complex) else (float(item),))
    ]
