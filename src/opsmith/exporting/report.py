"""What an export did: the file, its nodes, and how it compared with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """The file beside PyTorch, at one choice of sizes.

    Args:
        sizes: The size of each dynamic axis.
        output: Name of the output.
        difference: The largest difference, as a part of the largest value.
        allowed: The largest that there may be.
        reason: Why that much.
        library: Whether ONNX Runtime had the library of kernels.
    """

    sizes: Mapping[str, int]
    output: str
    difference: float
    allowed: float
    reason: str
    library: bool = False


@dataclass(frozen=True)
class Export:
    """A file that was exported.

    Args:
        path: Where it is.
        body: `function`, `inline` or `node`.
        opset: Version of ONNX's operators.
        inputs, outputs: Their names, in order.
        nodes: How many nodes call each operator; in an inlined file, how many did.
        comparisons: How it compared with PyTorch; empty where it was not to be compared.
        left_out: Sizes that were not compared, since PyTorch refuses them, each with the reason.
        library: Where the library of kernels is; None where there is none.
        native: How many nodes of each operator it computes.
        left_to_bodies: For each operator of which it leaves nodes to their bodies, why.
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
        """Whether it was compared with PyTorch."""
        return bool(self.comparisons)

    @property
    def difference(self) -> float:
        """The largest difference of all comparisons; 0 where there were none."""
        return max((each.difference for each in self.comparisons), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types, for `--json`."""
        return {
            "path": str(self.path),
            "body": self.body,
            "opset": self.opset,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "nodes": dict(self.nodes),
            "verified": self.verified,
            "comparisons": [
                {
                    "sizes": dict(each.sizes),
                    "output": each.output,
                    "difference": each.difference,
                    "allowed": each.allowed,
                    "reason": each.reason,
                    "library": each.library,
                }
                for each in self.comparisons
            ],
            "left_out": list(self.left_out),
            "library": None if self.library is None else str(self.library),
            "native": dict(self.native),
            "left_to_bodies": dict(self.left_to_bodies),
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
            sizes = ", ".join(f"{name} {size}" for name, size in each.sizes.items()) or "as given"
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
