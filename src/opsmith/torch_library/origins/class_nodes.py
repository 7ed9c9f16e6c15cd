"""Autograd nodes of an adopted class: known calls run its code with few checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import eq, is_
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.origins.function_class import AdoptedFunction, ClassFormula, note
from opsmith.torch_library import capabilities
from opsmith.torch_library.arguments import unsupported_kind
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.autograd.formula_rule import RecordedOperator
from opsmith.torch_library.autograd.gradient_values import CallMetadata, TensorMetadata, fit, has_gradient
from opsmith.torch_library.autograd.node import BoundNode, NodeContext
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator
from opsmith.torch_library.autograd.saved_values import SavedValues
from opsmith.torch_library.calls.computation import UnknownCallError
from opsmith.torch_library.contract import are_new
from opsmith.torch_library.flattening import ArgumentFlattening
from opsmith.torch_library.origins.class_rule import (
    ClassKept,
    ClassRule,
    keeps_inputs,
    placeholder,
    refuse_constants,
)
from opsmith.torch_library.origins.context import NUMBERS_AND_NAMES, Context, hidden, holds_no_tensor
from opsmith.torch_library.origins.forward import (
    copies_of_results,
    finished_run,
    late_writes,
    unaliased,
    version_of,
)
from opsmith.torch_library.origins.gradients import by_position, grad_output_error
from opsmith.torch_library.origins.misfits import late_structure

_NOTHING = id(None)


class _Kept(NamedTuple):
    """Values other than tensors that a call keeps for its backward.

    Args:
        context: The context of the class, without its tensors.
        shapes: The shape of each argument whose gradient is needed.
        own: Number of the tensors that the class saved.
        attributes: Names of attributes of the context, with their positions among the saved tensors.
        inputs: Positions among the saved tensors of the arguments that are tensors; empty if these are not
            saved.
        others: The other arguments; None if the arguments are not kept.
        autocast: Autocast of the call; None if the arguments are not kept.
    """

    context: Context
    shapes: list[torch.Size]
    own: int
    attributes: Sequence[tuple[str, int]] = ()
    inputs: Sequence[int] = ()
    others: Sequence[Any] | None = None
    autocast: str | None = None


def _restored(kept: tuple[Any, ...], saved: tuple[Tensor | None, ...]) -> Context:
    """The context of a call, from the values of `_Kept` and the tensors that it saved first."""
    context: Context = kept[0]
    held = [(name, saved[at]) for name, at in kept[3]] if len(kept) > 3 and kept[3] else ()
    return context.with_tensors(saved[: kept[2]], held)


def _place(tensor: Tensor, saved: list[Any], places: dict[int, int]) -> int:
    """The position of a tensor among the saved tensors, to which it is added if it is missing."""
    place = places.setdefault(id(tensor), len(saved))
    if place == len(saved):
        saved.append(tensor)
    return place


class ClassNodes:
    """Nodes of an adopted class: one for each signature of its tensors.

    Args:
        registered: The operator, in its functional form.
        adopted: Its class.
    """

    def __init__(self, registered: RegisteredOperator, adopted: AdoptedFunction) -> None:
        self._specification, self._adopted = registered.specification, adopted
        flattening = ArgumentFlattening(adopted.schema, (None,) * len(adopted.schema.arguments))
        self._written = [adopted.schema.names.index(name) for name in adopted.schema.new_values]
        self._rule = ClassRule(OperatorPrimitive(registered, flattening), written=self._written)
        self._formula = next(
            rule for rule in self._specification.gradients.rules.values() if isinstance(rule, ClassFormula)
        )
        self._several = isinstance(adopted.outputs, tuple)
        self._applies: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of(self, given: dict[str, Any]) -> Callable[..., Any]:
        """The `apply` of the node for calls with tensors like these, made once."""
        tensors = tuple(
            (value.dtype, value.device, value.requires_grad) if isinstance(value, Tensor) else None
            for value in given.values()
        )
        key = self._adopted.facts.hides, *tensors
        if key not in self._applies:
            self._applies[key] = self._apply(given)
        return self._applies[key]

    def _apply(self, given: dict[str, Any]) -> Callable[..., Any]:
        """The `apply` for calls in which the same arguments are tensors and need a gradient."""
        adopted, places = self._adopted, dict(zip(given, range(len(given)), strict=True))
        # These tensors are not kept: the node lives as long as the operator.
        tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        needed = {
            name: (given[name].dtype, given[name].device) for name in tensors if given[name].requires_grad
        }
        needs = tuple(name in needed for name in given)
        at_tensors, at_needed = [places[name] for name in tensors], [places[name] for name in needed]
        expected = [(places[name], name, *like) for name, like in needed.items()]
        count, several, facts = len(adopted.schema.results), self._several, adopted.facts
        # The garbage collector sees tensors hidden on the context only for torch's own nodes.
        in_cpp = None if facts.hides else capabilities.calls_in_cpp()
        always, written = keeps_inputs(adopted), self._written
        fresh = count - len(written)
        are_fresh = in_cpp.freshness(fresh) if in_cpp else partial(are_new, fresh)
        are_left = [at not in written for at in at_tensors]
        with_setup, function_class = adopted.has_setup_context, adopted.function_class
        version, empty = capabilities.version_counter, Context(adopted, needs)
        is_tensor = [name in tensors for name in given]
        strays = [at for at, own in enumerate(is_tensor) if not own]
        own_backward: Any = adopted.backward
        keep_all = partial(self._kept, always, strays)
        keep = in_cpp.keeper(always, strays, NUMBERS_AND_NAMES, autocast_in_force) if in_cpp else keep_all

        def forward(ctx: NodeContext, *values: Any) -> Any:
            if facts.hides and in_cpp:
                raise UnknownCallError
            context, inputs = empty.with_tensors(()), [values[at] for at in at_tensors]
            before = [*map(version, inputs)]
            if with_setup:
                result = function_class.forward(*values)
                function_class.setup_context(context, values, result)
            else:
                result = function_class.forward(context, *values)
            after = [*map(version, inputs)]
            if written:
                results = result if several else (result,)
                usual = [*map(eq, before, after)] == are_left
                usual = usual and type(results) is tuple and len(results) == count
                usual = usual and _returns_written(context, results, [values[at] for at in written])
                rest = results[len(written) :] if usual else ()
                if not usual or (rest and not are_fresh(rest[0] if len(rest) == 1 else rest, *inputs)):
                    return self._settled(ctx, context, before, result, values)
            elif before != after or context.dirty_tensors:
                return self._settled(ctx, context, before, result, values)
            elif (
                0 in facts.copied
                and not (several or context.to_save or context.non_differentiable or vars(context))
                and are_fresh(result)
                and not result.is_quantized
            ):
                result = result.clone()  # the reason is recorded
            elif not are_fresh(result, *inputs):
                result = self._apart(context, returned := result, values)
                if result is None:
                    return self._settled(ctx, context, before, returned, values)
            if not expected:
                return result
            results = result if several else (result,)
            constants = several and not all(has_gradient(each.dtype) for each in results)
            if constants or context.non_differentiable:  # their metadata is kept for the backward
                return self._settled(ctx, context, before, result, values)
            parts = vars(context), context.to_save, inputs, results, values
            kept = keep(*parts) or keep_all(*parts)
            if kept is None or (written and len(kept) > 3):  # a kept argument is overwritten
                return self._settled(ctx, context, before, result, values)
            saved, *more = kept
            if written:
                ctx.dirty_tensors = context.dirty_tensors
            ctx.materialize_grads, ctx.to_save = False, saved
            ctx.kept = (context.without_tensors(), [values[at].shape for at in at_needed], *more)
            return result

        def backward(ctx: NodeContext, grads: Sequence[Any]) -> Any:
            kept = ctx.kept
            usual = not (torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling())
            usual = usual and facts.grads_written is False and type(kept) is tuple
            usual = usual and capabilities.innermost_transform() is None
            for grad in grads:
                usual = usual and grad is not None and not grad.is_inference()
            if not usual:
                return self._full_backward(tensors, needed, ctx, kept, grads)
            before = [*map(version, grads)]
            saves = kept[2] or len(kept) > 4 or (len(kept) > 3 and kept[3])
            saved = ctx.saved_tensors if saves else ()
            answer = own_backward(_restored(kept, saved), *grads)
            if before != [*map(version, grads)]:
                raise grad_output_error(adopted)
            if type(answer) is not tuple or len(answer) != len(needs):
                answer = answers(answer)
            elif strays and any(answer[at] is not None for at in strays):
                answers(answer)
            found: list[Any] = [None] * len(needs)
            for (at, name, dtype, device), shape in zip(expected, kept[1], strict=True):
                gradient = answer[at]
                fits = gradient is None or (
                    type(gradient) is Tensor
                    and gradient.layout is torch.strided
                    and gradient.dtype is dtype
                    and gradient.device == device
                    and gradient.shape == shape
                )
                found[at] = gradient if fits else self._fitted(name, dtype, device, gradient, shape)
            return tuple(found)

        def fit(at: int, gradient: Any, kept: tuple[Any, ...]) -> Tensor:
            index = at_needed.index(at)
            _, name, dtype, device = expected[index]
            return self._fitted(name, dtype, device, gradient, kept[1][index])

        def refuse_writes() -> NoReturn:
            raise grad_output_error(adopted)

        answers = partial(self._answers, needs, is_tensor)
        rule = SimpleNamespace(forward=forward, backward=backward)
        recorded = RecordedOperator(self._specification, ())
        own = (facts, own_backward, _restored, answers, fit, refuse_writes) if in_cpp else None
        return BoundNode(self._specification.short_name, rule, recorded, own, in_cpp=bool(in_cpp)).apply

    def _kept(
        self,
        always: bool | None,
        strays: Sequence[int],
        attributes: dict[str, Any],
        own: Sequence[Any],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        values: tuple[Any, ...],
    ) -> tuple[Any, ...] | None:
        """The tensors to save, and the last fields of `_Kept`; None if the full rule must handle the call.

        Tensors are removed from the attributes.

        Args:
            always: As `keeps_inputs` returns it.
            strays: Positions of the arguments that are not tensors.
            attributes: The attributes of the class's context.
            own: The tensors that the class saves.
            inputs: The tensors among the arguments.
            results: The results.
            values: The arguments.
        """
        known = {_NOTHING, *map(id, inputs), *map(id, results)}
        saved, places = [*own], {id(tensor): at for at, tensor in enumerate(own)}
        keeps, at_attributes = always is True, []
        for name, value in attributes.items():
            kind = type(value)
            if kind is Tensor or isinstance(value, Tensor):
                at_attributes.append((name, _place(value, saved, places)))
            elif kind not in NUMBERS_AND_NAMES and not holds_no_tensor((value,)):
                if isinstance(value, list | tuple | dict):
                    return None
                if hidden(value, {*map(id, values)}):
                    self._adopted.facts.hides = True
                    keeps = keeps or always is None
        for tensor in saved:
            if id(tensor) in known:
                continue
            if type(tensor) is not Tensor:
                return None
            keeps = keeps or (always is None and has_gradient(tensor.dtype))
        for name, _ in at_attributes:
            del attributes[name]
        if not keeps:
            return tuple(saved), len(own), at_attributes
        at_inputs = [_place(tensor, saved, places) for tensor in inputs]
        others = [values[at] for at in strays]
        return tuple(saved), len(own), at_attributes, at_inputs, others, autocast_in_force()

    def _settled(
        self,
        ctx: NodeContext,
        context: Context,
        before: Sequence[int],
        returned: Any,
        given: tuple[Any, ...],
    ) -> Any:
        """The results of a forward that did not return new tensors, or that kept more than plain values.

        Raises:
            UnknownCallError: If they differ from the results that the class was adopted with.
            MutationError: If it wrote into an argument into which earlier runs did not write.
        """
        adopted, flags = self._adopted, self._adopted.flags(given)
        counts, own = iter(before), frozenset(self._written)
        versions = [next(counts) if isinstance(value, Tensor) else None for value in given]
        try:
            run, written, _ = finished_run(
                adopted, context, returned, given, flags, versions, handed=given, copies={}, own=own
            )
        except (errors.ResultTypeError, errors.ResultCountError) as error:
            changed = [at for at in self._written if versions[at] != version_of(given[at])]
            if changed:
                raise late_structure(adopted, adopted.schema.names[changed[0]]) from error
            raise UnknownCallError from error
        if written - own:
            raise late_writes(adopted, flags, given, written - own)
        if own:
            refuse_constants(adopted, run)
            ctx.dirty_tensors = tuple(given[at] for at in self._written)
            keeps = self._rule.keep_run(ctx, given, run, context.needs_input_grad, lost=True)
            note(adopted.facts.keeps_under, flags, keeps)
        else:
            self._rule.keep_run(ctx, given, run, context.needs_input_grad)
        return run.results if self._several else run.results[0]

    def _apart(self, context: Context, returned: Any, given: tuple[Any, ...]) -> Any:
        """The results, cloned if they alias an input or another result; None if one is no strided tensor."""
        adopted = self._adopted
        results = returned if self._several else (returned,)
        if type(results) is not tuple or len(results) != len(adopted.schema.results):
            return None
        for each in results:
            if type(each) is not Tensor or unsupported_kind(each) is not None:
                return None
        apart = unaliased(adopted, results, given, given, frozenset())
        if context.non_differentiable:
            returned_as = {id(result): own for result, own in zip(results, apart, strict=True)}
            constant = (returned_as.get(id(each), each) for each in context.non_differentiable)
            context.non_differentiable = tuple(constant)
        clones = copies_of_results(results, apart, given)
        context.to_save = tuple(clones.get(id(each), each) for each in context.to_save)
        attributes = vars(context)
        attributes.update({name: clones[id(each)] for name, each in attributes.items() if id(each) in clones})
        return apart if self._several else apart[0]

    def _answers(self, needs: Sequence[bool], is_tensor: Sequence[bool], answer: Any) -> tuple[Any, ...]:
        """One gradient for each argument, from the return value of a backward."""
        given = [placeholder() if own else None for own in is_tensor]
        return tuple(by_position(self._adopted, needs, answer, given))

    def _fitted(
        self, name: str, dtype: torch.dtype, device: torch.device, gradient: Any, shape: torch.Size
    ) -> Tensor:
        """A gradient, fitted to the shape, dtype and device of its input."""
        expected = TensorMetadata(shape, dtype, device)
        operator = self._specification.name
        return fit(gradient, expected, label=name, operator=operator, formula=self._formula, mixed=True)

    def _full_backward(
        self,
        tensors: Collection[str],
        needed: dict[str, tuple[torch.dtype, torch.device]],
        ctx: NodeContext,
        kept: Any,
        grads: Sequence[Tensor | None],
    ) -> tuple[Any, ...]:
        """The backward of `ClassRule`: with all checks, and with a graph."""
        names = self._adopted.schema.names
        if type(kept) is not tuple:
            return tuple(self._rule.backward(ctx, tuple(grads)))
        kept = _Kept(*kept)
        pairs = zip(needed.items(), kept.shapes, strict=True)
        expected = {name: TensorMetadata(shape, *like) for (name, like), shape in pairs}
        found = capabilities.result_metadata(ctx)
        results: list[TensorMetadata | None] = [
            TensorMetadata(torch.Size(shape), dtype, device) for shape, dtype, device in found
        ] or [None if grad is None else TensorMetadata.of(grad) for grad in grads]
        metadata = CallMetadata(
            tuple(expected.get(name) for name in names), (None,) * len(names), tuple(results), mixed=True
        )
        given = tuple(placeholder() if name in tensors else None for name in names)
        loaded = None
        if kept.others is not None:
            positions, rest = iter(range(len(tensors))), iter(kept.others)
            loaded = SavedValues(
                tuple(
                    (name, False, (next(positions) if name in tensors else (next(rest),),)) for name in names
                )
            )
        state = ClassKept(kept.inputs, loaded, kept.others is not None, given, metadata, kept.autocast)
        saves = kept.own or kept.attributes or kept.others is not None
        saved = ctx.saved_tensors if saves else ()
        return tuple(self._rule.gradients(state, _restored(kept, saved), saved, grads))


def _returns_written(context: Context, results: Sequence[Any], written: Sequence[Tensor]) -> bool:
    """Return True if a forward marked and returned these arguments first, and keeps only saved tensors."""
    plain = not (vars(context) or context.non_differentiable)
    marked = {*map(id, context.dirty_tensors)} == {*map(id, written)}
    return plain and marked and all(map(is_, results, written))
