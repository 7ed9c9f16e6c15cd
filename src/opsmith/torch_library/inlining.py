"""No fusion barrier: under torch.compile an operator without a kernel of its own becomes its reference.

One whose kernel torch can see into, as one in Triton, becomes that.

By the time a call is made functional, autograd has been through it: the author's formulas are in the graph
already, and what is left to compute is the forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opsmith.core.backward_plan import takes_kernel
from opsmith.core.kernels import VisibleKernel, choose
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.effects import run_pure


def inline_reference(
    library: torch.library.Library,
    name: str,
    specification: Callable[[], Specification],
    reference: Callable[..., Any],
    received: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]],
    returned: Callable[[tuple[Any, ...]], Any],
) -> None:
    """Let torch.compile see through an operator.

    Args:
        library: Where the operator is registered.
        name: `namespace::name`.
        specification: Tells what is in force at the time of a trace.
        reference: Takes a call of the operator, returns what the operator does.
        received: The argument values of a call.
        returned: What the operator returns, of all results.
    """

    def rule(mode: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if capabilities.exporting():
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        now = specification()
        values = received(args, kwargs) if now.kernels else []  # which nobody else looks at
        whole = not inlined(now, values)
        if whole and (now.inline is False or not now.kernels):
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        if not capabilities.only_stand_ins(types):
            return mode.__torch_dispatch__(operator, types, args, kwargs) if whole else NotImplemented
        with mode:
            if not whole:
                return reference(*args, **kwargs)
            found = by_visible(now, values)
        return mode.__torch_dispatch__(operator, types, args, kwargs) if found is None else returned(found)

    torch.library.register_torch_dispatch(name, capabilities.FUNCTIONALIZATION, rule, lib=library)


def by_visible(specification: Specification, values: list[Any]) -> tuple[Any, ...] | None:
    """The results of the kernel that takes a call, in operations that torch traces; None if it has none."""
    accepted, _ = choose(specification.kernels, values)
    if accepted is None or not isinstance(accepted.kernel.function, VisibleKernel):
        return None
    return run_pure(specification, accepted.kernel.function.traced, values)


def inlined(specification: Specification, values: list[Any]) -> bool:
    """Whether compiled code sees the reference: as the author says, else where no kernel takes the call."""
    if specification.inline is not None:
        return specification.inline
    # What an object holds may change, and a graph that holds the reference would not see it.
    objects = specification.schema.lowering is not None and specification.schema.lowering.objects
    return not (specification.opaque or objects) and not takes_kernel(specification, values)
