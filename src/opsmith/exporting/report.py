"""The result of an export: the file, its nodes, and the comparisons with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """The comparison of one output with PyTorch, at one choice of sizes.

    Args:
        sizes: The size of each dynamic axis.
        output: Name of the output.
        difference: The largest difference, relative to the largest value.
        allowed: The tolerance.
        reason: The derivation of the tolerance.
        library: ONNX Runtime used the library of kernels.
    """

    sizes: Mapping[str, int]
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
        inputs, outputs: Their names, in order.
        nodes: Number of nodes of each operator, in an inlined file before the inlining.
        comparisons: The comparisons with PyTorch; empty without verification.
        left_out: Sizes that were not compared since PyTorch refuses them, each with the reason.
        library: Path of the library of kernels; None without one.
        native: Number of nodes of each operator that the library computes.
        left_to_bodies: For each operator whose nodes are computed by their bodies, the reason.
    """

    path: Path
    body: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: Mapping[str, int]
    comparisons: tuple[Comparison, ...] = ()
    left_out: tuple[str, ...] = ()
    library: Path | None = None
    native: Mapping[str, int] = field(default_factory=dict)
    left_to_bodies: Mapping[str, str] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        """The file was compared with PyTorch."""
        return bool(self.comparisons)

    @property
    def difference(self) -> float:
        """The largest difference of all comparisons; 0 without any."""
        return max((each.difference for each in self.comparisons), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The export in JSON's types."""
        return {
            **asdict(self),
            "path": str(self.path),
            "library": None if self.library is None else str(self.library),
            "verified": self.verified,
        }

    def __str__(self) -> str:
        counted = ", ".join(f"{count} of {name}" for name, count in self.nodes.items()) or "none of ours"
        lines = [
            f"{self.path}: {self.body}, opset {self.opset}, {', '.join(self.inputs)} -> "
            f"{', '.join(self.outputs)}",
            f"  nodes: {counted}",
        ]
        if self.library is not None:
            native = ", ".join(f"{count} of {name}" for name, count in self.native.items())
            lines.append(f"  library: {self.library} computes {native}")
        lines += [f"  by its body: {name}: {reason}" for name, reason in self.left_to_bodies.items()]
        for each in self.comparisons:
            sizes = ", ".join(f"{name} {size}" for name, size in each.sizes.items()) or "the given sizes"
            by = ", by the library" * each.library
            lines.append(
                f"  {each.output} at {sizes}{by}: off by {each.difference:.1e}, allowed {each.allowed:.1e}"
            )
        for reason in dict.fromkeys(each.reason for each in self.comparisons):
            lines.append(f"  allowed: {reason}")
        lines += [f"  left out: {each}" for each in self.left_out]
        if not self.verified:
            lines.append("  not compared with PyTorch")
        return "\n".join(lines)
