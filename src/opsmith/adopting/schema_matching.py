"""Schema of an operator of torch.library, matched with the signature of its reference."""

from __future__ import annotations

import inspect
import re
import string
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.adopting.signature import resolved
from opsmith.core.annotations import shown_annotation
from opsmith.core.argument_types import (
    COMPLEX,
    FLOAT,
    INT,
    NUMBER,
    NUMBERED,
    STR,
    TENSOR,
    VALUE_TYPES,
    ArgumentType,
    ValueType,
)
from opsmith.core.call_arguments import REORDERED, reordered
from opsmith.core.location import where
from opsmith.core.results import Result, result_names
from opsmith.core.schema import REQUIRED, Argument, Schema, schema_of
from opsmith.torch_library import capabilities

_TYPES = {**{base.schema: base for base in VALUE_TYPES.values()}, "int": INT, "number": NUMBER}
"""Types of values, by torch's name for the type in a schema."""
_ALSO = {NUMBER: (FLOAT, COMPLEX), FLOAT: (NUMBER,)}
"""Further types that a reference may have for a type of the operator."""
_RESULT_WORDS = ("result", "out", "output", "answer", "value")
"""Names for results without a name; the first one that no argument has is used."""


def matched(signature: capabilities.OperatorSchema, reference: Callable[..., Any]) -> Schema:
    """Return the schema of an operator, with its own names and defaults, and the reference's containers.

    Args:
        signature: The schema as torch has it.
        reference: The reference. Its arguments are matched by position, keyword-only arguments by name.
            An argument without a type hint gets the operator's type.

    Raises:
        SignatureMismatchError: If the reference does not have the operator's signature.
        UnsupportedTypeError: If the schema has types that opsmith does not support.
    """
    _refuse_results(signature)
    several = len(signature.results) > 1
    returned: Any = types.GenericAlias(tuple, (Tensor,) * len(signature.results)) if several else Tensor
    if not (signature.results or signature.returns):
        returned = None
    known, by_parameter = _known(signature, reference), _by_parameter(signature, reference)
    mutates = [name for name, each in by_parameter.items() if each.written]
    of_reference = schema_of(reference, signature.name, known=known, returned=returned, mutates=mutates)
    mismatch = _Mismatch(signature, reference)
    positional = [each for each in signature.arguments if not each.keyword_only]
    taken = [each for each in of_reference.arguments if not each.keyword_only][: len(positional)]
    by_name = {each.name: each for each in of_reference.arguments if each not in taken}
    named = [each for each in signature.arguments if each.keyword_only]
    if len(taken) < len(positional) or {each.name for each in named} != by_name.keys():
        raise mismatch.error(
            "the reference does not take the operator's arguments",
            "take the same number of arguments by position, and keyword-only arguments by the same names",
        )
    if reordered([each.name for each in taken], [each.name for each in positional]):
        raise mismatch.error(
            f"the reference {REORDERED}",
            "take the arguments in the operator's order, or give the parameters different names",
        )
    pairs = [*zip(positional, taken, strict=True), *((each, by_name[each.name]) for each in named)]
    arguments = tuple(_argument(declared, other, mismatch) for declared, other in pairs)
    count = 1 if signature.returns is not None else len(signature.results)
    if len(of_reference.results) != count or (count == 1) != of_reference.single:
        raise mismatch.error(
            "the reference and the operator return different numbers of results",
            f"write into `{signature.returns}`, and return it"
            if signature.returns is not None
            else "return a tensor for one result, and a tuple of tensors for several",
        )
    names = _result_names(signature.results, [each.name for each in arguments])
    single = len(names) == 1
    return Schema(_with_letters(arguments, signature), tuple(map(Result, names)), single, signature.returns)


def _with_letters(
    arguments: Sequence[Argument], signature: capabilities.OperatorSchema
) -> tuple[Argument, ...]:
    """Return the arguments, each written one with its own letter."""
    letters = iter(string.ascii_lowercase)
    written = {each.name for each in signature.arguments if each.written}
    return tuple(replace(each, alias=next(letters)) if each.name in written else each for each in arguments)


def _known(signature: capabilities.OperatorSchema, reference: Callable[..., Any]) -> dict[str, ArgumentType]:
    """The operator's type for each parameter of the reference without a type hint, by name."""
    found = _by_parameter(signature, reference)
    if not found:
        return {}
    bare = [name for name, each in resolved(reference).parameters.items() if each.annotation is each.empty]
    # An extra parameter is refused below, with both signatures.
    return {name: _kind(found[name], signature) if name in found else ArgumentType(TENSOR) for name in bare}


def _by_parameter(
    signature: capabilities.OperatorSchema, reference: Callable[..., Any]
) -> dict[str, capabilities.ArgumentSchema]:
    """The operator's argument for each parameter of the reference, by name."""
    if not inspect.isroutine(reference):
        return {}  # `schema_of` refuses it
    unnamed = [each for each in signature.arguments if not each.keyword_only]
    named = {each.name: each for each in signature.arguments if each.keyword_only}
    parameters = resolved(reference).parameters
    return dict(zip(parameters, unnamed, strict=False)) | {n: named[n] for n in parameters if n in named}


def described(signature: capabilities.OperatorSchema) -> Schema:
    """Return the schema of an operator without a reference.

    Args:
        signature: The schema as torch has it.

    Raises:
        UnsupportedTypeError: If the schema has types that opsmith does not support.
    """
    arguments = []
    for declared in signature.arguments:
        kind = _kind(declared, signature)
        default = REQUIRED if declared.default is capabilities.MISSING else _default(kind, declared.default)
        arguments.append(Argument(declared.name, kind, default, declared.keyword_only))
    _refuse_results(signature)
    names = _result_names(signature.results, [each.name for each in arguments])
    every = _with_letters(arguments, signature)
    return Schema(every, tuple(map(Result, names)), len(names) == 1, signature.returns)


def _refuse_results(signature: capabilities.OperatorSchema) -> None:
    writes = any(each.written for each in signature.arguments)
    if any(kind != "Tensor" for _, kind in signature.results) or not (signature.results or writes):
        raise errors.UnsupportedTypeError(
            "an operator returns a tensor, or a fixed number of tensors",
            operator=signature.name,
            argument="return",
            got=signature.text,
            hint="let it return a tensor for each result; a list of tensors can be stacked into one tensor",
        )


@dataclass(frozen=True)
class _Mismatch:
    """Message about a reference that does not fit.

    Args:
        signature: The operator's schema.
        reference: The reference.
    """

    signature: capabilities.OperatorSchema
    reference: Callable[..., Any]

    def error(self, problem: str, hint: str, argument: str | None = None) -> errors.SignatureMismatchError:
        """Return the error, with both signatures."""
        return errors.SignatureMismatchError(
            problem,
            operator=self.signature.name,
            argument=argument,
            expected=self.signature.text,
            got=f"{self.reference.__name__}{_written(self.reference)}",
            where=where(self.reference),
            hint=hint,
        )


class _Hint(str):
    """An annotation that `inspect` writes into a signature without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _written(reference: Callable[..., Any]) -> str:
    """Return the text of a signature: the same with and without `from __future__ import annotations`."""
    signature = resolved(reference)

    def shown(annotation: Any) -> Any:
        return annotation if annotation is REQUIRED else _Hint(shown_annotation(annotation))

    parameters = [each.replace(annotation=shown(each.annotation)) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=shown(signature.return_annotation)))


def _argument(declared: capabilities.ArgumentSchema, other: Argument, mismatch: _Mismatch) -> Argument:
    """Return an argument with the operator's name and default, and the reference's container."""
    kind = _kind(declared, mismatch.signature)
    if not _fits(kind, other.kind):
        raise mismatch.error(
            f"`{other.name}` of the reference is {other.kind.annotation()}, but `{declared.name}` of the "
            f"operator is {kind.annotation()}",
            f"write `{other.name}: {kind.annotation()}`",
            declared.name,
        )
    kind = replace(kind, length=kind.length or other.kind.length, as_tuple=other.kind.as_tuple)
    if _is_literal_of(kind.base, other.kind.base):
        kind = replace(kind, base=other.kind.base)
    default = REQUIRED if declared.default is capabilities.MISSING else _default(kind, declared.default)
    if default is not REQUIRED and other.default is not REQUIRED:
        given = kind.restore(other.default) if kind.accepts(other.default) else other.default
        values = [kind.restore(default), given]
        if values[0] != values[1]:
            raise mismatch.error(
                f"the default of `{other.name}` is {values[1]!r}, but the default of the operator's "
                f"`{declared.name}` is {values[0]!r}",
                f"write `{other.name}: {kind.annotation()} = {values[0]!r}`, or leave the default out",
                declared.name,
            )
    return Argument(declared.name, kind, default, declared.keyword_only)


def _kind(declared: capabilities.ArgumentSchema, signature: capabilities.OperatorSchema) -> ArgumentType:
    found = re.fullmatch(r"(Optional\[)?(List\[)?(Optional\[)?(\w+)\]*", declared.type)
    if found is None or found[4] not in _TYPES:
        raise errors.UnsupportedTypeError(
            f"`{declared.name}` has a type that opsmith does not support",
            operator=signature.name,
            argument=declared.name,
            got=f"{declared.type}, in {signature.text}",
            hint="use tensors, numbers, strings, dtypes, devices, layouts, generators or lists of them",
        )
    base, sequence = _TYPES[found[4]], found[2] is not None
    return ArgumentType(
        base,
        optional=found[1] is not None,
        sequence=sequence,
        length=declared.length if sequence else None,
        item_optional=found[3] is not None,
        spread=bool(sequence and declared.length and base in (INT, FLOAT)),
    )


def _fits(kind: ArgumentType, other: ArgumentType) -> bool:
    """Return True if a reference's type accepts the values of an operator's type."""
    return (
        other.structure is None
        and (
            other.base is kind.base
            or other.base in _ALSO.get(kind.base, ())
            or _is_literal_of(kind.base, other.base)
        )
        and other.sequence == kind.sequence
        and (other.optional or not kind.optional)
        and (other.item_optional or not kind.item_optional)
        and (None in (kind.length, other.length) or kind.length == other.length)
    )


def _is_literal_of(base: ValueType, other: ValueType) -> bool:
    """Return True if a reference takes some of the strings or ints that an operator takes."""
    plain = {STR: "str", INT: "int"}.get(base)
    return other.held and other.lower is None and other.schema == plain


def _default(kind: ArgumentType, value: Any) -> Any:
    """Return a default as a call passes it: torch's schema has dtypes, layouts and formats as numbers."""
    numbered = NUMBERED.get(kind.base.schema)
    if numbered is None or value is None:
        return value
    return [numbered[each] for each in value] if kind.sequence else numbered[value]


def _result_names(results: Sequence[tuple[str, str]], arguments: Sequence[str]) -> list[str]:
    """Return names for the results: torch's if it has them, none used twice."""
    given = [name for name, _ in results]
    count = len(given)
    choices = [given] if all(given) else []
    choices += [result_names(count, word) for word in _RESULT_WORDS]
    for names in choices:
        described = [Result(name) for name in names]
        used = [*names, *(each.gradient_name() for each in described), *arguments]
        if len({*used}) == len(used):
            return names
    return [f"{choices[-1][i]}_of_call" for i in range(count)]
