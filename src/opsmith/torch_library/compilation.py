"""An operator under torch.compile: replaced by its reference, and recompiled when its sources change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import takes_kernel
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel, choose, refuse_strictly
from opsmith.core.origins.declared import TRACED
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import autocast_of_call, noting_autocast
from opsmith.torch_library.contract import run_call
from opsmith.torch_library.writes import written_tensors

INLINING = 2
"""Version of the inlining of references: a new version makes compiled code on disk stale."""


def inline_reference(
    library: torch.library.Library,
    overload: Any,
    specification: Callable[[], Specification],
    reference: Callable[..., Any],
    received: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]],
    traced: Callable[[list[Any]], tuple[Any, ...] | None],
    returned: Callable[[tuple[Any, ...]], Any],
) -> None:
    """Replace an operator by its reference under torch.compile, so that the compiler can fuse it.

    Args:
        library: The library of the operator.
        overload: The operator.
        specification: Returns the current specification.
        reference: Takes a call of the operator, and returns the operator's results.
        received: Returns the argument values of a call.
        traced: Results of a call that is not inlined, in operations that torch traces; None to keep the call.
        returned: Positions of the visible results.
    """

    def rule(mode: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        now = specification()
        # A decomposed program has no autocast for the operators that it keeps.
        if capabilities.exporting() and (now.origin.casts or not autocast_of_call()):
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        # Needed for the choice of a kernel, and for written arguments.
        values = received(args, kwargs) if now.kernels or now.schema.written else []
        inlined = is_inlined(now, values)
        if not inlined and (now.inline is False or not now.kernels) and not now.schema.written:
            with noting_autocast(None):  # compiled code runs a kept operator without autocast
                return mode.__torch_dispatch__(operator, types, args, kwargs)
        if not capabilities.only_stand_ins(types):
            return NotImplemented if inlined else mode.__torch_dispatch__(operator, types, args, kwargs)
        with mode:
            if inlined:
                if now.inline is None:
                    refuse_strictly(choose(now.kernels, values)[1], now.name)
                try:
                    results = reference(*args, **kwargs)
                    return keep_copies(now, values, results) if now.schema.written else results
                except errors.TransformError:
                    if now.origin.runs(TRACED, suspected=True):
                        raise
            elif now.schema.written:
                values = with_copies(now, values)
                args, kwargs = now.schema.dispatched(values)
            found = traced(values)
        return mode.__torch_dispatch__(operator, types, args, kwargs) if found is None else returned(found)

    torch.library.register_torch_dispatch(overload, capabilities.FUNCTIONALIZATION, rule, lib=library)


def with_copies(specification: Specification, values: list[Any]) -> list[Any]:
    """Return the argument values of a kept call of an in-place operator; copies among them are not dropped.

    Otherwise it would read the tensor that it writes instead of the copy that its caller made before.
    """
    sources = [capabilities.source_in_trace(tensor)[0] for tensor in tensors_in(values)]
    return [
        map_tensors(partial(_kept, lambda source: sources.count(source) > 1, argument.alias), [value])[0]
        for argument, value in zip(specification.schema.arguments, values, strict=True)
    ]


def keep_copies(specification: Specification, values: list[Any], results: Any) -> Any:
    """Keep copies of inputs that an inlined reference has written or returns; return its results.

    Otherwise they are read too late: a graph ends with the writes into its inputs, one after the other.
    """
    for _, tensor in written_tensors(specification, values):
        _kept(_is_input, True, tensor)
    return map_tensors(partial(_kept, _is_input, False), [results])[0]


def _is_input(source: Any) -> bool:
    return source.op == "placeholder"  # type: ignore[no-any-return]


def _kept(is_read: Callable[[Any], bool], written: Any, tensor: Tensor) -> Tensor:
    """Return a tensor, copied if Inductor would otherwise drop a copy and read a written tensor."""
    source, copied = capabilities.source_in_trace(tensor)
    if not (copied and is_read(source)):
        return tensor
    copy = capabilities.copy_in_trace(tensor)
    return tensor.copy_(copy) if written else copy


def traced_results(specification: Specification, values: list[Any]) -> tuple[Any, ...] | None:
    """Results of the kernel that takes a call, in operations that torch traces; None if there is none."""
    if specification.inline is False:
        return None
    accepted, _ = choose(specification.kernels, values)
    kernel = accepted and accepted.kernel.function
    if not isinstance(kernel, BuiltKernel) or kernel.traced is None:
        return None
    return run_call(specification, kernel.traced, values)


def is_inlined(specification: Specification, values: list[Any]) -> bool:
    """Return True if compiled code contains the reference: if declared so, or if no kernel takes the call."""
    if specification.inline is not None:
        return specification.inline
    # The attributes of an object may change, but a graph of the reference would not notice.
    objects = specification.schema.lowering is not None and specification.schema.lowering.objects
    if not specification.origin.runs(TRACED):
        return False  # its code runs only on real tensors
    return not (specification.opaque or objects) and not takes_kernel(specification, values)


EAGER = (Tensor, torch.nn.Parameter)
"""Types of tensors with data; other types are proxies in a trace, or subclasses."""


class CompiledCode:
    """State of the compiled code that contains one operator.

    Attributes:
        traced: True if there is such code.
    """

    def __init__(self) -> None:
        self.traced = False
        self._marked = False

    def notice(self, specification: Specification, tensors: list[Tensor]) -> None:
        """Record a call: if its tensors are proxies, the operator is being traced.

        A trace comes before the disk caches are read, so the hash of the operator's sources is put into their
        keys now. Before Inductor is imported there is no key, and its import would take longest.
        """
        eager = all(type(tensor) in EAGER for tensor in tensors) and not capabilities.recording()
        if self._marked or eager:
            return
        self.traced = True
        if capabilities.compiler_imported():
            from opsmith.core.source_hash import operator_hash  # a slow import, needed for compilation only

            token = f"{INLINING} {operator_hash(specification)}"
            capabilities.mark_compiled_code(specification.name, token)
            self._marked = True

    def drop(self) -> None:
        """Drop compiled code, since the operator has changed; do nothing if it was never traced."""
        if self.traced:
            torch.compiler.reset()
        self.traced = self._marked = False
