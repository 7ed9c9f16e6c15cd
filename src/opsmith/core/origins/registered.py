"""Origin of an operator that was registered with torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from opsmith.core.location import where
from opsmith.core.origins.declared import Origin, Own, Part


@dataclass(frozen=True)
class LibraryOperator(Origin):
    """An operator that was registered with torch elsewhere, and the parts that it has.

    Args:
        overload: The operator's `OpOverload`, `torch.ops.namespace.name.default`.
        devices: Device types that it has kernels for; empty if one kernel serves all.
        autograd: Device types on which it has its own autograd.
        autocast: Device types on which it has a rule for autocast.
        fake: True if it has a fake kernel.
        vmap: True if it has a rule for `vmap`.
        served: Device types that it computes on, as far as they are known.
        parts: The `CustomParts` of a `torch.library.custom_op`.
        unknown: Stands in the source hash for functions that Python does not know, if it has some.
    """

    overload: Any
    devices: tuple[str, ...] = ()
    autograd: frozenset[str] = frozenset()
    autocast: frozenset[str] = frozenset()
    fake: bool = False
    vmap: bool = False
    served: tuple[str, ...] = ()
    parts: Any = None
    unknown: object = None

    kind = "library"

    @property
    def subject(self) -> Any:
        """The operator of torch."""
        return self.overload

    @property
    def function(self) -> Any:
        """The function of a `custom_op`; None for other operators."""
        return self.parts and self.parts.function

    def own(self, part: Part, device: str = "") -> Own | None:
        """Return a part that it was registered with."""
        rule = Own("rule that it was registered with")
        match part:
            case "forward":
                return Own("kernels that it was registered with")
            case "gradient" if device in self.autograd or (self.autograd and not device):
                formula = self.parts and self.parts.backward
                return Own("autograd that it was registered with", formula, where(formula) if formula else "")
            case "fake" if self.fake:
                return Own("fake kernel that it was registered with")
            case "vmap" if self.vmap:
                return rule
            case "autocast" if device in self.autocast or (self.autocast and not device):
                return rule
            case _:
                return None

    def sources(self) -> tuple[Any, ...]:
        """Return the functions of a `custom_op`."""
        custom = self.parts
        return () if custom is None else (custom.function, custom.backward, custom.setup_context, custom.fake)

    def codes(self) -> Iterable[tuple[Callable[..., Any], int | None]]:
        """Return the functions of a `custom_op` but its fake kernel."""
        custom = self.parts
        if custom is not None:
            yield from ((custom.function, 0), (custom.setup_context, None), (custom.backward, None))

    def words(self, about: Literal["forward", "random", "samples"]) -> str:
        """Return words of messages."""
        return "the operator's own kernel" if about == "forward" else super().words(about)
