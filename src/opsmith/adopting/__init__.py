"""`opsmith.adopt`: what people have becomes an operator, and gets what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opsmith import errors
from opsmith.core.calls import shown
from opsmith.core.operator import Operator

__all__ = ["adopt"]


def adopt(
    subject: Any,
    name: str | None = None,
    /,
    *,
    reference: Callable[..., Any] | None = None,
    samples: Any = None,
    signature: Any = None,
    kind: str = "true",
) -> Operator[..., Any]:
    """Make an operator of one that was registered with torch elsewhere, in C++ or Python.

    Args:
        subject: An operator: `torch.ops.ns.name`, one of its overloads, or a `torch.library.custom_op`.
        name: Not for an operator, which has a name.
        reference: The mathematics in plain PyTorch, with type hints; arguments are matched by position.
        samples: Representative inputs, as for `@op.samples`.
        signature: Not for an operator, which has a schema.
        kind: `"true"`; surrogate gradients are attached, `op.surrogate_gradients(...)`.

    Returns:
        The handle. The operator keeps its name and what it has; calls of `torch.ops.ns.name` gain the rest.

    Raises:
        UsageError, SignatureMismatchError, UnsupportedTypeError, NameTakenError, CapturedTensorError, and
        those of `opsmith.operator` about the reference: As their names say.

    Example:
        >>> import torch, opsmith
        >>> @torch.library.custom_op("demo::theirs", mutates_args=())
        ... def theirs(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.tensor(x.numpy()).sin()
        >>> def reference(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sin()
        >>> op = opsmith.adopt(theirs, reference=reference)
        >>> torch.func.grad(theirs)(torch.tensor(0.0))
        tensor(1.)
    """
    from opsmith.adopting.registered import adopt_registered, is_operator

    if not is_operator(subject):
        raise errors.UsageError(
            "this cannot be adopted",
            expected="an operator, such as `torch.ops.ns.name` or a `torch.library.custom_op`",
            got=shown(subject),
            mend="`@opsmith.operator` declares a function as an operator",
        )
    given = {"name": (name, None), "signature": (signature, None), "kind": (kind, "true")}
    for argument, (value, plain) in given.items():
        if value != plain:
            raise errors.UsageError(
                f"`{argument}` says nothing about an operator that was registered elsewhere",
                argument=argument,
                got=repr(value),
                mend="leave it out"
                + ("; attach `op.surrogate_gradients(...)` to the result" if argument == "kind" else ""),
            )
    return adopt_registered(subject, reference=reference, samples=samples)
