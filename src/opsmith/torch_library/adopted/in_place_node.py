"""The autograd node of an adopted class that writes in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import AdoptedFunction, class_of, note
from opsmith.torch_library.adopted.forward import ForwardRun, run_forward
from opsmith.torch_library.adopted.node import AdoptedNode, save_run, uses_class_backward
from opsmith.torch_library.autograd.in_place_node import InPlaceNode, InPlacePrimitive
from opsmith.torch_library.autograd.node import LEADING_ARGUMENTS, Primitive
from opsmith.torch_library.autograd.random_state import RandomState
from opsmith.torch_library.contract import refuse_nondeterminism
from opsmith.torch_library.flattening import Flat


class AdoptedInPlacePrimitive(InPlacePrimitive):
    """A write by the forward of an adopted class."""

    def keep_before(self, flat: Flat) -> None:
        """Copy what the call writes over if a second order needs it, as far as earlier runs show."""
        adopted = class_of(self.specification.origin)
        needs = [isinstance(value, Tensor) and value.requires_grad for value in flat]
        if not uses_class_backward(self, self.flattening.needed(needs)):
            super().keep_before(flat)
            return
        flags = adopted.flags(adopted.spread(self.flattening.pack(flat)))
        if adopted.facts.keeps_under.get(flags, True):
            self.before = {at: flat[at].clone() for at in self.written if flat[at] is not None}


class AdoptedInPlaceNode(AdoptedNode):
    """Base of the autograd nodes of adopted classes that write in place."""

    @staticmethod
    def forward(ctx: Any, primitive: Primitive, forward_mode: bool, *flat: Any) -> Flat:
        """Run the class's forward on the arguments themselves, and keep its context."""
        assert isinstance(primitive, AdoptedInPlacePrimitive)
        specification, values = primitive.specification, primitive.flattening.pack(flat)
        adopted, ctx.state = class_of(specification.origin), None
        needs = primitive.flattening.needed(ctx.needs_input_grad[LEADING_ARGUMENTS:])
        if not uses_class_backward(primitive, needs):
            return InPlaceNode.forward(ctx, primitive, forward_mode, *flat)
        refuse_nondeterminism(specification)
        state = RandomState.now(flat) if adopted.random else None
        run = run_forward(adopted, values, needs, in_place=True)
        written = [position for position in primitive.written if flat[position] is not None]
        _refuse_constants(adopted, run)
        before = [primitive.before.get(position, value) for position, value in enumerate(flat)]
        keeps = save_run(ctx, primitive, before, run, state, lost=bool(written) and not primitive.before)
        facts, flags = adopted.facts, adopted.flags(adopted.spread(values))
        note(facts.keeps_under, flags, keeps or facts.keeps_under.get(flags, False))
        ctx.mark_dirty(*(flat[position] for position in written))
        return run.results


def _refuse_constants(adopted: AdoptedFunction, run: ForwardRun) -> None:
    """Refuse a result that is written, and declared as non-differentiable although it requires a gradient.

    Raises:
        MutationError: Naming the argument.
    """
    for position in run.constant:
        name, result = adopted.schema.results[position].written, run.results[position]
        if name is not None and result.requires_grad:
            raise adopted.error(
                errors.MutationError,
                f"`{adopted.name}.forward` marks `{name}` as dirty and as non-differentiable, and it "
                "requires a gradient: its history would still be that of the value before the call",
                argument=name,
                hint=f"call it on `{name}.detach()`",
            )
