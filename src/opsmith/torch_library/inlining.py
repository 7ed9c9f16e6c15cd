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
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities


def inline_reference(
    library: torch.library.Library,
    name: str,
    specification: Callable[[], Specification],
    reference: Callable[..., Any],
    visible: Callable[..., Any],
) -> None:
    """Let torch.compile see through an operator.

    Args:
        library: Where the operator is registered.
        name: `namespace::name`.
        specification: Tells what is in force at the time of a trace.
        reference: Takes a call of the operator, returns what the operator does.
        visible: The same by the kernel that takes the call; None where there is none, or torch cannot see
            into it.
    """

    def rule(mode: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if capabilities.exporting():
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        whole = not inlined(specification(), [*args, *kwargs.values()])
        if whole and (specification().inline is False or not specification().kernels):
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        if not capabilities.only_stand_ins(types):
            return mode.__torch_dispatch__(operator, types, args, kwargs) if whole else NotImplemented
        with mode:
            found = visible(*args, **kwargs) if whole else reference(*args, **kwargs)
        return mode.__torch_dispatch__(operator, types, args, kwargs) if found is None else found

    torch.library.register_torch_dispatch(name, capabilities.FUNCTIONALIZATION, rule, lib=library)


def inlined(specification: Specification, values: list[Any]) -> bool:
    """Whether compiled code sees the reference: as the author says, else where no kernel takes the call."""
    if specification.inline is not None:
        return specification.inline
    # What an object holds may change, and a graph that holds the reference would not see it.
    objects = specification.schema.lowering is not None and specification.schema.lowering.objects
    return not (specification.opaque or objects) and not takes_kernel(specification, values)
