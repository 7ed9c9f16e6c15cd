"""The autograd node of an operator that writes in place, with the derivatives of its functional form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from opsmith.core.cached_property import cached_property
from opsmith.torch_library.autograd.node import (
    LEADING_ARGUMENTS,
    OperatorNode,
    OperatorPrimitive,
    Primitive,
    RegisteredOperator,
    prepare_backward,
    random_state,
)
from opsmith.torch_library.flattening import ArgumentFlattening, Flat


class InPlacePrimitive(OperatorPrimitive):
    """A write, with the derivatives of the functional form.

    Args:
        registered: The functional form.
        flattening: Flat form of the arguments.
        write: Writes into argument values, and returns the results of the functional form.

    Attributes:
        before: Copies of the values that a formula needs and the call writes over, by flat position.
    """

    def __init__(
        self,
        registered: RegisteredOperator,
        flattening: ArgumentFlattening,
        write: Callable[[list[Any]], tuple[Any, ...]],
    ) -> None:
        super().__init__(registered, flattening)
        self._write = write
        self.before: dict[int, Tensor] = {}

    def keep_before(self, flat: Flat) -> None:
        """Copy what a formula needs and the call writes over; a second order goes through the copies."""
        needs = [isinstance(value, Tensor) and value.requires_grad for value in flat]
        saved = self.plan(self.flattening.needed(needs)).saved
        self.before = {
            position: flat[position].clone()
            for position in self.written
            if self.flattening.names[position] in saved and flat[position] is not None
        }

    @cached_property
    def written(self) -> list[int]:
        """Flat positions of the arguments that are written."""
        return self.flattening.positions(self.specification.schema.new_values)

    def call(self, flat: Sequence[Any]) -> Flat:
        """Write, and return the new values and the results."""
        return self._flat(self._write(self.flattening.pack(flat)))


class InPlaceNode(OperatorNode):
    """Base of the autograd nodes of operators that write in place."""

    @staticmethod
    def forward(ctx: Any, primitive: Primitive, forward_mode: bool, *flat: Any) -> Flat:
        """Write, and save the values that the backward needs: of what is written over, a copy."""
        assert isinstance(primitive, InPlacePrimitive)
        plan = primitive.plan(primitive.flattening.needed(ctx.needs_input_grad[LEADING_ARGUMENTS:]))
        state = random_state(primitive, plan, flat)
        results = primitive.below(flat)
        before = [primitive.before.get(position, value) for position, value in enumerate(flat)]
        prepare_backward(ctx, primitive, plan, before, results, state)
        ctx.mark_dirty(*(flat[position] for position in primitive.written if flat[position] is not None))
        return results
