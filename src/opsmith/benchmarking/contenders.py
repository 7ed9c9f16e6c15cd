"""The ways to compute an operator that are timed against one another."""

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
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.global_settings import quiet
from opsmith.core.calls import shown, tensors_in
from opsmith.core.kernels import choose
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.schema import Schema
from opsmith.core.source_hash import source_hash

Rivals = Mapping[str, Callable[..., Any]]
OWN = ("native", "operator", "reference", "compiled", "copy", "multiply")
"""Names that rivals cannot have."""


@dataclass(frozen=True)
class Entrant:
    """A contender as it is called.

    Args:
        about: What a benchmark keeps of it.
        function: Takes a call's arguments, and returns results that callers see.
    """

    about: Contender
    function: Callable[..., Any]


@dataclass(frozen=True)
class Arguments:
    """The same tensors for every contender.

    Args:
        sample: How the arguments lie.
        flat: Their values; no tensor requires a gradient.
        leaves: The same memory, where inputs that have a gradient require one.
    """

    sample: Sample
    flat: tuple[Any, ...]
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, sample: Sample, flat: Sequence[Any], differentiable: Callable[[str], bool]) -> Arguments:
        """The arguments of a call.

        Args:
            sample: How they lie.
            flat: Their values.
            differentiable: Whether an input of this name has a gradient.
        """
        leaves = tuple(
            value.detach().requires_grad_() if is_inexact(value) and differentiable(name) else value
            for name, value in zip(sample.names, flat, strict=True)
        )
        return cls(sample, tuple(flat), leaves)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, none of which requires a gradient."""
        return tensors_in(list(self.flat))

    @property
    def sought(self) -> list[Tensor]:
        """The tensors that a gradient is asked for."""
        return [leaf for leaf in tensors_in(list(self.leaves)) if leaf.requires_grad]

    def call(self, function: Callable[..., Any], *, leaves: bool = False) -> Callable[[], Any]:
        """A call of a function with them."""
        args, kwargs = self.sample.arguments(self.leaves if leaves else self.flat)
        return lambda: function(*args, **kwargs)


def refuse_rivals(rivals: object, operator: str) -> None:
    """Refuse rivals that are no functions, or have a name that means something else.

    Raises:
        UsageError: Saying which.
    """
    fits = isinstance(rivals, Mapping) and all(
        isinstance(name, str) and name and callable(rival) for name, rival in rivals.items()
    )
    taken = [name for name in rivals if name in OWN] if isinstance(rivals, Mapping) else []
    if not fits or taken:
        raise errors.UsageError(
            f"a rival cannot be called `{taken[0]}`" if taken else "these are no rivals",
            operator=operator,
            argument="rivals",
            expected="functions by name, which take what the operator takes"
            + (f"; not {', '.join(f'`{name}`' for name in OWN)}" if taken else ""),
            got=None if taken else shown(rivals),
            hint='write `rivals={"einsum": by_einsum}`',
        )


def entrants(
    operator: Operator[..., Any], arguments: Arguments, rivals: Rivals, *, compiled: bool
) -> list[Entrant]:
    """Everyone who takes part in one size: the operator, its reference, that compiled, and rivals."""
    specification = operator.specification
    accepted, rejected = choose(specification.kernels, arguments.sample.flattening.pack(arguments.flat))
    if accepted is not None:
        name, by = "native", f"kernel for {accepted.kernel.device}, {accepted.kernel.where}"
    else:
        name, by = "operator", f"reference and formulas, {specification.where}"
        reasons = "; ".join(f"{each.kernel.where}: {each.reason}" for each in rejected if not each.elsewhere)
        by += f"; kernels that do not take it: {reasons}" if reasons else ""
    found = [Entrant(Contender(name, "operator", by), operator)]
    plain = visible(specification.reference, specification.schema)
    source = source_hash(specification.reference)
    about = Contender("reference", "reference", f"PyTorch, {specification.where}", source=source)
    found.append(Entrant(about, plain))
    if compiled and not specification.opaque:
        words = "torch.compile of the reference, for these sizes alone"
        about = Contender("compiled", "compiled", words, source=source)
        found.append(Entrant(about, fresh_compiled(plain)))
    for title, rival in rivals.items():
        found.append(Entrant(Contender(title, "rival", where(rival)), rival))
    return found


def visible(reference: Callable[..., Any], schema: Schema) -> Callable[..., Any]:
    """The reference without its hidden results, which callers never see."""
    if len(schema.visible) == len(schema.results):
        return reference
    places = schema.visible

    def without_hidden(*args: Any, **kwargs: Any) -> Any:
        results = reference(*args, **kwargs)
        shown = tuple(results[place] for place in places)
        return shown[0] if len(shown) == 1 else shown

    return without_hidden


def fresh_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled anew: torch keeps what it compiled with a code object, eight forms of it at most.

    Beyond, it would run the function as it is, without a word.
    """

    def reference(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    anew = FunctionType(
        reference.__code__.replace(),
        reference.__globals__,
        reference.__name__,
        reference.__defaults__,
        reference.__closure__,
    )
    compiled: Callable[..., Any] = torch.compile(anew, dynamic=False)
    return compiled


def differentiated(call: Callable[[], Any], sought: Sequence[Tensor], came: Sequence[Tensor]) -> Any:
    """A call forward and backward: the gradients, None for one that there is none of."""
    results = [each for each in results_of(call()) if each.requires_grad]
    return torch.autograd.grad(results, sought, came, allow_unused=True)


def results_of(returned: Any) -> list[Tensor]:
    """The tensors of what a call returned."""
    if isinstance(returned, Tensor):
        return [returned]
    every: list[Tensor] = []
    for each in returned if isinstance(returned, list | tuple) else ():
        every += results_of(each)
    return every


def first_call(call: Callable[[], Any]) -> tuple[Any, float]:
    """What the first call returns, and how long it took, compiling and all."""
    start = time.perf_counter()
    with quiet():
        returned = call()
    return returned, time.perf_counter() - start
