"""An autograd node generated for an adopted class: its code runs on torch's own context, as under `apply`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import AdoptedFunction, ClassFormula
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.class_rule import PLACEHOLDER, ClassKept, ClassRule
from opsmith.torch_library.adopted.context import Context, SavedTensors, tensor_attributes
from opsmith.torch_library.adopted.forward import copies_of_results, finished_run, late_writes, unaliased
from opsmith.torch_library.adopted.gradients import by_position, grad_output_error
from opsmith.torch_library.arguments import unsupported_kind
from opsmith.torch_library.autocast import autocast_in_force
from opsmith.torch_library.autograd.formula_rule import RecordedOperator
from opsmith.torch_library.autograd.gradient_values import CallMetadata, TensorMetadata, fit, has_gradient
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator
from opsmith.torch_library.autograd.saved_values import SavedValues
from opsmith.torch_library.calls.computation import UnknownCallError
from opsmith.torch_library.contract import are_new
from opsmith.torch_library.flattening import ArgumentFlattening


class ClassNodes:
    """Generated nodes of an adopted class that writes into nothing, each for one signature of its tensors.

    Args:
        registered: The operator.
        adopted: Its class.
    """

    def __init__(self, registered: RegisteredOperator, adopted: AdoptedFunction) -> None:
        self._specification, self._adopted = registered.specification, adopted
        flattening = ArgumentFlattening(adopted.schema, (None,) * len(adopted.schema.arguments))
        self._rule = ClassRule(OperatorPrimitive(registered, flattening))
        self._formula = next(
            rule for rule in self._specification.gradients.rules.values() if isinstance(rule, ClassFormula)
        )
        self._classes: dict[tuple[Any, ...], Any] = {}

    def of(self, given: dict[str, Any]) -> Any:
        """The node class for calls with tensors like these, made once."""
        key = tuple(
            (value.dtype, value.device, value.requires_grad) if isinstance(value, Tensor) else None
            for value in given.values()
        )
        if key not in self._classes:
            self._classes[key] = self._write(given)
        return self._classes[key]

    def _write(self, given: dict[str, Any]) -> Any:
        specification, adopted = self._specification, self._adopted
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        # Of these tensors nothing is kept: the class lives as long as the operator.
        needed = {name: (each.dtype, each.device) for name, each in tensors.items() if each.requires_grad}
        in_cpp, count = capabilities.calls_in_cpp(), len(adopted.schema.results)
        names: dict[str, Any] = {
            "_op_Tensor": Tensor,
            "_op_strided": torch.strided,
            "_op_type": type,
            "_op_tuple": tuple,
            "_op_len": len,
            "_op_are_new": in_cpp.freshness(count) if in_cpp else partial(are_new, count),
            "_op_Function": torch.autograd.Function,
            "_op_class": adopted.function_class,
            "_op_backward": adopted.backward,
            "_op_facts": adopted.facts,
            "_op_apart": self._apart,
            "_op_tensors_of": tensor_attributes,
            "_op_settle": self._settled,
            "_op_has_gradient": has_gradient,
            "_op_compiling": torch.compiler.is_dynamo_compiling,
            "_op_grad_enabled": torch.is_grad_enabled,
            "_op_transform": capabilities.innermost_transform,
            "_op_own": self._own_context,
            "_op_save": self._save,
            "_op_written": partial(_raise, partial(grad_output_error, adopted)),
            "_op_answers": self._answers,
            "_op_full": partial(self._full_backward, tuple(tensors), needed),
        }
        for name, (dtype, device) in needed.items():
            names[f"_op_dtype_{name}"], names[f"_op_device_{name}"] = dtype, device
            names[f"_op_fit_{name}"] = partial(self._fitted, name, dtype, device)
        exec(_source(specification, adopted, list(tensors), list(needed)), names)
        node = names[specification.short_name]
        node.recorded_operator = RecordedOperator(specification, ())
        capabilities.direct_backward(node, node.backward)
        return node

    def _settled(self, ctx: Any, before: Sequence[int], returned: Any, given: tuple[Any, ...]) -> Any:
        """The results of a forward that returned no new tensors, or kept more than plain values.

        Raises:
            UnknownCallError: If they are others than the class was adopted with.
            MutationError: If it wrote into an argument, which it did not in earlier runs.
        """
        adopted, flags = self._adopted, self._adopted.flags(given)
        context = Context.of_torch(adopted, ctx, ctx.to_save or ())
        counts = iter(before)
        versions = [next(counts) if isinstance(value, Tensor) else None for value in given]
        try:
            run, written, _ = finished_run(
                adopted, context, returned, given, flags, versions, handed=given, copies={}, own=frozenset()
            )
        except (errors.ResultTypeError, errors.ResultCountError) as error:
            raise UnknownCallError from error
        if written:
            raise late_writes(adopted, flags, given, written)
        vars(ctx).clear()  # a result in the context of its own node would close a reference cycle
        ctx.opsmith_kept = None
        self._rule.keep_run(ctx, given, run, ctx.needs_input_grad, of_torch=True)
        return run.results if isinstance(adopted.outputs, tuple) else run.results[0]

    def _apart(self, ctx: Any, returned: Any, given: tuple[Any, ...]) -> Any:
        """The results, cloned where they alias an input or another; None if they are no strided tensors."""
        adopted = self._adopted
        several = isinstance(adopted.outputs, tuple)
        results = returned if several else (returned,)
        if type(results) is not tuple or len(results) != len(adopted.schema.results):
            return None
        for each in results:
            if type(each) is not Tensor or unsupported_kind(each) is not None:
                return None
        apart = unaliased(adopted, results, given, given, frozenset())
        attributes = ctx.__dict__
        if ctx.to_save is None is ctx.non_differentiable and not attributes:
            return apart if several else apart[0]
        if ctx.non_differentiable:
            returned_as = {id(result): own for result, own in zip(results, apart, strict=True)}
            ctx.non_differentiable = tuple(returned_as.get(id(each), each) for each in ctx.non_differentiable)
        clones = copies_of_results(results, apart, given)
        if ctx.to_save:
            ctx.to_save = tuple(clones.get(id(each), each) for each in ctx.to_save)
        for name, value in attributes.items():
            if id(value) in clones:
                attributes[name] = clones[id(value)]
        return apart if several else apart[0]

    def _save(
        self, ctx: Any, names: Sequence[str], inputs: Sequence[Tensor], others: tuple[Any, ...] | None
    ) -> tuple[int, dict[str, int], tuple[int, ...], tuple[Any, ...] | None, str | None]:
        """Save tensors beside those that the class saved itself.

        Args:
            ctx: torch's context.
            names: Names of its attributes that are tensors, which leave it.
            inputs: The tensors among the arguments, if they are kept.
            others: The arguments that are no tensors; None if the inputs are not kept.

        Returns:
            Number of the class's own tensors; places of its attributes, and of the inputs; the others;
            the autocast in force.
        """
        saved = SavedTensors(ctx.to_save or ())
        count = len(saved.tensors)
        attributes = {name: saved.place(ctx.__dict__.pop(name)) for name in names}
        places = tuple(map(saved.place, inputs))
        ctx.to_save = tuple(saved.tensors)
        return count, attributes, places, others, autocast_in_force()

    def _own_context(
        self, ctx: Any, saved: Sequence[Tensor | None], count: int, attributes: Mapping[str, int]
    ) -> Context:
        """The class's context, without the inputs that were saved beside its own tensors.

        Args:
            ctx: torch's context.
            saved: Its saved tensors, which hooks unpack once.
            count: Number of the tensors that the class saved.
            attributes: Places of its attributes that are tensors.
        """
        context = Context.of_torch(self._adopted, ctx, saved[:count])
        vars(context).update((name, saved[at]) for name, at in attributes.items())
        return context

    def _answers(self, ctx: Any, answer: Any, tensors: Sequence[bool]) -> tuple[Any, ...]:
        """One gradient for each argument, from what a backward returned."""
        given = [PLACEHOLDER if is_tensor else None for is_tensor in tensors]
        return tuple(by_position(self._adopted, ctx.needs_input_grad, answer, given))

    def _fitted(
        self, name: str, dtype: torch.dtype, device: torch.device, gradient: Any, shape: torch.Size
    ) -> Tensor:
        """A gradient that has the shape, dtype and device of its input."""
        expected = TensorMetadata(shape, dtype, device)
        operator = self._specification.name
        return fit(gradient, expected, label=name, operator=operator, formula=self._formula, mixed=True)

    def _full_backward(
        self,
        tensors: Collection[str],
        needed: dict[str, tuple[torch.dtype, torch.device]],
        ctx: Any,
        kept: tuple[Any, ...] | None,
        *grads: Tensor | None,
    ) -> tuple[Any, ...]:
        """The backward of `ClassRule`: with all checks, and with a graph."""
        names = self._adopted.schema.names
        if kept is None:
            return self._rule.backward(ctx, grads)
        *shapes, inputs = kept
        pairs = zip(needed.items(), shapes, strict=True)
        expected = {name: TensorMetadata(shape, *like) for (name, like), shape in pairs}
        saved = ctx.saved_tensors
        count, attributes, places, others, autocast = inputs or (len(saved), {}, (), None, None)
        metadata = CallMetadata(
            tuple(expected.get(name) for name in names),
            (None,) * len(names),
            tuple(None if grad is None else TensorMetadata.of(grad) for grad in grads),
            mixed=True,
        )
        given = tuple(PLACEHOLDER if name in tensors else None for name in names)
        loaded = None
        if others is not None:
            positions, rest = iter(range(len(tensors))), iter(others)
            loaded = SavedValues(
                tuple(
                    (name, False, (next(positions) if name in tensors else (next(rest),),)) for name in names
                )
            )
        state = ClassKept(places, loaded, others is not None, given, metadata, autocast)
        context = self._own_context(ctx, saved, count, attributes)
        return tuple(self._rule.gradients(state, context, saved, grads))


def _raise(error: Callable[[], errors.OpsmithError]) -> None:
    raise error()


def _keeps_inputs(adopted: AdoptedFunction) -> bool | None:
    """Return True if a second order needs the inputs, None if only where saved tensors have no graph."""
    stands_in = adopted.reference is not None and not adopted.surrogate
    if stands_in and (adopted.once_differentiable or adopted.leaves_torch):
        return True
    return False if not stands_in and adopted.once_differentiable else None


def _source(specification: Any, adopted: AdoptedFunction, tensors: list[str], needed: list[str]) -> str:
    """Source of the class, for calls in which these arguments are tensors, and these need a gradient."""
    schema = adopted.schema
    arguments = "".join(f"{name}, " for name in schema.names)
    forward = f"_op_result = _op_class.forward(_op_ctx, {arguments})"
    if adopted.has_setup_context:
        forward = f"""_op_result = _op_class.forward({arguments})
        _op_class.setup_context(_op_ctx, ({arguments}), _op_result)"""
    versions = _versions(tensors)
    several = isinstance(adopted.outputs, tuple)
    copied = [
        "0 in _op_facts.copied",  # the reason is recorded
        "_op_are_new(_op_result)",  # a dense tensor
        "not _op_result.is_quantized",
        "_op_ctx.to_save is None is _op_ctx.non_differentiable and not _op_ctx.__dict__",
    ]
    is_copied = "False" if several else " and ".join(copied)
    count = len(schema.results)
    results = [f"_op_result[{at}]" for at in range(count)] if several else ["_op_result"]
    grads = [f"_op_grad_{at}" for at in range(count)]
    counts = _versions(grads)
    shapes = "".join(f"{name}.shape, " for name in needed)
    others = "".join(f"{name}, " for name in schema.names if name not in tensors)
    inputs = "".join(f"{name}, " for name in tensors)
    known = " or ".join(f"_op_tensor is {each}" for each in ("None", *tensors, *results))
    settle = f"return _op_settle(_op_ctx, _op_before, _op_result, ({arguments}))"
    on_the_way = "_op_keeps = _op_keeps or _op_has_gradient(_op_tensor.dtype)"
    always = _keeps_inputs(adopted)
    kept = f"""_op_inputs, _op_keeps, _op_names = None, {always is True}, ()
        _op_saved = _op_ctx.to_save or ()
        if _op_ctx.__dict__:
            _op_taken = _op_tensors_of(_op_ctx, ({arguments}))
            if _op_taken is None: {settle}
            _op_names, _op_hides = _op_taken
            {"_op_keeps = _op_keeps or _op_hides" if always is None else ""}
            _op_saved = [*_op_saved, *[_op_ctx.__dict__[_op_name] for _op_name in _op_names]]
        for _op_tensor in _op_saved:
            if {known}: continue
            if _op_type(_op_tensor) is not _op_Tensor: {settle}
            {on_the_way if always is None else ""}
        if _op_keeps: _op_inputs = _op_save(_op_ctx, _op_names, ({inputs}), ({others}))
        elif _op_names: _op_inputs = _op_save(_op_ctx, _op_names, (), None)
        _op_ctx.opsmith_kept = ({shapes}_op_inputs)"""
    copied_result = "_op_result = _op_result.clone()"
    if always is not True:  # nothing else is kept, as the condition says
        nothing = f"_op_ctx.opsmith_kept = ({shapes}None)\n            " if needed else ""
        copied_result = f"{nothing}return _op_result.clone()"
    gradients = [f"_op_d_{name}" for name in schema.names]
    flags = ", ".join(str(name in tensors) for name in schema.names)
    strays = " or ".join(f"_op_d_{name} is not None" for name in schema.names if name not in tensors)
    special = [
        "_op_grad_enabled()",
        "_op_compiling()",
        "_op_facts.grads_written is not False",
        "_op_kept is None",
        "_op_transform() is not None",
        *(f"({grad} is not None and {grad}.is_inference())" for grad in grads),
    ]
    checks = "".join(f"\n        {_check(name)}" for name in needed)
    returned = "".join(f"_op_d_{name}, " if name in needed else "None, " for name in schema.names)
    return f"""
class {specification.short_name}(_op_Function):
    @staticmethod
    def forward(_op_ctx, {arguments}):
        _op_before = {versions}
        {forward}
        if _op_before != {versions} or _op_ctx.dirty_tensors:
            {settle}
        if _op_are_new(_op_result, {inputs}):
            pass
        elif {is_copied}:
            {copied_result}
        else:
            _op_new = _op_apart(_op_ctx, _op_result, ({arguments}))
            if _op_new is None:
                {settle}
            _op_result = _op_new
        {kept if needed else ""}
        return _op_result

    @staticmethod
    def backward(_op_ctx, {", ".join(grads)}):
        _op_kept = _op_ctx.opsmith_kept
        if {" or ".join(special)}:
            return _op_full(_op_ctx, _op_kept, {", ".join(grads)})
        {"".join(f"_op_shape_{name}, " for name in needed)}_op_inputs = _op_kept
        _op_before = {counts}
        _op_own_ctx = _op_ctx
        if _op_inputs is not None: _op_own_ctx = _op_own(_op_ctx, _op_ctx.saved_tensors, *_op_inputs[:2])
        _op_answer = _op_backward(_op_own_ctx, {", ".join(grads)})
        if _op_before != {counts}: _op_written()
        if _op_type(_op_answer) is not _op_tuple or _op_len(_op_answer) != {len(gradients)}:
            _op_answer = _op_answers(_op_ctx, _op_answer, ({flags},))
        {", ".join(gradients)}, = _op_answer
        {f"if {strays}: _op_answers(_op_ctx, _op_answer, ({flags},))" if strays else ""}{checks}
        return ({returned})
"""


def _versions(names: Sequence[str]) -> str:
    """Source of a tuple of the version counters of tensors of these names; None for one that is None."""
    return f"({''.join(f'None if {name} is None else {name}._version, ' for name in names)})"


def _check(name: str) -> str:
    """Source of the check of one gradient, which is fitted to its input if it does not match."""
    plain = f"_op_type(_op_d_{name}) is _op_Tensor and _op_d_{name}.layout is _op_strided"
    fits = f"_op_d_{name}.dtype is _op_dtype_{name} and _op_d_{name}.device == _op_device_{name}"
    condition = f"_op_d_{name} is None or ({plain} and {fits} and _op_d_{name}.shape == _op_shape_{name})"
    return f"if not ({condition}): _op_d_{name} = _op_fit_{name}(_op_d_{name}, _op_shape_{name})"
