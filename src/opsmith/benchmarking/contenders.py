"""Contenders: implementations that are timed, and the comparison of their results and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.benchmarking.result import Contender
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.kernels import choose
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.schema import Schema
from opsmith.core.source_hash import source_hash
from opsmith.judging.answer import Answer
from opsmith.judging.compare import exact_difference, form_difference
from opsmith.judging.judge import judge
from opsmith.judging.tensors import CPU, is_inexact, replica

Baselines = Mapping[str, Callable[..., Any]]
RESERVED_NAMES = ("native", "operator", "reference", "compiled", "copy", "multiply")
"""Names that a baseline must not have."""


@dataclass(frozen=True)
class Candidate:
    """A contender with its function.

    Args:
        about: Its description in a benchmark. function: Its implementation, which takes the arguments of a
            call, and returns the visible results.
    """

    about: Contender
    function: Callable[..., Any]


@dataclass(frozen=True)
class ContenderArguments:
    """Arguments of a call; every contender gets the same tensors.

    Args:
        sample: Structure of the arguments.
        flat: Their values; no tensor requires a gradient.
        leaves: The same values in the same memory; here differentiable inputs require a gradient.
    """

    sample: Sample
    flat: tuple[Any, ...]
    leaves: tuple[Any, ...]

    @classmethod
    def of(
        cls, sample: Sample, flat: Sequence[Any], differentiable: Callable[[str], bool]
    ) -> ContenderArguments:
        """Make the arguments of a call.

        Args:
            sample: Their structure.
            flat: Their values.
            differentiable: Returns True for the name of a differentiable input.
        """
        leaves = tuple(
            value.detach().requires_grad_() if is_inexact(value) and differentiable(name) else value
            for name, value in zip(sample.names, flat, strict=True)
        )
        return cls(sample, tuple(flat), leaves)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that require no gradient."""
        return tensors_in(list(self.flat))

    @property
    def sought(self) -> list[Tensor]:
        """Return the inputs for which gradients are computed."""
        return [leaf for leaf in tensors_in(list(self.leaves)) if leaf.requires_grad]

    def call(self, function: Callable[..., Any], *, leaves: bool = False) -> Callable[[], Any]:
        """Return a call of a function with these arguments."""
        args, kwargs = self.sample.arguments(self.leaves if leaves else self.flat)
        return lambda: function(*args, **kwargs)


def refuse_baselines(baselines: object) -> None:
    """Raise an error for baselines that are not functions, or have a reserved name.

    Raises:
        UsageError: With the name.
    """
    fits = isinstance(baselines, Mapping) and all(
        isinstance(name, str) and name and callable(baseline) for name, baseline in baselines.items()
    )
    taken = [name for name in baselines if name in RESERVED_NAMES] if isinstance(baselines, Mapping) else []
    if not fits or taken:
        raise errors.UsageError(
            f"a baseline must not be named `{taken[0]}`" if taken else "baselines must be functions by name",
            argument="baselines",
            expected="functions by name, with the operator's arguments"
            + (f"; not {', '.join(f'`{name}`' for name in RESERVED_NAMES)}" if taken else ""),
            got=None if taken else shown(baselines),
            hint='write `baselines={"einsum": by_einsum}`',
        )


def candidates(
    operator: Operator[..., Any], arguments: ContenderArguments, baselines: Baselines, *, compiled: bool
) -> list[Candidate]:
    """Return the contenders of one size: the operator, its reference, the compiled reference, baselines."""
    specification = operator.specification
    accepted, rejected = choose(specification.kernels, arguments.sample.flattening.pack(arguments.flat))
    if accepted is not None:
        name, by = "native", f"kernel for {accepted.kernel.device}, {accepted.kernel.where}"
    else:
        name, by = "operator", f"reference and formulas, {specification.where}"
        reasons = "; ".join(f"{each.kernel.where}: {each.reason}" for each in rejected if not each.elsewhere)
        by += f"; kernels that do not take the call: {reasons}" if reasons else ""
    found = [Candidate(Contender(name, "operator", by), operator)]
    plain = without_hidden_results(specification.reference, specification.schema)
    source = source_hash(specification.reference)
    about = Contender("reference", "reference", f"PyTorch, {specification.where}", source=source)
    found.append(Candidate(about, plain))
    if compiled and not specification.opaque:
        words = "torch.compile of the reference, only for these sizes"
        about = Contender("compiled", "compiled", words, source=source)
        found.append(Candidate(about, fresh_compiled(plain)))
    for title, baseline in baselines.items():
        found.append(Candidate(Contender(title, "baseline", where(baseline)), baseline))
    return found


def without_hidden_results(reference: Callable[..., Any], schema: Schema) -> Callable[..., Any]:
    """Wrap the reference so that it returns only the visible results."""
    if len(schema.visible) == len(schema.results):
        return reference
    visible = schema.visible

    def without_hidden(*args: Any, **kwargs: Any) -> Any:
        results = reference(*args, **kwargs)
        shown = tuple(results[index] for index in visible)
        return shown[0] if len(shown) == 1 else shown

    return without_hidden


def fresh_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a copy of a function, because torch keeps at most eight compiled versions of a code object.

    With more versions it would silently run the function uncompiled.
    """

    def reference(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    copied = FunctionType(
        reference.__code__.replace(),
        reference.__globals__,
        reference.__name__,
        reference.__defaults__,
        reference.__closure__,
    )
    compiled: Callable[..., Any] = torch.compile(copied, dynamic=False)
    return compiled


def gradients_of(call: Callable[[], Any], sought: Sequence[Tensor], grad_outputs: Sequence[Tensor]) -> Any:
    """Run a call forward and backward, and return the gradients, None for a missing one."""
    results = [each for each in results_of(call()) if each.requires_grad]
    return torch.autograd.grad(results, sought, grad_outputs, allow_unused=True)


def results_of(returned: Any) -> list[Tensor]:
    """Return the tensors in the value of a call."""
    if isinstance(returned, Tensor):
        return [returned]
    every: list[Tensor] = []
    for each in returned if isinstance(returned, list | tuple) else ():
        every += results_of(each)
    return every


def first_call(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the value of the first call, and its time in seconds, compilation included."""
    start = time.perf_counter()
    with without_warnings():
        returned = call()
    return returned, time.perf_counter() - start


Function = Callable[..., object]


@dataclass(frozen=True)
class ReferenceAnswer:
    """Results and gradients of the reference in one size, with their error bounds.

    Args:
        results: Results of the reference, in the dtype that is measured.
        gradients: Its gradients; empty if there is no backward.
        right: Right results, then gradients, each with its error bound; None if values must be equal.
        grad_outputs: Gradient of each differentiable result.
    """

    results: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    right: tuple[Answer | None, ...]
    grad_outputs: tuple[Tensor, ...]

    def fault(self, results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> str | None:
        """Return the first difference in a contender's results and gradients; None if there is none."""
        if len(results) != len(self.results):
            return f"it returns {len(results)} tensors, but the reference returns {len(self.results)}"
        for at, (got, expected) in enumerate(zip(results, self.results, strict=True)):
            fault = _fault(got, expected, self.right[at])
            if fault is not None:
                return f"result {at}: {fault}" if len(results) > 1 else f"its result: {fault}"
        rest = self.right[len(self.results) :]
        for at, (gradient, wanted, right) in enumerate(zip(gradients, self.gradients, rest, strict=True)):
            one, other = _zeros_if_none(gradient, wanted), _zeros_if_none(wanted, gradient)
            fault = None if one is None or other is None else _fault(one, other, right)
            if fault is not None:
                return f"its gradient {at}: {fault}" if len(gradients) > 1 else f"its gradient: {fault}"
        return None


def reference_answer(
    reference: Function, arguments: ContenderArguments, seed: int, *, backward: bool, exact: bool
) -> ReferenceAnswer:
    """Run the reference, and bound its rounding errors.

    Args:
        reference: The reference, without hidden results.
        arguments: The arguments of all contenders.
        seed: Seed of torch's generator and of the grad_outputs.
        backward: Compare gradients, too.
        exact: True if a run in float64 is more accurate than a run in the dtype.
    """
    torch.manual_seed(seed)  # a random operator draws the same numbers for each contender
    with torch.set_grad_enabled(backward):
        returned = results_of(arguments.call(reference, leaves=backward)())
    generator = torch.Generator().manual_seed(seed)
    grad_outputs = tuple(_grad_output_for(each, generator) for each in returned if each.requires_grad)
    gradients: tuple[Tensor | None, ...] = ()
    if grad_outputs:
        differentiable = [each for each in returned if each.requires_grad]
        gradients = torch.autograd.grad(differentiable, arguments.sought, grad_outputs, allow_unused=True)
    results = tuple(each.detach() for each in returned)
    largest = max(each.numel() for each in (*results, *arguments.tensors))
    in_float64 = _float64_answer(reference, arguments, grad_outputs, seed) if exact else None
    truths = in_float64 if in_float64 is not None else (*results, *gradients)
    right = tuple(
        _right(truth, ordinary, largest, more_exact=in_float64 is not None)
        for truth, ordinary in zip(truths, (*results, *gradients), strict=True)
    )
    return ReferenceAnswer(results, gradients, right, grad_outputs)


def run_contender(
    function: Function, arguments: ContenderArguments, answer: ReferenceAnswer, seed: int
) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
    """Return the results of a contender, and its gradients if they are compared."""
    torch.manual_seed(seed)
    with torch.no_grad():
        results = results_of(arguments.call(function)())
    if not answer.grad_outputs:
        return results, ()
    if len(results) != len(answer.results) or any(
        got.shape != expected.shape for got, expected in zip(results, answer.results, strict=True)
    ):
        return results, ()  # `fault` reports it; the grad_outputs have the right shapes
    torch.manual_seed(seed)
    gradients = gradients_of(arguments.call(function, leaves=True), arguments.sought, answer.grad_outputs)
    return results, tuple(gradients)


def _float64_answer(
    reference: Function, arguments: ContenderArguments, grad_outputs: Sequence[Tensor], seed: int
) -> tuple[Tensor | None, ...] | None:
    """Return results and gradients in float64; None if the reference does not run in float64."""
    flat = [replica(value, torch.float64) for value in arguments.flat]
    leaves = tuple(
        value.requires_grad_() if isinstance(leaf, Tensor) and leaf.requires_grad else value
        for value, leaf in zip(flat, arguments.leaves, strict=True)
    )
    again = ContenderArguments(arguments.sample, tuple(flat), leaves)
    torch.manual_seed(seed)
    try:
        with torch.set_grad_enabled(bool(grad_outputs)):
            results = results_of(again.call(reference, leaves=bool(grad_outputs))())
        differentiable = [each for each in results if each.requires_grad]
        back = [replica(each, torch.float64) for each in grad_outputs]
        gradients = (
            torch.autograd.grad(differentiable, again.sought, back, allow_unused=True) if grad_outputs else ()
        )
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # its code has a fixed dtype
        return None
    return (*(each.detach() for each in results), *gradients)


def _right(truth: Tensor | None, ordinary: Tensor | None, largest: int, *, more_exact: bool) -> Answer | None:
    if truth is None or ordinary is None or not is_inexact(ordinary) or truth.shape != ordinary.shape:
        return None
    value = replica(truth, torch.float64, CPU)
    return Answer(value, ordinary.detach(), ordinary.dtype, None, 0, largest, more_exact)


def _fault(got: Tensor, expected: Tensor, right: Answer | None) -> str | None:
    form = form_difference(got, expected)
    if form is not None:
        return f"it has the {form.aspect} {form.got}, but the reference has {form.expected}"
    difference = exact_difference(got, expected) if right is None else judge(got, right).difference
    return None if difference is None else str(difference)


def _zeros_if_none(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Replace a missing gradient by zeros."""
    return torch.zeros_like(like) if tensor is None and like is not None else tensor


def _grad_output_for(result: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a grad_output for a result: dense, even if the result is not."""
    wide = torch.complex128 if result.is_complex() else torch.float64
    drawn = torch.randn(result.shape, generator=generator, dtype=wide)
    return torch.empty_like(result).copy_(drawn).detach()
