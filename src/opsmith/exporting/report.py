"""The result of an export: the file, its nodes, and the comparisons with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opsmith.display import short_repr

GIVEN = "of the example"
"""The given values, in words."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of one output with PyTorch, on one choice of inputs.

    Args:
        sizes: The size of each dynamic axis.
        values: The values of the inputs, in words.
        output: Name of the output.
        difference: The largest difference, relative to the largest value.
        allowed: The tolerance.
        reason: The derivation of the tolerance.
        library: True if ONNX Runtime used the library of kernels.
    """

    __repr__ = short_repr

    sizes: Mapping[str, int]
    values: str
    output: str
    difference: float
    allowed: float
    reason: str
    library: bool = False


@dataclass(frozen=True)
class Export:
    """An exported file.

    Args:
        path: Path of the file.
        body: `function`, `inline` or `node`.
        opset: Version of ONNX's operators.
        inputs, outputs: Names of the inputs and outputs, in order.
        calls: Number of calls of each operator in the model.
        comparisons: The comparisons of the file with PyTorch; empty without verification.
        left_out: Sizes and values that were not compared since PyTorch refuses them, with the reasons.
        library: Path of the library of kernels; None if there is none.
        native: Number of nodes of each operator that the library computes.
        left_to_bodies: For each operator whose nodes are computed by their bodies, the reason.
        unverified: The reason that the file is not verified; empty if it is.
    """

    __repr__ = short_repr

    path: Path
    body: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: Mapping[str, int]
    comparisons: tuple[Comparison, ...] = ()
    left_out: tuple[str, ...] = ()
    library: Path | None = None
    native: Mapping[str, int] = field(default_factory=dict)
    left_to_bodies: Mapping[str, str] = field(default_factory=dict)
    unverified: str = ""

    @property
    def nodes(self) -> Mapping[str, int]:
        """Number of nodes of each operator in the file; an inlined operator has no nodes."""
        return {} if self.body == "inline" else self.calls

    @property
    def verified(self) -> bool:
        """True if ONNX Runtime with this file, and its library, agreed with PyTorch on three inputs."""
        return not self.unverified

    @property
    def difference(self) -> float:
        """The largest difference of all comparisons; 0 if there are none."""
        return max((each.difference for each in self.comparisons), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The export as values of JSON types."""
        return {
            **asdict(self),
            "path": str(self.path),
            "library": None if self.library is None else str(self.library),
            "nodes": dict(self.nodes),
            "verified": self.verified,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.body}, opset {self.opset}, {', '.join(self.inputs)} -> "
            f"{', '.join(self.outputs)}",
            f"  nodes: {_counted(self.nodes) or 'none of opsmith'}",
            *[f"  inlined: {_counted(self.calls)}"] * (self.body == "inline" and bool(self.calls)),
        ]
        if self.library is not None:
            lines.append(f"  library: {self.library} computes {_counted(self.native)}")
        lines += [f"  by its body: {name}: {reason}" for name, reason in self.left_to_bodies.items()]
        alike: dict[str, list[Comparison]] = {}
        for each in self.comparisons:
            sizes = ", ".join(f"{name} {size}" for name, size in each.sizes.items()) or "the given sizes"
            alike.setdefault(f"{each.output} at {sizes}{', by the library' * each.library}", []).append(each)
        for text, those in alike.items():
            worst = max(those, key=lambda each: each.difference)
            times = f", on {len(those)} inputs" * (len(those) > 1)
            lines.append(f"  {text}{times}: off by {worst.difference:.1e}, allowed {worst.allowed:.1e}")
        for reason in dict.fromkeys(each.reason for each in self.comparisons):
            lines.append(f"  allowed: {reason}")
        lines += [f"  left out: {each}" for each in self.left_out]
        if self.unverified:
            lines.append(f"  not verified: {self.unverified}")
        return "\n".join(lines)


def _counted(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in nodes.items())
