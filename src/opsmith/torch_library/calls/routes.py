"""The table of known calls of an operator: for each signature, the route that computes the calls.

A call that was validated in full is accepted. Later calls of its signature take its route: one call through
the dispatcher, or the accelerator, which replaces the dispatcher.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.forked_locks import lock_of
from opsmith.core.kernels import BuiltKernel, Rejected, choose
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.graph_cuts import is_cut
from opsmith.torch_library.autograd.prepared_rule import PreparedRule
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator
from opsmith.torch_library.calls.accelerator import Accelerator
from opsmith.torch_library.calls.computation import Computation, Route, UnknownCallError
from opsmith.torch_library.calls.own_build import OWN_BUILD
from opsmith.torch_library.dtensor.placements import dtensor
from opsmith.torch_library.flattening import ArgumentFlattening
from opsmith.torch_library.writes import goes_on_from_a_write, written_tensors

MAX_ROUTES = 256
"""Maximum number of signatures that are kept."""

_MAKING = lock_of(sys.modules[__name__], "_MAKING")

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Signature = tuple[Any, ...]
"""Facts that calls on one route have in common: the dispatch keys, grad mode, the lengths of lists, and the
presence of optional tensors; for each tensor its type, dtype, rank, device, `requires_grad`, and True if it
was made in inference mode."""


class RouteTable:
    """The routes of one operator.

    Args:
        registered: The operator.
        on_dtensors: For calls whose tensors are DTensors: takes True if a gradient is required, and returns
            the computation, and True if autograd records it; None without such calls.
        by_class: Chooses the routes of an adopted class from argument values; None for other operators.
        accelerated: True if the handle has the arguments and results of the dispatcher's operator.

    Attributes:
        specification: The specification that the routes belong to.
    """

    def __init__(
        self,
        registered: RegisteredOperator,
        on_dtensors: Callable[[bool], tuple[Computation | None, bool]] | None,
        by_class: Callable[[list[Any]], Route | None] | None,
        *,
        accelerated: bool = True,
    ) -> None:
        self._registered, self.specification = registered, registered.specification
        self._on_dtensors, self._by_class = on_dtensors, by_class
        schema = self.specification.schema
        self._routes: dict[Signature, Route] = {}
        self._detached = False
        self._tensor_places = [at for at, each in enumerate(schema.arguments) if each.kind.is_tensor]
        kinds = [each.kind for each in schema.arguments if each.kind.is_tensor]
        self._only_tensors = len(kinds) == len(schema.names) and not any(
            kind.sequence or kind.optional for kind in kinds
        )
        self._list_places = {
            at for at, each in enumerate(schema.arguments) if each.kind.is_tensor and each.kind.sequence
        }
        self._held_places = [
            (at, len if each.kind.sequence else _itself if each.kind.base.values else type)
            for at, each in enumerate(schema.arguments)
            if each.kind.length is not None or each.kind.base.held
        ]
        self._in_order = not any(each.kind.sequence for each in schema.arguments)
        self._count, self._received = len(schema.names), schema.received
        self._is_open = _has_routes(self.specification)
        self._shapes, self._alike = self.specification.shapes, self.specification.rounds_alike
        self._accelerated = accelerated
        self._count_call = OWN_BUILD.wait_with(registered) if self._is_open and accelerated else None
        self._accelerator: Accelerator | None = None

    def detach(self) -> None:
        """Forget all routes, including the accelerator's."""
        self._routes = {}
        with _MAKING:
            self._detached = True
            if self._accelerator is not None:
                self._accelerator.detach()

    def results(
        self, keyset: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """All results of a call by its route; None if it must be validated in full.

        Args:
            keyset: The dispatch keys.
            args: The positional arguments, as the dispatcher passes them.
            kwargs: The keyword arguments.
        """
        if self._count_call is not None:
            self._count_call()
        if not self._alike and torch.are_deterministic_algorithms_enabled():
            return None
        values = args if self._in_order and len(args) == self._count else self._received(args, kwargs)
        tensors = values if self._only_tensors else self._tensors(values)
        route = self._routes.get(self._signature(keyset, values, tensors)) if self._routes else None
        if route is None:
            return None
        if self._shapes is not None and self._shapes.bind(self.specification.schema, list(values))[1]:
            return None
        try:
            if route.apply is None:
                return route.compute(values)
            found = route.apply(*(self._flat(values) if self._list_places else values))
        except UnknownCallError:
            return None
        return found if isinstance(found, tuple) else (found,)

    def accept(self, keyset: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a call was validated in full: later calls of its signature may take a route."""
        if not self._is_open or capabilities.call_keys(keyset) is None or not capabilities.nothing_active():
            return
        if self._must_be_deterministic():
            return
        if self._accelerated and self._accelerator is None and self._registered.owner is not None:
            self._make_accelerator(type(self._registered.owner))
        values = self._received(args, kwargs)
        tensors = self._tensors(values)
        if not tensors or len({each.device for each in tensors}) != 1:
            return
        route = None
        if all(type(each) in PLAIN_TYPES and each.layout is torch.strided for each in tensors):
            route = self.route(list(values), tensors)
        elif self._on_dtensors is not None and all(type(each) is dtensor() for each in tensors):
            requires = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
            computed, records = self._on_dtensors(requires)
            if computed is not None:
                route = self._by_rule(computed, list(values), requires=requires, records=records)
        if route is None:
            return
        if len(self._routes) >= MAX_ROUTES:
            self._routes.clear()
        self._routes[self._signature(keyset, values, tensors)] = route
        if self._accelerator is not None:
            self._accelerator.accept(list(values), route)

    def _make_accelerator(self, handle: type) -> None:
        """Make the accelerator once, unless another thread has redeclared the operator in the meantime."""
        as_apply = self._by_class is not None
        with _MAKING:
            if self._accelerator is None and not self._detached:
                self._accelerator = Accelerator(self.specification, handle, as_apply=as_apply)
                self._accelerator.serve(self._registered.autograd_kernels)

    def _must_be_deterministic(self) -> bool:
        """Return True if torch refuses some kernels of the operator, or all of its calls."""
        return not self._alike and torch.are_deterministic_algorithms_enabled()

    def _tensors(self, values: Sequence[Any]) -> Sequence[Tensor]:
        if self._only_tensors:
            return values
        tensors: list[Tensor] = []
        for at in self._tensor_places:
            value = values[at]
            if isinstance(value, Tensor):
                tensors.append(value)
            elif value is not None:
                tensors += value
        return tensors

    def _flat(self, values: Sequence[Any]) -> list[Any]:
        """Argument values, with the items of lists of tensors one by one."""
        flat: list[Any] = []
        for at, value in enumerate(values):
            if at in self._list_places and value is not None:
                flat += value
            else:
                flat.append(value)
        return flat

    def _signature(self, keyset: Any, values: Sequence[Any], tensors: Sequence[Tensor]) -> Signature:
        signature: list[Any] = [capabilities.call_keys(keyset), torch.is_grad_enabled()]
        if not self._only_tensors:
            signature += [
                len(values[at]) if at in self._list_places and values[at] is not None else values[at] is None
                for at in self._tensor_places
            ]
            for at, noted in self._held_places:
                signature.append(None if values[at] is None else noted(values[at]))
        for each in tensors:
            signature += (
                type(each),
                each.dtype,
                each.ndim,
                each.device,
                each.requires_grad,
                each.is_inference(),
            )
        return tuple(signature)

    def route(self, values: list[Any], tensors: Sequence[Tensor]) -> Route | None:
        """Choose the route for calls like this call; None if each of them must be validated in full."""
        if self._by_class is not None:
            return self._by_class(values)
        specification = self.specification
        accepted, rejected = choose(specification.kernels, values)
        if any(each.strict for each in rejected):
            return None
        writes = bool(specification.schema.written)
        in_memory = accepted or specification.opaque or writes
        if in_memory and any(each.is_conj() or each.is_neg() or each.is_meta for each in tensors):
            return None
        requires = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        function = accepted.kernel.function if accepted else specification.reference
        contiguous = writes and self._takes_by_layout(function, rejected)
        if contiguous and not all(each.is_contiguous() for _, each in written_tensors(specification, values)):
            return None
        recorded = accepted is None or accepted.kernel.differentiable
        records = requires and not writes and recorded and not specification.gradients.given
        compute = Computation(
            specification,
            function,
            self._registered.held(function),
            below_autograd=bool((accepted or specification.opaque) and not records),
            has_graph=records,
            contiguous=contiguous,
            tensors_of=None if self._only_tensors else self._tensors,
        )
        if writes and requires:
            return Route(self._with_node(values, compute) or self._recorded)
        return self._by_rule(compute, values, requires=requires, records=records)

    def _by_rule(
        self, compute: Computation, values: list[Any], *, requires: bool, records: bool
    ) -> Route | None:
        """The route of a computation, with a node if a gradient is required that autograd does not record."""
        specification = self.specification
        if records and is_cut(specification.reference):
            return None
        if records or not requires:
            return Route(compute, None, compute.kernel)
        if not self._has_prepared_rule(values):
            return None
        flattening = ArgumentFlattening.of(specification.schema, values)
        of_flat = compute if not self._list_places else lambda flat: compute(flattening.pack(flat))
        primitive = OperatorPrimitive(self._registered, flattening)
        rule = PreparedRule(primitive, of_flat, flattening.flatten(values))
        return Route(compute, rule.apply_in_cpp(compute.for_rule) or rule.apply)

    def _recorded(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return self._registered.recorded(list(values))

    def _with_node(
        self, values: list[Any], compute: Computation
    ) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
        """The computation of in-place calls that make a node; None if each call chooses the node anew."""
        form = self._registered.form_registration
        schema, gradients = form.specification.schema, form.specification.gradients
        if self._list_places or not (schema.always_tensors and gradients.given) or self.specification.random:
            return None
        flattening = ArgumentFlattening.of(schema, values)
        written = [at for at in flattening.positions(schema.new_values) if values[at] is not None]
        if len(written) != len(schema.new_values):
            return None

        def whole(flat: Sequence[Any]) -> tuple[Any, ...]:
            results = compute(flat)
            return (*[flat[at] for at in written], *results)

        name = self.specification.short_name
        rule = PreparedRule(OperatorPrimitive(form, flattening), whole, values, written, name)

        def recorded(given: Sequence[Any]) -> tuple[Any, ...]:
            for at in written:
                if not goes_on_from_a_write(given[at]):
                    return self._recorded(given)
            results = rule.apply(*given)
            return results[len(written) :] if isinstance(results, tuple) else ()

        return recorded

    def _takes_by_layout(self, function: Any, rejected: Sequence[Rejected]) -> bool:
        """Return True if the layout of written arguments decides whether another kernel takes a call."""
        if isinstance(function, BuiltKernel) and function.pure:
            return not (function.takes_any_layout and all(each.elsewhere for each in rejected))
        return any(isinstance(each.function, BuiltKernel) for each in self.specification.kernels)

    def _has_prepared_rule(self, values: Sequence[Any]) -> bool:
        """Return True if a call needs gradients, and its backward does not draw random numbers again."""
        specification, names = self.specification, self.specification.schema.names
        needed = [
            name
            for name, value in zip(names, values, strict=True)
            if specification.gradients.differentiable(name)
            and any(each.requires_grad for each in tensors_in([value]))
        ]
        if not needed:
            return False
        plan = self._registered.plan(frozenset(needed))
        return not (specification.draws and (plan.derived or plan.follows_hidden))


def _has_routes(specification: Specification) -> bool:
    """Return True if known calls of an operator may take routes."""
    schema = specification.schema
    values = [each.kind for each in schema.arguments if not each.kind.is_tensor]
    return (
        schema.always_tensors
        and not schema.encoded
        and not (schema.written and (schema.hidden or len(schema.results) > 1))
        and not any(kind.encoded or (kind.sequence and kind.base.held) for kind in values)
        and not any(each.kind.sequence and each.kind.item_optional for each in schema.arguments)
        and not any(kernel.by_context for kernel in specification.kernels)
    )


def _itself(value: Any) -> Any:
    return value
