"""Origin of an operator that was registered with torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opsmith.core.functional_form import on_copies
from opsmith.core.kernels import Kernel
from opsmith.core.location import where
from opsmith.core.origins.declared import Origin, Own, Part
from opsmith.core.schema import Schema


@dataclass(frozen=True)
class LibraryOperator(Origin):
    """An operator that was registered with torch elsewhere, and the parts that it has.

    Args:
        subject: The operator's `OpOverload`, `torch.ops.namespace.name.default`.
        devices: Device types that it has kernels for; empty if one kernel serves all.
        served: Device types that it computes on, as far as they are known.
        rules: For each part, the device types for which it has the part; `""` for a part for all types.
        custom: The `CustomParts` of a `torch.library.custom_op`.
        unknown: Value in the source hash for functions that Python does not know, if it has such functions.
    """

    subject: Any
    devices: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    rules: Mapping[Part, frozenset[str]] = field(default_factory=dict)
    custom: Any = None
    unknown: object = None

    kind = "library"
    registered = True
    computes_by = "the operator's own kernel"

    def own(self, part: Part, device: str = "") -> Own | None:
        """Return a part that it was registered with."""
        devices = self.rules.get(part)
        if not devices or (device and device not in devices):
            return None
        formula = self.custom.backward if self.custom and part == "gradient" else None
        name = {"forward": "kernels", "fake": "fake kernel"}.get(part, "rule")
        return Own(f"registered {name}", formula, where(formula) if formula else "")

    def functional(self, schema: Schema, reference: Callable[..., Any], *, faked: bool) -> dict[str, Any]:
        """Return the fields that differ in the functional form: kernels and a fake kernel run on copies."""
        own, on_copy = next(iter(self.sources()), self.subject), on_copies(self.subject, schema, reference)
        kernels = tuple(Kernel(device, on_copy, None, Kernel(device, own)) for device in self.served)
        if faked or (schema.results and not self.own("fake")):
            return {"kernels": kernels}
        fake = on_copy if self.own("fake") else on_copies(_nothing, schema, reference)
        return {"kernels": kernels, "fake": fake}

    def sources(self) -> tuple[Any, ...]:
        """Return the functions of a `custom_op`."""
        custom = self.custom
        return (custom.function, custom.backward, custom.setup_context, custom.fake) if custom else ()

    def methods(self, names: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return the functions of a `custom_op`, except its fake kernel."""
        return dict(zip(("forward", "backward", "setup_context"), self.sources(), strict=False)), names


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Fake kernel of an operator that returns nothing new: written arguments keep their shape."""
