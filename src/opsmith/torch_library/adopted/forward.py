"""The forward of a Function class as a pure function: it writes to no input, and returns new tensors."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import AdoptedFunction, StructureMismatchError, leaves
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.schema import Schema
from opsmith.torch_library import capabilities
from opsmith.torch_library.adopted.context import Context
from opsmith.torch_library.adopted.fallback import proxy_reason, run_or_fall_back
from opsmith.torch_library.adopted.trial import refuse_other_metadata, results_by_trial
from opsmith.torch_library.autograd.gradient_values import has_gradient


@dataclass(frozen=True)
class ForwardRun:
    """The outcome of one forward.

    Args:
        results: The results, flat; None where there is none.
        context: Values kept for the backward.
        constant: Positions of the results that it marked as non-differentiable.
        given: The arguments, as it takes them.
    """

    results: tuple[Any, ...]
    context: Context
    constant: frozenset[int]
    given: tuple[Any, ...]


def run_forward(
    adopted: AdoptedFunction, values: Sequence[Any], needs: frozenset[str] = frozenset()
) -> ForwardRun:
    """Run the forward of an adopted class.

    Arguments that it writes to are copied before the run, and results that alias its inputs after it. The
    first run detects both: it copies every input if the code may write, and otherwise restores the inputs
    that were written to.

    Args:
        adopted: The class.
        values: Values of the operator's arguments.
        needs: Names of the arguments whose gradient is needed.

    Raises:
        MutationError: If it writes into an input into which earlier runs did not write.
        ResultCountError, ResultTypeError: If it does not return what it was adopted with.
    """
    facts, given = adopted.facts, adopted.spread(values)
    flags = _flags(adopted, given)
    known = facts.written_under.get(flags)
    copied = _copied(adopted, len(given), known)
    backups = _copies(given, range(len(given))) if known is None and not copied else {}
    run, written, counted = _run(adopted, given, _copies(given, copied), needs)
    late = written - copied
    if late:
        _record_writes(adopted, flags, late)
        if not backups:
            raise _late_write(adopted, adopted.argument_names(given)[min(late)])
        with torch.no_grad():
            for position in late:
                given[position].copy_(backups[position])
        return run_forward(adopted, values, needs)
    if known is None and counted:
        _record_writes(adopted, flags, written)
    return run


def run_traceable(
    adopted: AdoptedFunction, values: Sequence[Any], needs: frozenset[str] = frozenset()
) -> ForwardRun:
    """Run the forward of an adopted class; raise where it reads numbers that a trace does not have.

    Raises:
        RuntimeError: If it reads a number, other than a size of a result, from a tensor without data.
    """
    count = len(capabilities.fresh_symbols(tensors_in(list(values))))
    run = run_forward(adopted, values, needs)
    fresh = capabilities.fresh_symbols(tensors_in(list(values)))[count:]
    if not all(capabilities.is_a_size(symbol, tensors_in(list(run.results))) for symbol in fresh):
        raise RuntimeError("it reads a number from a tensor, which has no data yet")
    return run


def _flags(adopted: AdoptedFunction, given: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments that may choose whether code writes into an input, such as `inplace`; `...` for any other."""
    if not adopted.may_write:
        return ()
    return tuple(value if value is None or isinstance(value, bool | str) else ... for value in given)


def _record_writes(adopted: AdoptedFunction, flags: tuple[Any, ...], positions: Iterable[int]) -> None:
    facts, found = adopted.facts, frozenset(map(adopted.argument_position, positions))
    facts.written = (facts.written or frozenset()) | found
    facts.written_under[flags] = facts.written_under.get(flags, frozenset()) | found


def _copied(adopted: AdoptedFunction, count: int, written: frozenset[int] | None) -> frozenset[int]:
    """Positions of the arguments of forward that are handed over as copies."""
    if written is None:
        return frozenset(range(count)) if adopted.may_write else frozenset()
    return frozenset(position for position in range(count) if adopted.argument_position(position) in written)


def _copies(given: Sequence[Any], positions: Iterable[int]) -> dict[int, Tensor]:
    """Copies of the tensors at some positions; a tensor that is given twice is copied once."""
    known: dict[int, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for position in positions:
        value = given[position]
        if isinstance(value, Tensor):
            copies[position] = known.setdefault(id(value), value.clone())
    return copies


def _run(
    adopted: AdoptedFunction, given: Sequence[Any], copies: Mapping[int, Tensor], needs: frozenset[str]
) -> tuple[ForwardRun, frozenset[int], bool]:
    """Run once; return the outcome, the positions written to, and whether every write was counted."""
    names = adopted.argument_names(given)
    context = Context(adopted, [_needed(*pair, needs) for pair in zip(names, given, strict=True)])
    if adopted.reads_requires_grad:
        copies = {**copies, **_requiring(given, copies, context.needs_input_grad)}
    handed = [copies.get(position, value) for position, value in enumerate(given)]
    before = [version_of(value) for value in handed]
    returned, record = _call(adopted, context, handed), context.opsmith_record
    after = [version_of(value) for value in handed]
    written = frozenset(
        position
        for position, value in enumerate(handed)
        if before[position] != after[position] or any(value is dirty for dirty in record.dirty)
    )
    counted = None not in itertools.compress(after, [isinstance(value, Tensor) for value in handed])
    results = _flat_results(adopted, returned)
    constant = frozenset(
        position for position, result in enumerate(results) if any(result is one for one in record.constant)
    )
    own = _unaliased(adopted, results, handed, given, written)
    known = {id(result): clone for result, clone in zip(results, own, strict=True) if result is not clone}
    known |= {id(copy): given[position] for position, copy in copies.items() if position not in written}
    return ForwardRun(own, context.with_identities(known), constant, tuple(given)), written, counted


def _requiring(
    given: Sequence[Any], copies: Mapping[int, Tensor], needed: Sequence[bool]
) -> dict[int, Tensor]:
    """Inputs whose gradient is needed, made to require one, as they do under `apply`."""
    found: dict[int, Tensor] = {}
    for position in (i for i, is_needed in enumerate(needed) if is_needed):
        tensor = copies.get(position, given[position])
        if not tensor.requires_grad and capabilities.innermost_transform() is None:
            found[position] = tensor.detach().requires_grad_()
    return found


def forward_function(adopted: AdoptedFunction) -> Callable[..., Any]:
    """The forward of an adopted class as a function of the operator's arguments, like a reference."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        values = adopted.schema.call_values(args, kwargs)

        def returned(results: tuple[Any, ...]) -> Any:
            return results[0] if adopted.schema.single else results

        def by_class() -> Any:
            with capabilities.above_autograd():
                results = run_traceable(adopted, values).results
            if adopted.facts.tried and proxy_reason(values) is None:
                refuse_other_metadata(adopted, values, results)
            return returned(results)

        def by_trial() -> Any:
            run = partial(run_forward, adopted)
            return returned(results_by_trial(adopted, values, lambda real: run(real).results))

        instead: Callable[[], Any] | None = None
        if adopted.has_stand_in("forward"):
            instead = partial(_by_reference, adopted, values)
        elif capabilities.without_data(tensors_in(values)):
            instead = by_trial
        return run_or_fall_back(adopted, "forward", values, by_class, instead)

    return forward


def returned_by(function_class: type[torch.autograd.Function], given: Sequence[Any]) -> Any:
    """Call a class's forward with copies of these arguments, and return its results."""
    adopted = AdoptedFunction("", Schema((), (), single=True), function_class, 0)
    if adopted.has_setup_context:  # `apply` then binds defaults, which `setup_context` unpacks
        bound = inspect.signature(function_class.forward).bind(*given)
        bound.apply_defaults()
        given = bound.args
    copies = [value.clone() if isinstance(value, Tensor) else value for value in given]
    with torch.no_grad():
        return _call(adopted, Context(adopted, [False] * len(copies)), copies)


def _by_reference(adopted: AdoptedFunction, values: list[Any]) -> Any:
    assert adopted.reference is not None
    args, kwargs = adopted.schema.split(values)
    return adopted.reference(*args, **kwargs)


def _needed(name: str, value: Any, needs: frozenset[str]) -> bool:
    return name in needs and isinstance(value, Tensor) and has_gradient(value.dtype)


def _call(adopted: AdoptedFunction, context: Context, given: Sequence[Any]) -> Any:
    function_class: Any = adopted.function_class
    if not adopted.has_setup_context:
        return function_class.forward(context, *given)
    returned = function_class.forward(*given)
    function_class.setup_context(context, tuple(given), returned)
    return returned


def version_of(value: Any) -> int | None:
    """Version counter of a tensor; None for other values and for tensors without one."""
    return capabilities.version(value) if isinstance(value, Tensor) else None


def _late_write(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` wrote into an input into which earlier runs did not write",
        argument=name,
        hint="let it write in every call or in none: `x = x.clone()` before the first in-place operation",
    )


def _flat_results(adopted: AdoptedFunction, returned: Any) -> tuple[Any, ...]:
    """The flat results of a forward."""
    found: dict[int, Any] = {}
    try:
        for position, value in leaves(adopted.outputs, returned):
            if position is None and value is not None:
                adopted.facts.returned = _structure(returned)
                raise _other_result(adopted, None, value)
            if position is not None:
                if not isinstance(value, _types(adopted, position)):
                    adopted.facts.returned = _structure(returned)
                    raise _other_result(adopted, position, value)
                found[position] = value
    except StructureMismatchError as misfit:
        adopted.facts.returned = _structure(returned)
        value, outputs = misfit.value, misfit.outputs
        raise adopted.error(
            errors.ResultCountError,
            f"`{adopted.name}.forward` returned another number of results than it was adopted with",
            expected=f"a tuple of {len(outputs) if isinstance(outputs, tuple) else 1}",
            got=f"{len(value)}" if isinstance(value, tuple | list) else shown(value),
            hint='say what it returns: `adopt(..., signature="(x: Tensor) -> tuple[Tensor, Tensor]")`',
        ) from None
    return tuple(found[position] for position in range(len(adopted.schema.results)))


def _structure(returned: Any) -> Any:
    """The structure of a value, in tuples of "tensor", None and, for anything else, "other"."""
    if isinstance(returned, tuple | list):
        return tuple(map(_structure, returned))
    return "tensor" if isinstance(returned, Tensor) else None if returned is None else "other"


def _other_result(adopted: AdoptedFunction, position: int | None, value: Any) -> errors.ResultTypeError:
    return adopted.error(
        errors.ResultTypeError,
        f"`{adopted.name}.forward` returned something else than it was adopted with",
        argument=None if position is None else adopted.schema.results[position].name,
        expected="None" if position is None else "Tensor",
        got=shown(value),
        hint='say what it returns: `samples=`, or `signature="(x: Tensor) -> tuple[Tensor, Tensor | None]"`; '
        "results are tensors: of a number, return `torch.as_tensor(...)`",
    )


def _types(adopted: AdoptedFunction, position: int) -> tuple[type, ...]:
    return (Tensor, types.NoneType) if adopted.schema.results[position].optional else (Tensor,)


def _unaliased(
    adopted: AdoptedFunction,
    results: Sequence[Any],
    handed: Sequence[Any],
    given: Sequence[Any],
    written: frozenset[int],
) -> tuple[Any, ...]:
    """The results, cloned where they alias an input or another result."""
    names = adopted.argument_names(given)
    own: list[Any] = []
    for position, result in enumerate(results):
        argnum = next((i for i, value in enumerate(handed) if _is_alias(result, value)), None)
        other = next((i for i in range(position) if _is_alias(result, results[i])), None)
        if argnum is not None and argnum not in written:
            kind = "is" if result is handed[argnum] else "shares memory with"
            adopted.facts.copied[position] = f"it {kind} `{names[argnum]}`"
        elif other is not None:
            adopted.facts.copied[position] = f"it shares memory with `{adopted.schema.results[other].name}`"
        # A result that aliases a copied argument is cloned too, so that all runs return the same layout.
        aliases_input = argnum is not None and argnum not in written
        own.append(result.clone() if aliases_input or other is not None else result)
    return tuple(own)


def _is_alias(result: Any, value: Any) -> bool:
    """Return True if a result is a tensor, or shares its memory."""
    if not (isinstance(result, Tensor) and isinstance(value, Tensor)):
        return False
    return result is value or capabilities.shares_memory(result, value)
