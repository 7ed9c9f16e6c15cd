"""What a node in autograd's graph is of: the operator, the inputs it leads to, names of what it saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities


@dataclass(frozen=True)
class RecordedAs:
    """An operator's node.

    Args:
        specification: The operator, as it was when the node was made.
        saved: Names of the saved tensors, in order: inputs and results.
        inputs: Names of the inputs whose gradients it computes, in the order of its edges.
    """

    specification: Specification
    saved: tuple[str, ...]
    inputs: tuple[str, ...] = ()


def recorded_as(node: Any) -> RecordedAs | None:
    """The operator that a node is of; None for one of torch's, or of a Function that was not adopted.

    Example:
        >>> import torch, opsmith
        >>> found = recorded_as(opsmith.ops.exp(torch.ones(2, requires_grad=True)).grad_fn)
        >>> found.specification.name, found.saved, found.inputs
        ('opsmith::exp', ('result',), ('x',))
    """
    written: Any = getattr(capabilities.forward_class(node), "recorded_as", None)
    if isinstance(written, RecordedAs):
        names = written.specification.schema.names
        return RecordedAs(written.specification, written.saved, _needed(node, names, 0))
    target = getattr(node, "target", None)
    specification = getattr(target, "specification", None)
    if target is None or not isinstance(specification, Specification):
        return None
    flattening = target.flattening
    labels = [label for name in specification.schema.names for label in flattening.labels(name)]
    leading = len(node.needs_input_grad) - len(labels)
    return RecordedAs(specification, _kept(node), _needed(node, labels, leading))


def _needed(node: Any, labels: Any, leading: int) -> tuple[str, ...]:
    needs = node.needs_input_grad[leading:]
    return tuple(label for label, needed in zip(labels, needs, strict=True) if needed)


def _kept(node: Any) -> tuple[str, ...]:
    """Names of the tensors that a general node keeps; those of an adopted class have none."""
    items = getattr(getattr(node, "kept", None), "items", ())
    found: dict[int, str] = {}
    for name, is_list, places in items:
        for position, place in enumerate(places):
            if isinstance(place, int):
                found[place] = f"{name}[{position}]" if is_list else name
    return tuple(found[place] for place in sorted(found))
