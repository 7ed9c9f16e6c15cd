"""Plan of the calls of a handle, by which C++ makes them where it is built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from opsmith.core.argument_types import BOOL, FLOAT, INT, NUMBER, STR
from opsmith.core.operator import MISSING
from opsmith.core.schema import REQUIRED, Argument
from opsmith.torch_library.fast_path.eligibility import is_int_sequence, size_condition

if TYPE_CHECKING:
    from opsmith.torch_library.fast_path.purity import ContractSource
    from opsmith.torch_library.fast_path.signatures import CallSignatures

_TYPES = {INT: int, BOOL: bool, STR: str}


class CallPlan(NamedTuple):
    """Parts of a call of a handle, as C++ puts them together.

    Attributes:
        forms: Form of each argument, a letter: t tensor, l list of tensors, u tuple of tensors, f floating, n
            number, s sequence of integers, e of one type; in upper case it may be None.
        positional: Number of arguments that may be given by position.
        results: Number of results of a kernel; 0 where the operator returns something else than a kernel.
        by_name: True if arguments may be given by name.
        alike: True if `torch.use_deterministic_algorithms` changes nothing.
        node_returns: True if the operator returns what the `apply` of a node returns.
        may_write: True if a kernel is not known to write into no argument.
        may_alias: True if a kernel is not known to return new tensors alone.
        fallback: Takes the handle and any arguments: the generated `__call__`.
        finish: Takes the handle, the parts of an `Implementation` but the guard, and all arguments.
        validate: Takes a kernel, its result, the arguments and the versions of the tensors before, or None;
            raises, or returns what the operator does.
        fits: Takes all arguments, and returns True if the tensors have the declared shapes; None if there is
            nothing to check.
        names: Names of the arguments.
        defaults: Their defaults; `MISSING` for those without.
        types: Type of each argument of form e; None for others.
        known: For each set of optional tensors that are given, the list of implementations, or those by the
            lengths of lists.
        missing: `MISSING`.
        shown: Positions of the results that the operator returns.
        on_dtensors: Takes a tuple of all arguments, some of them DTensors, and returns the result, or all
            of several; None for the slow path. None where there is no such function.
    """

    forms: str
    positional: int
    results: int
    by_name: bool
    alike: bool
    node_returns: bool
    may_write: bool
    may_alias: bool
    fallback: Callable[..., Any]
    finish: Callable[..., Any]
    validate: Callable[..., Any] | None
    fits: Callable[..., Any] | None
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    types: tuple[type | None, ...]
    known: tuple[Any, ...]
    missing: Any
    shown: tuple[int, ...]
    on_dtensors: Callable[[tuple[Any, ...]], Any] | None

    @property
    def switches(self) -> tuple[Any, ...]:
        """The parts that are no objects to C++."""
        return self[:8]

    @property
    def objects(self) -> tuple[Any, ...]:
        """The other parts."""
        return self[8:]


def call_plan(
    signatures: CallSignatures,
    generated: Mapping[str, Any],
    contract: ContractSource | None,
    *,
    by_name: bool,
) -> CallPlan | None:
    """The plan of an operator's calls; None where an argument has a form that C++ does not know.

    Args:
        signatures: The known signatures.
        generated: Globals of the generated `__call__`, with it.
        contract: The contract of the kernels; None where the generated code alone knows what a call returns.
        by_name: As in `CallPlan`.
    """
    specification = signatures.specification
    schema = specification.schema
    forms = [_form(argument) for argument in schema.arguments]
    if None in forms or signatures.optional_keys:
        return None
    # Generated code makes the copy of a list of integers that a kernel gets.
    shown = () if contract is None or "s" in "".join(map(str, forms)).lower() else contract.shown()
    condition = size_condition(specification)
    names = tuple(map(sys.intern, schema.names))
    fits = eval(f"lambda {', '.join(names)}: {condition}", dict(generated)) if condition else None
    return CallPlan(
        forms="".join(map(str, forms)),
        positional=schema.positional,
        results=len(schema.results) if shown else 0,
        by_name=by_name,
        alike=specification.rounds_alike,
        node_returns=bool(shown),
        may_write=contract is None or contract.may_write,
        may_alias=contract is None or contract.may_alias,
        fallback=generated["__call__"],
        finish=generated["_op_finish"],
        validate=generated.get("_op_validate"),
        fits=fits,
        names=names,
        defaults=tuple(MISSING if each.default is REQUIRED else each.default for each in schema.arguments),
        types=tuple(_exact(each) for each in schema.arguments),
        known=tuple(each if signatures.by_key else each[()] for each in signatures.known),
        missing=MISSING,
        shown=shown,
        on_dtensors=signatures.on_dtensors,
    )


def _form(argument: Argument) -> str | None:
    """The form of an argument; None for one that the generated code must look at."""
    kind = argument.kind
    form: str | None
    if kind.is_tensor:
        form = ("u" if kind.as_tuple else "l") if kind.sequence else "t"
    elif is_int_sequence(kind):
        form = None if kind.spread or kind.length is not None else "s"
    elif kind.sequence or kind.structure is not None:
        form = None
    elif kind.base is FLOAT:
        form = "f"
    elif kind.base is NUMBER:
        form = "n"
    else:
        form = None if _exact(argument) is None else "e"
    return form.upper() if form is not None and kind.optional else form


def _exact(argument: Argument) -> type | None:
    kind = argument.kind
    exact: type | None = None if kind.sequence else _TYPES.get(kind.base, kind.base.exact)
    return exact
