"""Schema of an operator: its arguments, its results, and torch's text for both."""

from __future__ import annotations

import difflib
import inspect
import string
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.annotations import hint_for, hints_of, kind_of, shown_annotation
from opsmith.core.argument_types import FLOAT, ArgumentType
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import listed
from opsmith.core.location import where
from opsmith.core.lowering import Lowering
from opsmith.core.results import REQUIRED as REQUIRED
from opsmith.core.results import RESERVED, Result, ResultNames, result_forms, result_roles


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter of the reference.

    Args:
        name: Its name.
        kind: Its type.
        default: Its default value; `REQUIRED` if it has none.
        keyword_only: True if it can be given only by name.
        alias: Letter of its memory in torch's schema language, if the operator writes into it.
    """

    name: str
    kind: ArgumentType
    default: Any = REQUIRED
    keyword_only: bool = False
    alias: str = ""

    def schema(self) -> str:
        """Return the argument in torch's schema language."""
        kind = self.kind.schema()
        if self.alias:
            kind = kind.replace("Tensor", f"Tensor({self.alias}!)")
        text = f"{kind} {self.name}"
        return text if self.default is REQUIRED else f"{text}={self.kind.default_text(self.default)}"

    def leaves(self) -> list[Argument]:
        """Return the arguments of torch's schema that carry this one."""
        parts = self.kind.leaves(self.name)
        if self.kind.structure is None:
            return [self]
        defaults = [REQUIRED] * len(parts) if self.default is REQUIRED else self.kind.flat(self.default)
        return [
            Argument(name, kind, default, self.keyword_only)
            for (name, kind), default in zip(parts, defaults, strict=True)
        ]


@dataclass(frozen=True)
class Schema:
    """Arguments and results of an operator.

    Args:
        arguments: Its arguments.
        results: Its results, which are new tensors.
        single: True if the reference returns a bare tensor.
        returns: Name of the argument that it writes into and returns, as torch's in-place operations do.
    """

    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    single: bool
    returns: str | None = None

    @cached_property
    def leaves(self) -> tuple[Argument, ...]:
        """The arguments of torch's schema: a structure has one for each of its parts."""
        return tuple(leaf for argument in self.arguments for leaf in argument.leaves())

    @cached_property
    def lowering(self) -> Lowering | None:
        """Conversion of arguments for torch's dispatcher; None if no argument is converted."""
        if not any(argument.kind.base.lower or argument.kind.encoded for argument in self.arguments):
            return None
        return Lowering(self.arguments, self.leaves, REQUIRED)

    @cached_property
    def encoded(self) -> bool:
        """True if values must be converted for torch's dispatcher."""
        return any(argument.kind.encoded for argument in self.arguments)

    @cached_property
    def spreads(self) -> bool:
        """True if one number may stand for a list of them."""
        return any(argument.kind.spread for argument in self.arguments)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments' names, in order."""
        return tuple(argument.name for argument in self.arguments)

    @cached_property
    def by_name(self) -> dict[str, Argument]:
        """The arguments, by name."""
        return {argument.name: argument for argument in self.arguments}

    @cached_property
    def positional(self) -> int:
        """Number of arguments that may be given by position."""
        return sum(not argument.keyword_only for argument in self.arguments)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the arguments that hold tensors."""
        return tuple(argument.name for argument in self.arguments if argument.kind.is_tensor)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments that the operator writes into."""
        return tuple(argument.name for argument in self.arguments if argument.alias)

    @cached_property
    def void(self) -> Schema:
        """The schema of the operator with the kernels: it writes, and returns no argument."""
        return self if self.returns is None else replace(self, returns=None)

    @cached_property
    def new_values(self) -> tuple[str, ...]:
        """Names of the arguments whose new values a functional form returns."""
        return tuple(result.written for result in self.results if result.written is not None)

    @cached_property
    def visible(self) -> tuple[int, ...]:
        """Positions of the results that callers see."""
        return tuple(i for i, result in enumerate(self.results) if not result.hidden)

    @cached_property
    def hidden(self) -> tuple[int, ...]:
        """Positions of the results that only formulas see."""
        return tuple(i for i, result in enumerate(self.results) if result.hidden)

    @cached_property
    def always_tensors(self) -> bool:
        """True if every result is one tensor in every call."""
        return not any(result.optional or result.sequence for result in self.results)

    @cached_property
    def result_position(self) -> dict[str, int]:
        """Position of each result, by name."""
        return {result.name: i for i, result in enumerate(self.results)}

    @cached_property
    def gradient_position(self) -> dict[str, int]:
        """Position of the result for each name of a grad_output."""
        return {result.gradient_name(): i for i, result in enumerate(self.results)}

    @cached_property
    def shapes(self) -> dict[str, str]:
        """Tensor argument for each name of a shape in formulas, such as `x_shape`."""
        names_taken = {*self.names, *self.result_position}
        return {
            f"{each.name}_shape": each.name
            for each in self.arguments
            if each.kind.is_tensor and not each.kind.sequence and f"{each.name}_shape" not in names_taken
        }

    @cached_property
    def tangents(self) -> dict[str, str]:
        """Tensor argument for each name of a tangent in formulas, such as `tangent_x`."""
        names_taken = {*self.names, *self.result_position}
        return {f"tangent_{name}": name for name in self.tensor_names if f"tangent_{name}" not in names_taken}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Full names for `grad` and `result`, if callers see only one result."""
        if len(self.visible) != 1:
            return {}
        only = self.results[self.visible[0]]
        meant = {} if only.name == "result" else {"grad": only.gradient_name(), "result": only.name}
        # An adopted operator may have an argument of that name.
        return {alias: name for alias, name in meant.items() if alias not in self.by_name}

    def text(self, name: str, *, with_hidden: bool = False) -> str:
        """Return the schema in torch's language, for an operator of this name.

        Example:
            >>> import torch
            >>> def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
            ...     return x * by
            >>> schema_of(scale, "demo::scale").text("scale")
            'scale(Tensor x, float by=2.0) -> Tensor'
        """
        pieces: list[str] = []
        for argument in self.leaves:
            if argument.keyword_only and "*" not in pieces:
                pieces.append("*")
            pieces.append(argument.schema())
        shown = [result for result in self.results if with_hidden or not result.hidden]
        returns = ["Tensor[]" if result.sequence else "Tensor" for result in shown]
        if self.returns is not None:
            returns = [f"Tensor({self.by_name[self.returns].alias}!)"]
        text = ", ".join(returns)
        return f"{name}({', '.join(pieces)}) -> {text if len(returns) == 1 else f'({text})'}"

    def call_text(self, name: str, *, out: str = "") -> str:
        """Return a call with variables that have the arguments' names, without objects that have defaults.

        Args:
            name: Expression for the handle.
            out: Expression for `out=`; empty for none.
        """
        given = []
        for each in self.arguments:
            required = each.default is REQUIRED
            if required or isinstance(each.default, (int, float, str, tuple, list, type(None))):
                value = each.name if required else repr(each.default)  # an object's may not be Python
                given.append(value if required and not each.keyword_only else f"{each.name}={value}")
        return f"`{name}({', '.join(given + [f'out={out}'] * bool(out))})`"

    def signature(self, reference: Callable[..., Any]) -> inspect.Signature:
        """Return the signature of a call, with the annotations of the reference where they fit a call."""
        annotated = bool(getattr(reference, "__annotations__", None))
        try:
            own = inspect.signature(reference) if annotated else inspect.Signature()
        except ValueError:  # a function of torch, annotated by a wrapper
            own = inspect.Signature()
        named = {each.name: each for each in own.parameters.values() if each.annotation is not REQUIRED}
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = [
            named.get(each.name)
            or inspect.Parameter(
                each.name,
                kinds[each.keyword_only],
                default=each.default,
                annotation=each.kind.annotation(),
            )
            for each in self.arguments
        ]
        visible = tuple(result.type for result in self.results if not result.hidden)
        returned: Any = types.GenericAlias(tuple, visible) if visible else types.NoneType
        if self.returns is not None:
            returned = Tensor
        elif len(visible) == 1:
            (returned,) = visible
        if annotated and _return_hint(reference) == returned:
            returned = own.return_annotation
        return inspect.Signature(parameters, return_annotation=returned)

    def parameters(self) -> list[str]:
        """Return the parameters in Python, such as `x: Tensor`, with a `*` before keyword-only parameters."""
        pieces: list[str] = []
        for argument in self.arguments:
            if argument.keyword_only and "*" not in pieces:
                pieces.append("*")
            default = "" if argument.default is REQUIRED else f" = {argument.default!r}"
            pieces.append(f"{argument.name}: {argument.kind.annotation()}{default}")
        return pieces

    def call_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the value of every argument of a valid call: defaults filled in, sequences as declared."""
        values = list(args)
        for argument in self.arguments[len(args) :]:
            values.append(kwargs.get(argument.name, argument.default))
        return [
            argument.kind.restore(value) if argument.kind.sequence else value
            for argument, value in zip(self.arguments, values, strict=True)
        ]

    def received(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the value of every argument of a call that comes from torch's dispatcher."""
        if self.lowering is None or not self.encoded:
            return self.call_values(args, kwargs)
        return self.lowering.lift(args, kwargs)

    def dispatched(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for a call of torch's operator with these values."""
        if self.lowering is None or not self.encoded:
            return self.split(values)
        return self.lowering.split(values)

    def split(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for a call of the reference with these values."""
        if self.positional == len(values):
            return values, {}
        return values[: self.positional], dict(
            zip(self.names[self.positional :], values[self.positional :], strict=True)
        )


def schema_of(
    reference: Callable[..., Any],
    operator: str,
    *,
    results: ResultNames = None,
    hidden: Iterable[str] = (),
    known: Mapping[str, ArgumentType] | None = None,
    returned: Any = REQUIRED,
    mutates: Iterable[str] = (),
    returns: str | None = None,
) -> Schema:
    """Read an operator's schema from the signature of its reference.

    Args:
        reference: Function with a type hint on every parameter and on its return value.
        operator: The operator's name, for messages.
        results: Names of the results, in order; or a mapping from name to `...` (differentiable) or
            `opsmith.non_differentiable`.
        hidden: Names of results that callers do not see.
        known: Types of parameters that need no hint, by name.
        returned: Annotation of the return value if it has no hint.
        mutates: Names of the arguments that the operator writes into.
        returns: Name of the written argument that it returns.

    Raises:
        NotAFunctionError, MissingAnnotationError, UnsupportedTypeError, ParameterKindError, NameFormatError,
        ReservedNameError, DefaultError, ResultNameError, UnknownInputError: As their names say.
    """
    with errors.about(operator, where(reference)):
        signature = _signature(reference, operator)
        if signature.return_annotation is REQUIRED:
            signature = signature.replace(return_annotation=returned)
        return _schema(signature, results, tuple(hidden), known or {}, tuple(mutates), returns)


def _schema(
    signature: inspect.Signature,
    results: ResultNames,
    hidden: tuple[str, ...],
    known: Mapping[str, ArgumentType],
    mutates: tuple[str, ...],
    returns: str | None,
) -> Schema:
    arguments = tuple(_argument(each, known.get(each.name)) for each in signature.parameters.values())
    _refuse_clash(arguments)
    arguments = with_aliases(arguments, mutates)
    annotation = signature.return_annotation
    if returns is not None:
        _refuse_returned(arguments, mutates, returns, annotation)
        annotation = None
    forms, single = result_forms(annotation, writes=bool(mutates))
    roles = result_roles(len(forms), results, hidden)
    names = tuple(
        replace(result, optional=form == "optional", sequence=form == "list")
        for result, form in zip(roles, forms, strict=True)
    )
    clash = {argument.name for argument in arguments} & {result.name for result in names}
    if clash:
        raise errors.ResultNameError(
            f"`{min(clash)}` names both an argument and a result",
            argument=min(clash),
            hint=f"rename the result in `{'hidden' if min(clash) in hidden else 'results'}=`",
        )
    return Schema(arguments, names, single, returns)


def _signature(reference: Callable[..., Any], operator: str) -> inspect.Signature:
    if not isinstance(reference, types.FunctionType | types.MethodType):
        raise errors.NotAFunctionError(
            "the reference is not a Python function with a readable signature",
            operator=operator,
            expected="a function with type hints",
            got=where(reference),
            hint="write a function around it: `def f(x: Tensor) -> Tensor: ...`",
        )
    try:
        hints = hints_of(reference)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise errors.UnsupportedTypeError(
            f"a type hint cannot be resolved: {error}",
            hint=_no_argument_hint(reference)
            or "import the name at the top of the module that declares the operator",
        ) from error
    signature = inspect.signature(reference)
    parameters = [
        parameter.replace(annotation=hints.get(parameter.name, REQUIRED))
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters, return_annotation=hints.get("return", REQUIRED))


def _return_hint(function: Callable[..., Any]) -> Any:
    """The return annotation; `REQUIRED` if there is none, or if a hint cannot be resolved."""
    try:
        return hints_of(function).get("return", REQUIRED)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return REQUIRED


_NO_ARGUMENTS = {
    "ctx": "leave `ctx` out: a formula gets values by name, `op.gradients(x=lambda grad, x: ...)`; adopt a "
    "class with `ctx`: `opsmith.adopt(Class, 'mylib::name')`",
    "self": "declare a function outside of the class, and call it in the method",
    "cls": "declare a function outside of the class, and call it in the method",
}
"""Hints for parameters of methods, by name."""


def _no_argument_hint(reference: Callable[..., Any]) -> str | None:
    """Return the hint for a method, whose first parameter is an instance; None for a function."""
    first, annotation = next(iter(reference.__annotations__.items()), ("", None))
    return None if annotation in (Tensor, "Tensor", "torch.Tensor") else _NO_ARGUMENTS.get(first)


def _argument(parameter: inspect.Parameter, known: ArgumentType | None) -> Argument:
    """The argument for a parameter; `known` is its type if it has no hint."""
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        shown: dict[Any, str] = {parameter.VAR_POSITIONAL: f"*{name}", parameter.VAR_KEYWORD: f"**{name}"}
        raise errors.ParameterKindError(
            f"an operator cannot take `{shown.get(parameter.kind, name + ', /')}`",
            argument=name,
            hint="name every argument; for a varying number of tensors take `list[Tensor]`",
        )
    if name.startswith(RESERVED):
        raise errors.ReservedNameError(
            "in formulas, names that begin with `grad` or `result` mean gradients and results",
            argument=name,
            hint=f"rename the argument, for example to `given_{name}`",
        )
    refuse_unwritable(name)
    if parameter.annotation is REQUIRED and known is None:
        raise errors.MissingAnnotationError(
            f"parameter `{name}` has no type hint",
            argument=name,
            expected="a type hint on every parameter",
            hint=_NO_ARGUMENTS.get(name, f"write `{name}: Tensor`, or `int`, `float`, `bool`, `str`, ..."),
        )
    kind = known if parameter.annotation is REQUIRED else kind_of(parameter.annotation)
    if kind is None:
        raise errors.UnsupportedTypeError(
            f"parameter `{name}` has a type that an operator's schema cannot carry",
            argument=name,
            got=shown_annotation(parameter.annotation),
            hint=_NO_ARGUMENTS.get(name) or hint_for(parameter.annotation),
        )
    default = parameter.default
    if default is not REQUIRED:
        if parameter.annotation is not REQUIRED:  # a known type has its own default
            _check_default(name, kind, default)
        if kind.base is FLOAT and type(default) is int:  # calls convert it to a float, too
            default = float(default)
    return Argument(name, kind, default, parameter.kind is parameter.KEYWORD_ONLY)


def with_aliases(arguments: tuple[Argument, ...], mutates: tuple[str, ...]) -> tuple[Argument, ...]:
    """Return the arguments; each argument that the operator writes into gets its own letter.

    Raises:
        UnknownInputError: If it cannot write into one of them.
    """
    by_name = {argument.name: argument for argument in arguments}
    for name in mutates:
        kind = by_name[name].kind if name in by_name else None
        if kind is None or not _is_writable(kind):
            tensors = [each.name for each in arguments if _is_writable(each.kind)]
            close = difflib.get_close_matches(name, tensors, n=1) or tensors[:1]
            raise errors.UnknownInputError(
                f"it cannot write into `{name}`",
                argument="mutates",
                expected=f"a `Tensor`, a `Tensor | None` or a `list[Tensor]`, out of {listed(tensors)}",
                got=f"`{name}`" if kind is None else f"`{name}: {kind.annotation()}`",
                hint=f'write `mutates=("{close[0]}",)`, or another tensor that the reference writes into'
                if close
                else "leave `mutates=` out: it has no tensor to write into",
            )
    letters = iter(string.ascii_lowercase)
    return tuple(replace(each, alias=next(letters)) if each.name in mutates else each for each in arguments)


def _is_writable(kind: ArgumentType) -> bool:
    return kind.is_tensor and not kind.item_optional and not (kind.sequence and kind.optional)


def _returned_hint(first: str, mutates: tuple[str, ...], returns: str) -> str:
    """The hint if an argument cannot be returned; `first` is the first argument if it is a plain tensor."""
    if first and not mutates and returns == first:
        return f'write `mutates=("{first}",)`, too'
    if first and mutates == (first,):
        return f'write `returns="{first}"`, or leave `returns=` out and return None or new tensors'
    return "leave `returns=` out, and let the function return None or new tensors"


def _refuse_returned(
    arguments: tuple[Argument, ...], mutates: tuple[str, ...], returns: str, annotation: Any
) -> None:
    """Refuse `returns=` if torch does not support such an in-place operation."""
    first = arguments[0] if arguments else None
    plain = first is not None and first.kind.annotation() == "Tensor" and not first.keyword_only
    if not plain or (returns,) != mutates or first is None or first.name != returns:
        raise errors.UnknownInputError(
            f"it cannot return `{returns}`",
            argument="returns",
            expected="the first argument, a `Tensor`, which is the only written argument",
            got=f"`{returns}`, where the first argument is "
            + (f"`{first.name}: {first.kind.annotation()}`" if first else "none")
            + f", and it writes into {listed(mutates) or 'nothing'}",
            hint=_returned_hint(first.name if plain and first else "", mutates, returns),
        )
    if annotation is not Tensor:
        raise errors.UnsupportedTypeError(
            f"an operator that returns `{returns}` needs the return type hint `Tensor`",
            argument="return",
            expected="Tensor",
            got=shown_annotation(annotation),
            hint=f"write `-> Tensor` and `return {returns}`",
        )


def _refuse_clash(arguments: Iterable[Argument]) -> None:
    """Refuse two arguments that would have the same name in torch's schema."""
    owners: dict[str, str] = {}
    for argument in arguments:
        for leaf in argument.leaves():
            other = owners.setdefault(leaf.name, argument.name)
            if other != argument.name:
                raise errors.ReservedNameError(
                    f"`{argument.name}` and `{other}` both become `{leaf.name}` in the operator's schema",
                    argument=argument.name,
                    hint=f"rename `{argument.name}` or `{other}`",
                )


def _check_default(name: str, kind: ArgumentType, default: Any) -> None:
    if isinstance(default, str) and default != default.encode(errors="replace").decode():
        raise errors.DefaultError(
            f"torch's schema language cannot write the default of `{name}`",
            argument=name,
            expected="a string that UTF-8 can encode",
            got=ascii(default),
            hint="leave surrogates out of the string",
        )
    if not kind.accepts(default) and not kind.is_exceeded(default):
        raise errors.DefaultError(
            f"the default of `{name}` does not fit its type hint",
            argument=name,
            expected=kind.annotation(),
            got=repr(default),
            hint=f"write `{name}: {kind.annotation()} | None = None`"
            if default is None
            else "change the default or the type hint",
        )


def functional_schema(schema: Schema) -> Schema:
    """Return the schema of an in-place operator's functional form, whose first results are the new values.

    Example:
        >>> import torch
        >>> def add_(x: torch.Tensor, y: torch.Tensor) -> None:
        ...     x.add_(y)
        >>> schema = schema_of(add_, "demo::add_", mutates=["x"])
        >>> schema.text("add_"), functional_schema(schema).text("add")
        ('add_(Tensor(a!) x, Tensor y) -> ()', 'add(Tensor x, Tensor y) -> Tensor')
    """
    values = tuple(
        Result(
            f"result_{each.name}",
            optional=each.kind.optional and not each.kind.sequence,
            sequence=each.kind.sequence,
            written=each.name,
        )
        for each in schema.arguments
        if each.alias
    )
    arguments = tuple(replace(each, alias="") for each in schema.arguments)
    results = (*values, *schema.results)
    return Schema(arguments, results, single=len(results) == 1)


def in_place_schema(schema: Schema) -> Schema:
    """Return the schema of the in-place operator of a functional form; inverse of `functional_schema`.

    It returns the argument that it writes into if torch has such in-place operations.

    Raises:
        UnknownInputError: If it cannot write into an argument.
    """
    written = schema.new_values
    arguments = with_aliases(schema.arguments, written)
    results = tuple(each for each in schema.results if each.written is None)
    first = arguments[0]
    plain = first.kind.annotation() == "Tensor" and not first.keyword_only
    returns = first.name if plain and not results and written == (first.name,) else None
    return Schema(arguments, results, single=len(results) == 1, returns=returns)


def refuse_unwritable(name: str) -> None:
    """Refuse an argument whose name torch's schema language cannot write.

    Raises:
        NameFormatError: If it contains letters that are not ASCII.
    """
    if not name.isascii():
        raise errors.NameFormatError(
            f"torch's schema language cannot write the name of `{name}`",
            argument=name,
            expected="ASCII letters, digits and `_`",
            hint="rename the argument",
        )
