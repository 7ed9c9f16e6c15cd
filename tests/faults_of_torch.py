"""Cases that one version of torch gets wrong, for functions without opsmith too, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

_BASIS = "cannot trace the basis of a Jacobian of several tensors: `diagonal(offset)` with a traced offset"
_FLATTEN = "refuses to flatten a DTensor that is sharded in a dimension after the first of those"
_TANGENT = "compiled code refuses a tensor that came with a tangent, as of any function"

FAULTS: dict[str, dict[str, str]] = {
    "2.11": {
        "jacfwd": _BASIS,
        "hessian": _BASIS,
        "jacrev-jacfwd": _BASIS,
        "list-and-two-results-jacrev": _BASIS,
        "linear-without-bias": _FLATTEN,
        "involution": _FLATTEN,
        "fake_stride": "its opcheck does not compare strides",
        "custom_op_defined_again": "defines no custom_op anew whose fake kernel somebody else registered",
        "object_argument": "guards no identity of an object: a call that is given one breaks the graph",
        "generator_argument": "cannot trace an operation that is given a generator made on the way",
    },
    "2.14": {"from_outside": _TANGENT},
    "2.15": {
        "from_outside": _TANGENT,
        "used_later": "compiled code reads a clone after an operator has written its original",
    },
}
"""What torch does wrong, by what a test calls the case."""


def fault(*names: str) -> str | None:
    """The fault of this torch in a case that has any of these names."""
    known = FAULTS.get(".".join(torch.__version__.split(".")[:2]), {})
    return next((known[name] for name in names if name in known), None)


def marked(cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`, with a strict `xfail` mark on those that this torch gets wrong.

    Args:
        cases: Names, tuples of values, or what `pytest.param` returns; a fault is known by one of the names,
            or by all, joined by hyphens.
    """
    return [_marked(case) for case in cases]


def _marked(case: Any) -> Any:
    marks, name = getattr(case, "marks", ()), getattr(case, "id", None)
    values = getattr(case, "values", case)
    values = values if isinstance(values, tuple) else (values,)
    texts = [value for value in values if isinstance(value, str)]
    reason = fault("-".join(texts), *texts)
    if reason is None:
        return case
    return pytest.param(*values, id=name, marks=(*marks, pytest.mark.xfail(reason=reason, strict=True)))
