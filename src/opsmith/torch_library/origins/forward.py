"""The forward of a Function class as a function: pure, or writing into arguments marked as dirty."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.functional_form import copied_back, returned_results, write_results
from opsmith.core.origins.function_class import (
    AdoptedFunction,
    ObservedReturn,
    StructureMismatchError,
    WrittenOutput,
    leaves,
    note,
)
from opsmith.core.schema import Schema
from opsmith.torch_library import capabilities
from opsmith.torch_library.autocast import autocast_of_call, autocasting
from opsmith.torch_library.autograd.gradient_values import has_gradient
from opsmith.torch_library.contract import aliases
from opsmith.torch_library.origins.context import Context
from opsmith.torch_library.origins.fallback import proxy_reason, run_or_fall_back
from opsmith.torch_library.origins.misfits import (
    late_structure,
    late_write,
    other_count,
    other_marks,
    other_result,
    other_write,
    unmarked_write,
)
from opsmith.torch_library.origins.trial import refuse_other_metadata, results_by_trial
from opsmith.torch_library.symbolic_sizes import for_symbolic_sizes


@dataclass(frozen=True)
class ForwardRun:
    """The outcome of one forward.

    Args:
        results: The results, flat; None for a missing result.
        context: Values kept for the backward.
        constant: Positions of the results that it marked as non-differentiable.
        given: The arguments of forward.
    """

    results: tuple[Any, ...]
    context: Context
    constant: frozenset[int]
    given: tuple[Any, ...]

    def keeps(self, kept: Sequence[Tensor], known: Sequence[Any]) -> bool:
        """Return True if it kept unknown tensors that may have a gradient, or an object that may hide some.

        Args:
            kept: The tensors of its context.
            known: Tensors that do not count.
        """
        ids = {id(value) for value in (*self.given, *known)}
        there = any(has_gradient(tensor.dtype) and id(tensor) not in ids for tensor in kept)
        return there or self.context.hides(self.given)


def run_forward(
    adopted: AdoptedFunction,
    values: Sequence[Any],
    needs: frozenset[str] = frozenset(),
    *,
    in_place: bool = False,
) -> ForwardRun:
    """Run the forward of an adopted class.

    Arguments that it writes into are copied before the run. Results that alias its inputs are copied after
    the run. The first run detects both: it copies every input if the code may write, and otherwise restores
    the inputs that were written into.

    Args:
        adopted: The class.
        values: Values of the operator's arguments.
        needs: Names of the arguments whose gradient is needed.
        in_place: True to pass the written arguments themselves, not copies.

    Raises:
        MutationError: If it writes into an input into which earlier runs did not write, or marks an input as
            dirty that it does not return.
        ResultCountError, ResultTypeError: If its results differ from those that it was adopted with.
    """
    facts, given = adopted.facts, adopted.spread(values)
    flags = adopted.flags(given)
    known = facts.written_under.get(flags)
    own = frozenset(adopted.written_positions(given) if in_place else ())
    copied = _copied(adopted, len(given), known) - own
    backups = _copies(given, own if adopted.may_write else range(len(given))) if known is None else {}
    before = {position: version_of(given[position]) for position in own}
    try:
        run, written, counted = _run(adopted, given, flags, _copies(given, copied), needs, own)
    except (errors.ResultTypeError, errors.ResultCountError) as error:
        now = {position: version_of(given[position]) for position in own}
        # A tensor that was made in inference mode has no version: it counts as written if runs may write.
        unseen = {at for at in own if known is None or adopted.argument_position(at) in known}
        changed = [at for at in own if now[at] != before[at] or (now[at] is None and at in unseen)]
        if changed and not backups:
            raise late_structure(adopted, adopted.argument_names(given)[changed[0]]) from error
        with torch.no_grad():
            for position in changed:
                given[position].copy_(backups[position])
        raise
    late = written - copied - own
    if late:
        _record_writes(adopted, flags, late)
        if not late <= backups.keys():
            raise late_write(adopted, adopted.argument_names(given)[min(late)])
        with torch.no_grad():
            for position in written - copied:
                given[position].copy_(backups[position])
        return run_forward(adopted, values, needs, in_place=in_place)
    if known is None and counted:
        _record_writes(adopted, flags, written)
    return run


def run_traceable(
    adopted: AdoptedFunction,
    values: Sequence[Any],
    needs: frozenset[str] = frozenset(),
    *,
    in_place: bool = False,
) -> ForwardRun:
    """Run the forward of an adopted class; raise if it reads numbers that a trace does not have.

    Raises:
        RuntimeError: If it reads a number, other than a size of a result, from a tensor without data.
    """
    count = len(capabilities.fresh_symbols(tensors_in(list(values))))
    run = run_forward(adopted, values, needs, in_place=in_place)
    fresh = capabilities.fresh_symbols(tensors_in(list(values)))[count:]
    if not all(capabilities.is_a_size(symbol, tensors_in(list(run.results))) for symbol in fresh):
        raise RuntimeError("it reads a number from a tensor that has no data yet")
    return run


def _record_writes(adopted: AdoptedFunction, flags: tuple[Any, ...], positions: Iterable[int]) -> None:
    facts, found = adopted.facts, frozenset(map(adopted.argument_position, positions))
    facts.written = (facts.written or frozenset()) | found
    note(facts.written_under, flags, facts.written_under.get(flags, frozenset()) | found)


def late_writes(
    adopted: AdoptedFunction, flags: tuple[Any, ...], given: Sequence[Any], positions: Iterable[int]
) -> errors.OpsmithError:
    """The error for a run that wrote into arguments unlike earlier runs; later runs copy these arguments."""
    _record_writes(adopted, flags, positions)
    return late_write(adopted, adopted.argument_names(given)[min(positions)])


def _copied(adopted: AdoptedFunction, count: int, written: frozenset[int] | None) -> frozenset[int]:
    """Positions of the arguments of forward that are passed as copies."""
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
    adopted: AdoptedFunction,
    given: Sequence[Any],
    flags: tuple[Any, ...],
    copies: Mapping[int, Tensor],
    needs: frozenset[str],
    own: frozenset[int],
) -> tuple[ForwardRun, frozenset[int], bool]:
    """Run once; return the outcome, the written positions, and True if every write was counted.

    The tensors at the positions `own` are passed themselves, not as copies.
    """
    names = adopted.argument_names(given)
    context = Context(adopted, [_needed(*pair, needs) for pair in zip(names, given, strict=True)])
    if adopted.reads_requires_grad:
        copies = {**copies, **_requiring(given, copies, context.needs_input_grad)}
    handed = [copies.get(position, value) for position, value in enumerate(given)]
    before = [version_of(value) for value in handed]
    returned = _call(adopted, context, handed)
    return finished_run(
        adopted, context, returned, given, flags, before, handed=handed, copies=copies, own=own
    )


def finished_run(
    adopted: AdoptedFunction,
    context: Context,
    returned: Any,
    given: Sequence[Any],
    flags: tuple[Any, ...],
    before: Sequence[int | None],
    *,
    handed: Sequence[Any],
    copies: Mapping[int, Tensor],
    own: frozenset[int],
) -> tuple[ForwardRun, frozenset[int], bool]:
    """The outcome of a run, the written positions, and True if every write was counted.

    Args:
        adopted: The class.
        context: The context with the kept values.
        returned: The return value of its forward.
        given: The arguments of the call.
        flags: The arguments that may decide whether it writes.
        before: Version counters of `handed` before the run.
        handed: The arguments that forward received.
        copies: The copies among them, by position.
        own: Positions of the arguments that it should write into.
    """
    names = adopted.argument_names(given)
    after = [version_of(value) for value in handed]
    written = frozenset(
        position
        for position, value in enumerate(handed)
        if before[position] != after[position] or any(value is dirty for dirty in context.dirty_tensors)
    )
    counted = None not in itertools.compress(after, [isinstance(value, Tensor) for value in handed])
    marked = _marked(adopted, handed, context.dirty_tensors) if context.dirty_tensors else {}
    if proxy_reason(handed) is None:  # compiled code is guarded by facts about real calls
        earlier, now = adopted.facts.dirty_under.get(flags), frozenset(marked.values())
        note(adopted.facts.dirty_under, flags, now)
        if earlier is not None and earlier != now:
            raise other_marks(adopted, min(earlier ^ now))
    for position in own:
        if before[position] != after[position] and names[position] not in marked.values():
            raise unmarked_write(adopted, names[position])
    results = _flat_results(adopted, returned, marked, [names[position] for position in sorted(own)])
    constant = frozenset(
        position
        for position, result in enumerate(results)
        if any(result is one for one in context.non_differentiable)
    )
    apart = unaliased(adopted, results, handed, given, written)
    known = copies_of_results(results, apart, handed)
    known |= {
        id(copy): given[position]
        for position, copy in copies.items()
        if position not in written or position in own
    }
    itself = {id(handed[position]): given[position] for position in own}
    apart = tuple(itself.get(id(result), result) for result in apart)
    return ForwardRun(apart, context.with_identities(known), constant, tuple(given)), written, counted


def _marked(adopted: AdoptedFunction, handed: Sequence[Any], dirty: Sequence[Any]) -> dict[int, str]:
    """Names of the arguments that were marked as dirty, by the `id` of the tensor.

    Arguments that the author left out of `mutates=` do not count: forward gets copies of them.
    """
    names = adopted.argument_names(handed)
    allowed = set(names if adopted.mutates is None else adopted.mutates)
    # If one tensor is given twice, the written argument comes first.
    order = sorted(range(len(names)), key=lambda position: names[position] not in adopted.schema.new_values)
    found: dict[int, str] = {}
    for position in order:
        value = handed[position]
        if names[position] in allowed and any(value is each for each in dirty):
            found.setdefault(id(value), names[position])
    return found


def _requiring(
    given: Sequence[Any], copies: Mapping[int, Tensor], needed: Sequence[bool]
) -> dict[int, Tensor]:
    """Inputs whose gradient is needed, set to require a gradient, as in `apply`."""
    found: dict[int, Tensor] = {}
    for position in (i for i, is_needed in enumerate(needed) if is_needed):
        tensor = copies.get(position, given[position])
        if not tensor.requires_grad and capabilities.innermost_transform() is None:
            found[position] = tensor.detach().requires_grad_()
    return found


def forward_function(adopted: AdoptedFunction) -> Callable[..., Any]:
    """The forward of an adopted class as a function of the operator's arguments, like a reference."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        results = _results(adopted, adopted.schema.call_values(args, kwargs))
        return results[0] if adopted.schema.single and isinstance(results, tuple) else results

    return forward


def writing_forward(adopted: AdoptedFunction) -> Callable[..., Any]:
    """The forward of an adopted class as a function that writes, like a reference of an in-place operator."""
    schema = adopted.call_schema

    def forward(*args: Any, **kwargs: Any) -> Any:
        values = schema.call_values(args, kwargs)
        return _results(adopted, values, in_place=True)

    return forward


def _results(adopted: AdoptedFunction, values: list[Any], *, in_place: bool = False) -> Any:
    """Result of the forward of an adopted class, or of its fallback on proxies.

    If in place, the in-place operator's results; otherwise all results, or the reference's return value.
    """
    written = len(adopted.schema.new_values) if in_place else 0

    def by_class() -> Any:
        with capabilities.above_autograd(), autocasting(autocast_of_call()):
            results = run_traceable(adopted, values, in_place=in_place).results
        if adopted.facts.tried and proxy_reason(values) is None:
            refuse_other_metadata(adopted, values, results)
        return returned_results(adopted.call_schema, values, results[written:]) if in_place else results

    def by_trial() -> Any:
        results = results_by_trial(adopted, values, lambda real: run_forward(adopted, real).results)
        return write_results(adopted.call_schema, values, results) if in_place else results

    def by_reference() -> Any:
        assert adopted.reference is not None
        args, kwargs = adopted.schema.split(values)
        function = copied_back(adopted.reference, adopted.call_schema) if in_place else adopted.reference
        return function(*args, **kwargs)

    instead: Callable[[], Any] | None = None
    if adopted.has_stand_in("forward"):
        instead = by_reference
    elif capabilities.without_data(tensors_in(values)):
        instead = by_trial
    return run_or_fall_back(adopted, "forward", values, by_class, instead)


@dataclass(frozen=True)
class Returned:
    """The value that a forward returned.

    Args:
        value: The value.
        marked: Position in forward of each argument that it marked as dirty, by the `id` of its tensor.
    """

    value: Any
    marked: Mapping[int, int]


def returned_by(function_class: type[torch.autograd.Function], given: Sequence[Any]) -> Returned:
    """Call a class's forward with copies of these arguments, and return its results."""
    adopted = AdoptedFunction("", Schema((), (), single=True), function_class, 0)
    if adopted.has_setup_context:  # then `apply` fills in defaults, which `setup_context` unpacks
        bound = inspect.signature(function_class.forward).bind(*given)
        bound.apply_defaults()
        given = bound.args
    copies = [value.clone() if isinstance(value, Tensor) else value for value in given]
    context = Context(adopted, [False] * len(copies))
    with torch.no_grad():
        value = _call(adopted, context, copies)
    dirty = context.dirty_tensors
    found = {id(each): at for at, each in enumerate(copies) if any(each is other for other in dirty)}
    return Returned(value, found)


def _needed(name: str, value: Any, needs: frozenset[str]) -> bool:
    return name in needs and isinstance(value, Tensor) and has_gradient(value.dtype)


def _call(adopted: AdoptedFunction, context: Context, given: Sequence[Any]) -> Any:
    function_class: Any = adopted.function_class
    forward = for_symbolic_sizes(function_class.forward, given)
    if not adopted.has_setup_context:
        return forward(context, *given)
    returned = forward(*given)
    setup = for_symbolic_sizes(function_class.setup_context, given)
    setup(context, tuple(given), returned)
    return returned


def version_of(value: Any) -> int | None:
    """Version counter of a tensor; None for other values and for tensors without one."""
    return capabilities.version(value) if isinstance(value, Tensor) else None


def _flat_results(
    adopted: AdoptedFunction, returned: Any, marked: Mapping[int, str], own: Sequence[str]
) -> tuple[Any, ...]:
    """The flat results of a forward.

    Args:
        adopted: The class.
        returned: Its return value.
        marked: Names of the arguments that it marked as dirty, by the `id` of the tensor.
        own: Names of the arguments that it must write into.
    """
    if marked:
        _refuse_marked(adopted, returned, marked)
    unreturned, found = dict(marked), dict[int, Any]()
    misfit: errors.ResultTypeError | errors.ResultCountError | None = None
    unmarked = False
    try:
        for position, value in leaves(adopted.outputs, returned):
            if not isinstance(value, _types(adopted, position)):
                misfit = other_result(adopted, position, value)
            elif position is not None:
                name, written = unreturned.pop(id(value), None), adopted.schema.results[position].written
                if name != written and (name is not None or written in own):
                    misfit, unmarked = other_write(adopted, name, written, marked.values()), not marked
                found[position] = value
            if misfit is not None:
                break
    except StructureMismatchError as mismatch:
        misfit = other_count(adopted, mismatch)
    if misfit is not None:
        misfit.observed = ObservedReturn(_structure(returned, marked), unmarked)
        raise misfit
    return tuple(found[position] for position in range(len(adopted.schema.results)))


def _refuse_marked(adopted: AdoptedFunction, returned: Any, marked: Mapping[int, str]) -> None:
    """Refuse a mark that an operator cannot support, and a mark that `apply` refuses, too.

    Raises:
        MutationError: If it marks one of `*args`, or an argument that it does not return.
    """
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    plain = {slot.name for slot in adopted.parameters.slots if slot.form in ("plain", "either")}
    for identity, name in marked.items():
        if name not in plain:
            raise adopted.error(
                errors.MutationError,
                f"`{adopted.name}.forward` marks one tensor of `*{name}` as dirty, but an operator "
                "writes into a list as a whole",
                argument=name,
                hint='name the arguments one by one: `signature="(x: Tensor, y: Tensor) -> Tensor"`; or let '
                "the operator work on copies: `mutates=()`",
            )
        if not any(id(output) == identity for output in outputs):
            raise adopted.error(
                errors.MutationError,
                f"`{adopted.name}.forward` marks `{name}` as dirty but does not return it; torch's "
                "`apply` also refuses this",
                argument=name,
                hint=f"return `{name}` itself, not a view or a copy; or work on a copy: `mutates=()`",
            )


def _structure(returned: Any, marked: Mapping[int, str]) -> Any:
    """The structure of a value: tuples of "tensor", written arguments, None, and "other" for the rest."""
    left = dict(marked)

    def structure(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(map(structure, value))
        if id(value) in left:
            return WrittenOutput(left.pop(id(value)))
        return "tensor" if isinstance(value, Tensor) else None if value is None else "other"

    return structure(returned)


def _types(adopted: AdoptedFunction, position: int | None) -> tuple[type, ...]:
    if position is None:
        return (types.NoneType,)
    return (Tensor, types.NoneType) if adopted.schema.results[position].optional else (Tensor,)


def unaliased(
    adopted: AdoptedFunction,
    results: Sequence[Any],
    handed: Sequence[Any],
    given: Sequence[Any],
    written: frozenset[int],
) -> tuple[Any, ...]:
    """The results, cloned if they alias an input or another result."""
    names = adopted.argument_names(given)
    own = list(results)
    for position, argnum, other in aliases(results, handed):
        if argnum is not None and argnum not in written:
            kind = "is" if results[position] is handed[argnum] else "shares memory with"
            adopted.facts.copied[position] = f"it {kind} `{names[argnum]}`"
        elif other is not None:
            adopted.facts.copied[position] = f"it shares memory with `{adopted.schema.results[other].name}`"
        else:
            continue
        # A result that aliases a copied argument is cloned too, so that all runs return the same layout.
        own[position] = results[position].clone()
    return tuple(own)


def copies_of_results(results: Sequence[Any], apart: Sequence[Any], handed: Sequence[Any]) -> dict[int, Any]:
    """Return the copy of each cloned result, by the `id` of the original that a class may have kept.

    A returned argument is left out: as in `apply`, a class keeps the argument itself.

    Args:
        results: The return values of the forward.
        apart: The same values, each in its own memory.
        handed: The arguments that the forward received.
    """
    pairs = zip(results, apart, strict=True)
    return {
        id(result): clone
        for result, clone in pairs
        if result is not clone and not any(result is value for value in handed)
    }
