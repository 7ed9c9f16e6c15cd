"""Computation of known calls: a reference or kernel, checked by the contract of its operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.prepared_rule import KernelCall
from opsmith.torch_library.contract import Before, Contract, State
from opsmith.torch_library.dtensor.placements import placed_marks
from opsmith.torch_library.flattening import detached
from opsmith.torch_library.writes import raising_versions, refuse_unwritable

_MARKS = 4
"""Number of marks of a tensor."""
_CHANGED = -1
"""Version, also in C++, for a tensor that a call has changed."""


class UnknownCallError(Exception):
    """A call of a known signature that must still be validated in full; nothing is written yet."""


class Route(NamedTuple):
    """The computation of the calls of a signature.

    Args:
        compute: Takes argument values, and returns all results except written arguments.
        apply: The `apply` of a node, which takes argument values, with items of lists one by one, and returns
            the result, or a tuple of all results; None if there is no node of ours.
        kernel: The kernel that an accelerator may call in place of `compute`; None if it must not.
        accelerated: True if an accelerator may return the handle's results.
    """

    compute: Callable[[Sequence[Any]], tuple[Any, ...]]
    apply: Callable[..., Any] | None = None
    kernel: KernelCall | None = None
    accelerated: bool = True


class Computation:
    """A reference or kernel that computes the calls of a signature, checked by the contract.

    Args:
        specification: The operator.
        function: The reference or kernel.
        held: The same function, whose results are checked for their promised layout.
        below_autograd: True if autograd must not record it.
        has_graph: True if a result may require a gradient.
        contiguous: True if it takes written arguments only in contiguous memory.
        tensors_of: Returns the tensors among argument values; None if all values are tensors.
        on_mesh: True if the tensors are DTensors.
    """

    def __init__(
        self,
        specification: Specification,
        function: Callable[..., Any],
        held: Callable[..., Any],
        *,
        below_autograd: bool,
        has_graph: bool,
        contiguous: bool,
        tensors_of: Callable[[Sequence[Any]], Sequence[Tensor]] | None,
        on_mesh: bool = False,
    ) -> None:
        schema = specification.schema
        self._specification, self._function, self._has_graph = specification, function, has_graph
        self._contract, self._tensors_of, self._on_mesh = Contract(specification), tensors_of, on_mesh
        self._marks = placed_marks if on_mesh else capabilities.marks
        built = function if isinstance(function, BuiltKernel) else None
        self._trusted = built is not None and built.pure
        self._held = built.direct if built and not built.of_a_package else held
        self._past_torch = below_autograd
        self._compute = _below_autograd(self._held) if below_autograd and not self._trusted else self._held
        self._by_keyword = schema.positional < len(schema.names)
        self._written_places = [at for at, each in enumerate(schema.arguments) if each.alias]
        self._contiguous = contiguous
        self._count, self._single = len(schema.results), schema.single
        self._lists = [
            (at, tuple if each.kind.as_tuple else list)
            for at, each in enumerate(schema.arguments)
            if each.kind.sequence
        ]
        self._regroups = bool(self._by_keyword or self._lists)
        self._constant = has_graph and any(not each.differentiable for each in schema.results)

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Compute all results from argument values, except written arguments.

        Raises:
            UnknownCallError: If the call must be validated in full.
        """
        if self._written_places:
            return self._write(list(values))
        tensors = values if self._tensors_of is None else self._tensors_of(values)
        try:
            before = [] if self._trusted else self._marks(tensors)
        except RuntimeError:  # inference tensors have no versions
            return self._in_full(list(values))
        returned = self._returned(values) if self._regroups else self._compute(*values)
        results = (returned,) if self._single else returned
        if not self._trusted:
            memories = [*map(capabilities.shard_of, tensors)] if self._on_mesh else tensors
            after = self._marks(tensors)
            if after != before or not self._contract.is_kept(results, memories, self._has_graph):
                results = self._validate_versions(returned, values, _versions(before, after))
        if not self._constant:
            return results
        roles = zip(results, self._specification.schema.results, strict=True)
        return tuple(result if role.differentiable else detached(result) for result, role in roles)

    def _returned(self, values: Sequence[Any]) -> Any:
        """Call the function with its own copies of lists, which it may change."""
        if not self._regroups:
            return self._compute(*values)
        values = list(values)
        for at, kind in self._lists:
            values[at] = None if values[at] is None else kind(values[at])
        args, kwargs = self._specification.schema.split(values)
        return self._compute(*args, **kwargs)

    def _in_full(self, values: list[Any]) -> tuple[Any, ...]:
        before = None if self._trusted else self._contract.before(values)
        return self._validated(self._returned(values), values, before)

    def _write(self, values: list[Any]) -> tuple[Any, ...]:
        """Compute a call that writes, and return all results except written arguments."""
        written = self._written(values)
        if self._contiguous and not all(each.is_contiguous() for each in written):
            raise UnknownCallError  # another kernel may take it
        if self._trusted:  # it refuses by itself tensors that must not be written
            returned = self._returned(values)
            return (returned,) if self._count and self._specification.schema.returns is None else ()
        tensors, before = self._tensors(values), None
        with suppress(RuntimeError):  # inference tensors have no versions
            before = capabilities.states(tensors)
        # True if each tensor has all its elements in one piece of memory that no other tensor uses.
        apart = before is not None and len({id(each[-2]) for each in before}) == len(before)
        if not (apart and all(each.is_contiguous() for each in written)):
            refuse_unwritable(self._specification, values)
        if before is None or not apart:
            with raising_versions(written):
                return self._captures_nothing(written, self._in_full(values))
        try:
            returned = self._returned(values)
        except BaseException:
            for each in written if self._past_torch else ():  # it may have written
                torch.autograd.graph.increment_version(each)
            raise
        ids, after, kept = {*map(id, written)}, capabilities.states(tensors), True
        for each, old, new in zip(tensors, before, after, strict=True):
            own = id(each) in ids
            if own and old[0] == new[0]:
                torch.autograd.graph.increment_version(each)
            kept = kept and (old[1:] == new[1:] if own else old == new)
        results = self._results_of_write(returned, values) if kept else None
        if results is None:
            results = self._validated(returned, values, self._before(tensors, before, ids))
        return self._captures_nothing(written, results)

    def _written(self, values: Sequence[Any]) -> list[Tensor]:
        written: list[Tensor] = []
        for at in self._written_places:
            value = values[at]
            written += [value] if isinstance(value, Tensor) else value or ()
        return written

    def _tensors(self, values: Sequence[Any]) -> Sequence[Tensor]:
        return values if self._tensors_of is None else self._tensors_of(values)

    def _results_of_write(self, returned: Any, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """The results of an in-place call; None if the contract has to check them."""
        schema = self._specification.schema
        if schema.returns is not None:
            return () if returned is values[schema.names.index(schema.returns)] else None
        return () if returned is None and not schema.results else None

    def _before(self, tensors: Sequence[Tensor], states: Sequence[Any], written: set[int]) -> Before:
        pairs = [(id(tensor) in written, State(*each)) for tensor, each in zip(tensors, states, strict=True)]
        return Before([each for own, each in pairs if not own], [each for own, each in pairs if own])

    def _captures_nothing(self, written: Sequence[Tensor], results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of an in-place call that has no graph."""
        if torch.is_grad_enabled() and any(
            each.requires_grad for each in (*written, *tensors_in([*results]))
        ):
            raise self._contract.captured(self._function)
        return results

    @property
    def kernel(self) -> KernelCall | None:
        """The kernel for calls from C++; None if C++ does not support everything that a call needs."""
        if self._constant or (self._written_places and not self._trusted):
            return None
        return self._called(self._compute)

    @property
    def for_rule(self) -> KernelCall:
        """The same for a node in C++, whose forward runs without grad mode."""
        return self._called(self._held)

    def _called(self, function: Callable[..., Any]) -> KernelCall:
        validate = self._validate_versions
        return KernelCall(function, validate, self._trusted, self._has_graph, self._contiguous)

    def _validate_versions(
        self, returned: Any, values: Sequence[Any], versions: Sequence[int] | None
    ) -> tuple[Any, ...]:
        before = None if versions is None else Before([State(version) for version in versions], [])
        return self._validated(returned, values, before)

    def _validated(self, returned: Any, values: Sequence[Any], before: Before | None) -> tuple[Any, ...]:
        """Check the returned value and the effects of a call by the whole contract; return all results."""
        results = self._contract.results(self._function, returned, list(values), before)
        if not self._has_graph and any(each.requires_grad for each in tensors_in(list(results))):
            raise self._contract.captured(self._function)
        return results


def _versions(before: list[Any], after: list[Any]) -> list[int]:
    """The version of each tensor before a call, from the marks of all tensors."""
    places = range(0, len(before), _MARKS)
    return [before[at] if before[at : at + _MARKS] == after[at : at + _MARKS] else _CHANGED for at in places]


def _below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that autograd does not record: a kernel may use other tensors, which require gradients."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        with capabilities.below_autograd():
            return function(*args, **kwargs)

    return computed
