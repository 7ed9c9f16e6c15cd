"""The fast path of an adopted class, for calls of plain tensors with no mode or transform active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import AdoptedFunction
from opsmith.core.argument_types import ArgumentType
from opsmith.core.call_arguments import requires_gradient
from opsmith.core.operator import MISSING
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.fallback import proxy_reason
from opsmith.torch_library.adopted.forward import run_forward
from opsmith.torch_library.adopted.generated_node import ClassNodes, MisfitError
from opsmith.torch_library.arguments import unsupported_kind
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator, differentiate
from opsmith.torch_library.fast_path.eligibility import takes_fast_path
from opsmith.torch_library.fast_path.generated_call import generated, in_order
from opsmith.torch_library.fast_path.signatures import SLOW_PATH, CallSignatures, Implementation
from opsmith.torch_library.flattening import ArgumentFlattening


class ClassSignatures(CallSignatures):
    """Known call signatures of an adopted class that writes into nothing.

    Args:
        registered: The operator.
        adopted: Its class.
    """

    def __init__(self, registered: RegisteredOperator, adopted: AdoptedFunction) -> None:
        super().__init__(registered.specification)
        self._adopted, self._nodes = adopted, ClassNodes(registered, adopted)

    def writes_nothing(self, values: tuple[Any, ...]) -> bool:
        """Return True if the runs under the flags of a call have written into nothing."""
        return self._adopted.facts.written_under.get(self._adopted.flags(values)) == frozenset()

    def implement(self, guard: Any, given: dict[str, Any], tensors: list[Tensor]) -> Implementation:
        """Choose the node on whose context the class's own code runs."""
        if not self.writes_nothing(tuple(given.values())) or torch.is_inference_mode_enabled():
            return SLOW_PATH
        if any(each.is_inference() or each.is_meta for each in tensors):
            return SLOW_PATH
        return guard, None, capabilities.direct_apply(self._nodes.of(given)), False, False, False


def class_call(
    registered: RegisteredOperator,
    adopted: AdoptedFunction,
    call: Callable[..., Any],
    compute: Callable[[list[Any]], tuple[Any, ...] | None],
) -> Callable[..., Any]:
    """Generate the `__call__` of a handle: known calls run the class's code on torch's context.

    The arguments are those of `adopted_call`, which takes the other calls.
    """
    otherwise, schema = adopted_call(registered, adopted, call, compute), adopted.schema
    in_order_of_results = adopted.outputs in (0, tuple(range(len(schema.results))))
    plain = adopted.parameters.plain and not adopted.defaults and not schema.new_values and not adopted.random
    plain &= schema.positional == len(schema.arguments)
    lists = any(each.kind.is_tensor and each.kind.sequence for each in schema.arguments)
    differentiable = schema.always_tensors and all(result.differentiable for result in schema.results)
    if adopted.takes_self or lists or not (plain and in_order_of_results and differentiable):
        return otherwise
    if adopted.backward is None or not takes_fast_path(schema):
        return otherwise

    def slow(handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = 0
        for value in args:
            if value is MISSING:
                break
            count += 1
        return otherwise(handle, *args[:count], **kwargs)

    signatures = ClassSignatures(registered, adopted)
    # What is no tensor may be a flag that chooses whether the class writes.
    flags = adopted.may_write and any(
        not each.kind.is_tensor or each.kind.optional for each in schema.arguments
    )
    unwritten = "not _op_facts.written"
    if flags and adopted.may_write:
        unwritten = f"_op_writes_nothing(({in_order(schema)}))"
    body = f"""
        if _op_apply is not None and {unwritten}:
            try:
                return _op_apply({in_order(schema)})
            except _op_MisfitError:
                pass
"""
    names = {
        "_op_MisfitError": MisfitError,
        "_op_facts": adopted.facts,
        "_op_writes_nothing": signatures.writes_nothing,
    }
    return generated(signatures, slow, body, names, keywords=False)


def adopted_call(
    registered: RegisteredOperator,
    adopted: AdoptedFunction,
    call: Callable[..., Any],
    compute: Callable[[list[Any]], tuple[Any, ...] | None],
) -> Callable[..., Any]:
    """The `__call__` of a handle for calls of plain tensors, with no mode or transform active.

    Args:
        registered: The operator.
        adopted: Its class.
        call: Takes the handle, positional and keyword arguments: the slow path.
        compute: Computes all results of argument values; None where the call needs the slow path.
    """
    schema = adopted.schema
    kinds = [(argument.name, argument.kind) for argument in schema.arguments]
    anywhere = registered.specification.deterministic

    def accepted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The argument values; None if the call needs the slow path."""
        args, kwargs = adopted.completed(args, kwargs)
        if len(args) > schema.positional or not schema.by_name.keys() >= kwargs.keys():
            return None
        if kwargs and any(name in kwargs for name in schema.names[: len(args)]):
            return None  # given twice
        values = schema.call_values(args, kwargs)
        plain = all(_is_plain(kind, value) for (_, kind), value in zip(kinds, values, strict=True))
        return values if plain and proxy_reason(values) is None else None

    def fast_call(handle: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not capabilities.nothing_active():
            return call(handle, args, kwargs)
        if not anywhere and torch.are_deterministic_algorithms_enabled():
            return call(handle, args, kwargs)
        values = accepted(args, kwargs)
        if values is None:
            return call(handle, args, kwargs)
        try:
            results = compute(values)
        except (errors.ResultTypeError, errors.ResultCountError):
            results = None  # the slow path learns another structure of results
        return call(handle, args, kwargs) if results is None else adopted.structured(results)

    return fast_call


def computed_by_class(
    registered: RegisteredOperator, adopted: AdoptedFunction, values: list[Any]
) -> tuple[Any, ...]:
    """All results of a call of plain tensors, by the forward of a class on copies of what it writes."""
    if not torch.is_grad_enabled() or not requires_gradient(values):
        with torch.no_grad():
            return run_forward(adopted, values).results
    flattening = ArgumentFlattening.of(adopted.schema, values)
    primitive = OperatorPrimitive(registered, flattening)
    return differentiate(primitive, flattening.flatten(values))


def _is_plain(kind: ArgumentType, value: Any) -> bool:
    """Return True if a value needs no conversion, and is not a tensor of an unsupported kind."""
    if isinstance(value, Tensor):
        return kind.is_tensor and not kind.sequence and unsupported_kind(value) is None
    if kind.base.schema == "float" and isinstance(value, int):
        return False  # the dispatcher converts it to a float
    return kind.accepts(value) and not (
        kind.is_tensor and any(unsupported_kind(each) for each in value or ())
    )
