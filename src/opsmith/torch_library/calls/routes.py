"""The table of known calls of an operator: by their signatures, the routes that compute them.

A call that was validated in full is accepted. Later calls of its signature take its route, in one hop through
the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith.core.argument_types import VALUE_TYPES
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel, choose
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.autograd.graph_cuts import is_cut
from opsmith.torch_library.autograd.prepared_rule import KernelOfRule, PreparedRule
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator
from opsmith.torch_library.contract import Before, Contract, State
from opsmith.torch_library.flattening import ArgumentFlattening, detached

MAX_ROUTES = 256
"""Maximum number of signatures that are kept."""

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Signature = tuple[Any, ...]
"""What calls have in common that take one route: the dispatch keys, grad mode, the lengths of lists and which
optional tensors are given; for each tensor its type, dtype, rank, and whether it requires a gradient. All
tensors of a known call are on one device, which the keys tell."""


class InferenceTensorError(Exception):
    """A call on an inference tensor, which has no version, must be validated in full."""


class Route(NamedTuple):
    """What computes the calls of a signature.

    Args:
        compute: Takes argument values, and returns all results.
        apply: The `apply` of a node, which takes argument values, and returns the result, or all of several;
            None where there is no node of ours.
    """

    compute: Callable[[Sequence[Any]], tuple[Any, ...]]
    apply: Callable[..., Any] | None


class RouteTable:
    """The routes of one operator.

    Args:
        registered: The operator.

    Attributes:
        specification: The specification of which they are.
    """

    def __init__(self, registered: RegisteredOperator) -> None:
        self._registered, self.specification = registered, registered.specification
        schema = self.specification.schema
        self._routes: dict[Signature, Route] = {}
        self._tensor_places = [at for at, each in enumerate(schema.arguments) if each.kind.is_tensor]
        kinds = [each.kind for each in schema.arguments if each.kind.is_tensor]
        self._only_tensors = len(kinds) == len(schema.names) and not any(
            kind.sequence or kind.optional for kind in kinds
        )
        self._list_places = {
            at for at, each in enumerate(schema.arguments) if each.kind.is_tensor and each.kind.sequence
        }
        self._lists = bool(self._list_places)
        self._in_order = not any(each.kind.sequence for each in schema.arguments)
        self._count, self._received = len(schema.names), schema.received
        self._is_open = _has_routes(self.specification)
        self._shapes = self.specification.shapes

    def results(
        self, keyset: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """All results of a call by its route; None where it must be validated in full.

        Args:
            keyset: The dispatch keys.
            args: The positional arguments, as the dispatcher passes them.
            kwargs: The others.
        """
        if not self._routes:
            return None
        values = args if self._in_order and len(args) == self._count else self._received(args, kwargs)
        tensors = values if self._only_tensors else self._tensors(values)
        route = self._routes.get(self._signature(keyset, values, tensors))
        if route is None:
            return None
        if self._shapes is not None and self._shapes.bind(self.specification.schema, list(values))[1]:
            return None
        try:
            if route.apply is None:
                return route.compute(values)
            found = route.apply(*(self._flat(values) if self._lists else values))
        except InferenceTensorError:
            return None
        return found if isinstance(found, tuple) else (found,)

    def accept(self, keyset: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a call was validated in full: later ones of its signature may take a route."""
        if not self._is_open or capabilities.call_keys(keyset) is None or not capabilities.nothing_active():
            return
        values = self._received(args, kwargs)
        tensors = self._tensors(values)
        plain = all(type(each) in PLAIN_TYPES and each.layout is torch.strided for each in tensors)
        if not plain or len({each.device for each in tensors}) != 1:
            return
        route = self.route(list(values), tensors)
        if route is None:
            return
        if len(self._routes) >= MAX_ROUTES:
            self._routes.clear()
        self._routes[self._signature(keyset, values, tensors)] = route

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
        """Argument values with the items of lists of tensors one by one."""
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
        for each in tensors:
            signature += (type(each), each.dtype, each.ndim, each.requires_grad)
        return tuple(signature)

    def route(self, values: list[Any], tensors: Sequence[Tensor]) -> Route | None:
        """Choose what computes calls like this one; None where each of them must be validated in full."""
        specification = self.specification
        accepted, rejected = choose(specification.kernels, values)
        if any(each.strict for each in rejected):
            return None
        in_memory = accepted or specification.opaque
        if in_memory and any(each.is_conj() or each.is_neg() or each.is_meta for each in tensors):
            return None
        function = accepted.kernel.function if accepted else specification.reference
        requires = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        records = requires and not (specification.gradients.given or accepted)
        compute = Computation(
            specification,
            function,
            self._registered.held(function),
            below_autograd=bool(in_memory),
            has_graph=records,
            tensors_of=None if self._only_tensors else self._tensors,
        )
        if records and is_cut(function):
            return None
        if records or not requires:
            return Route(compute, None)
        if not self._has_prepared_rule(values):
            return None
        flattening = ArgumentFlattening.of(specification.schema, values)
        of_flat = compute if not self._lists else lambda flat: compute(flattening.pack(flat))
        primitive = OperatorPrimitive(self._registered, flattening)
        rule = PreparedRule(primitive, of_flat, flattening.flatten(values))
        return Route(compute, rule.apply_in_cpp(compute.for_rule) or rule.apply)

    def _has_prepared_rule(self, values: Sequence[Any]) -> bool:
        """Return True if a call needs gradients, and no backward draws its random numbers again."""
        specification, names = self.specification, self.specification.schema.names
        needed = [
            name
            for name, value in zip(names, values, strict=True)
            if specification.gradients.differentiable(name)
            and any(each.requires_grad for each in tensors_in([value]))
        ]
        if not needed:
            return False
        generator = VALUE_TYPES[torch.Generator]
        draws = specification.random or any(
            each.kind.base is generator for each in specification.schema.arguments
        )
        plan = self._registered.plan(frozenset(needed))
        return not (draws and (plan.derived or plan.follows_hidden))


def _has_routes(specification: Specification) -> bool:
    """Return True if known calls of an operator may take routes."""
    schema = specification.schema
    values = [each.kind for each in schema.arguments if not each.kind.is_tensor]
    return (
        specification.origin.kind == "declared"
        and specification.rounds_alike
        and schema.always_tensors
        and not (schema.written or schema.new_values or schema.encoded)
        and not any(kind.length is not None or kind.base.held or kind.encoded for kind in values)
        and not any(each.kind.sequence and each.kind.item_optional for each in schema.arguments)
        and not any(kernel.by_context for kernel in specification.kernels)
    )


class Computation:
    """A reference or kernel, which computes the calls of a signature by the contract.

    Args:
        specification: The operator.
        function: The reference or kernel.
        held: The same, with results held to what is promised of them.
        below_autograd: True if autograd must not record it.
        has_graph: True if a result may require a gradient.
        tensors_of: Returns the tensors among argument values; None where there are no other values.
    """

    def __init__(
        self,
        specification: Specification,
        function: Callable[..., Any],
        held: Callable[..., Any],
        *,
        below_autograd: bool,
        has_graph: bool,
        tensors_of: Callable[[Sequence[Any]], Sequence[Tensor]] | None,
    ) -> None:
        schema = specification.schema
        self._specification, self._function, self._has_graph = specification, function, has_graph
        self._contract, self._tensors_of = Contract(specification), tensors_of
        built = function if isinstance(function, BuiltKernel) else None
        self._trusted = built is not None and built.pure
        self._compute = built.direct if built else held
        self._by_keyword = schema.positional < len(schema.names)
        self._count, self._single = len(schema.results), schema.single
        self._lists = [
            (at, tuple if each.kind.as_tuple else list)
            for at, each in enumerate(schema.arguments)
            if each.kind.sequence
        ]
        self._regroups = bool(self._by_keyword or self._lists)
        self._constant = has_graph and any(not each.differentiable for each in schema.results)
        self._below = below_autograd

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Compute all results of argument values.

        Raises:
            InferenceTensorError: See its name; before anything is computed.
        """
        tensors = values if self._tensors_of is None else self._tensors_of(values)
        try:
            before = [] if self._trusted else capabilities.states(tensors)
        except RuntimeError as error:  # those of torch have no versions
            raise InferenceTensorError from error
        args, kwargs = self._given(values) if self._regroups else (values, {})
        if self._below:
            with capabilities.below_autograd():
                returned = self._compute(*args, **kwargs)
        else:
            returned = self._compute(*args, **kwargs)
        results = (returned,) if self._single else returned
        if not self._trusted and not self._holds(results, tensors, before):
            results = self._validated(returned, values, [State(*each) for each in before])
        if not self._constant:
            return results
        roles = zip(results, self._specification.schema.results, strict=True)
        return tuple(result if role.differentiable else detached(result) for result, role in roles)

    @property
    def for_rule(self) -> KernelOfRule:
        """The same for a node in C++."""
        schema = self._specification.schema

        def validate(
            returned: Any, values: Sequence[Any], versions: tuple[int, ...] | None
        ) -> tuple[Any, ...]:
            before = None if versions is None else [State(version) for version in versions]
            return self._validated(returned, values, before)

        return KernelOfRule(self._compute, schema.names[schema.positional :], self._trusted, validate)

    def _validated(
        self, returned: Any, values: Sequence[Any], before: Sequence[State] | None
    ) -> tuple[Any, ...]:
        """Validate what a call returned and did against the whole contract, and return all results."""
        states = None if before is None else Before(before, [])
        results = self._contract.results(self._function, returned, list(values), states)
        if not self._has_graph and any(each.requires_grad for each in tensors_in(list(results))):
            raise self._contract.captured(self._function)
        return results

    def _given(self, values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Positional and keyword arguments, with lists of their own, which the function may change."""
        values = list(values)
        for at, kind in self._lists:
            values[at] = None if values[at] is None else kind(values[at])
        if self._by_keyword:
            return self._specification.schema.split(values)
        return values, {}

    def _holds(self, results: Any, tensors: Sequence[Tensor], before: Sequence[Any]) -> bool:
        """Return True if a call has kept the contract; else `Contract.results` says whether it has."""
        if (
            type(results) is not tuple
            or len(results) != self._count
            or capabilities.states(tensors) != before
        ):
            return False
        storages = {id(each[-2]) for each in before}
        for result in results:
            if type(result) is not Tensor or result.layout is not torch.strided or result.is_nested:
                return False
            if result.is_quantized or (result.requires_grad and not self._has_graph):
                return False
            storage = result.untyped_storage()
            if id(storage) in storages or not storage.resizable():
                return False
            storages.add(id(storage))
        return True
