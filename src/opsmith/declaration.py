"""Declaration of operators: the decorator `opsmith.operator`, and the table of declared operators."""

from __future__ import annotations

import importlib
import keyword
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, get_args, overload

import torch

from opsmith import errors
from opsmith.core.location import where
from opsmith.core.operator import Operator, Registration
from opsmith.core.results import ResultNames
from opsmith.core.schema import schema_of
from opsmith.core.specification import FUNCTIONAL_SUFFIX, VOID_SUFFIX, Accepting, Autocast, Specification

if TYPE_CHECKING:
    from opsmith.core.handle_types import (
        Hides,
        HidesOne,
        HidesOneTensor,
        HidesThree,
        HidesTwo,
        HidesTwoTensors,
        NamedOptions,
        WritingOperator,
        WritingOptions,
    )

P = ParamSpec("P")
R = TypeVar("R")

_OF_TORCH = re.compile(
    "aten|torch|torch_attn|torch_nn|prims?|(debug|rng|inductor_)prims|inductor|_inductor_(debug|test)|higher_order"
    "|_?c10d(_functional(_autograd)?)?|_dtensor|device_mesh|cplib|fsdp|symm_mem|streams|bucketing|flex_lib"
    "|_?quantized(_decomposed)?|quantization|ao|mkl|mkldnn(_prepacked)?|onednn|sparse|static_runtime|export"
    "|onnx(_symbolic)?|profiler|debug_mode_ops|_native(_aot)?|_test|cuda|prepacked|flex_gemm|coor|loaded_libraries"
)
"""Namespaces in which torch defines its own operators; `loaded_libraries` is an attribute of `torch.ops`."""
_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*", re.ASCII)
_declared: dict[str, Operator[Any, Any]] = {}


@overload
def operator(name: str, /, **options: Unpack[NamedOptions]) -> Callable[[Callable[P, R]], Operator[P, R]]: ...
@overload
def operator(
    name: str, /, *, mutates: Iterable[str], **options: Unpack[NamedOptions]
) -> Callable[[Callable[P, R]], WritingOperator[P, R]]: ...
@overload
def operator(  # type: ignore[overload-overlap]  # the last overload is for an unknown number of names
    name: str, /, *, hidden: tuple[str], **options: Unpack[WritingOptions]
) -> HidesOne: ...
@overload
def operator(  # type: ignore[overload-overlap]  # the last overload is for an unknown number of names
    name: str, /, *, hidden: tuple[str, str], **options: Unpack[WritingOptions]
) -> HidesTwo: ...
@overload
def operator(  # type: ignore[overload-overlap]
    name: str, /, *, hidden: tuple[str, str, str], **options: Unpack[WritingOptions]
) -> HidesThree: ...
@overload
def operator(
    name: str, /, *, hidden: tuple[str], results: ResultNames, **options: Unpack[WritingOptions]
) -> HidesOneTensor: ...
@overload
def operator(
    name: str, /, *, hidden: tuple[str, str], results: ResultNames, **options: Unpack[WritingOptions]
) -> HidesTwoTensors: ...
@overload
def operator(
    name: str, /, *, hidden: Iterable[str], results: ResultNames = None, **options: Unpack[WritingOptions]
) -> Hides: ...
def operator(
    name: str,
    /,
    *,
    results: ResultNames = None,
    hidden: Iterable[str] = (),
    opaque: bool = False,
    random: bool = False,
    deterministic: bool = True,
    autocast: Autocast = "promote",
    inline: bool | None = None,
    shapes: str | None = None,
    batching: str | None = None,
    accept: Accepting | None = None,
    mutates: Iterable[str] = (),
    returns: str | None = None,
) -> Callable[[Callable[P, Any]], Operator[P, Any]]:
    """Declare an operator: the decorated function is its reference, the mathematics in plain PyTorch.

    Declaring a name again from the same module and function name (a notebook cell, a reload) replaces the
    operator behind the same handle; from elsewhere it raises an error.

    Args:
        name: `namespace::name`; the operator is also `torch.ops.namespace.name`.
        results: Names of the results, or a mapping from name to `...` or `opsmith.non_differentiable`.
        hidden: Names of results that callers do not see and formulas may use.
        opaque: The function is not made of torch operations: nothing is derived from it.
        random: The function draws from torch's random state.
        deterministic: False if its rounding differs from run to run, as for a sum with atomics: a call raises
            an error under `torch.use_deterministic_algorithms(True)`.
        autocast: Rule for floating inputs under autocast: `"promote"` to the widest among them,
            `"lower"` to autocast's dtype, `"float32"`.
        inline: True if torch.compile traces the reference, and so fuses it; by default for each call that no
            kernel takes. torch.export always keeps the operator whole.
        shapes: Shapes in letters, `"x: B M, weight: N M -> B N"`, against which calls are checked.
        batching: Rule by which one call computes a batch under `vmap`: `"elementwise"`, or the dimension of
            `shapes` that holds independent examples, a letter or `"..."`.
        accept: Findings of `check` to accept: the reason by `(property, cause)`, as `("vmap", "raises")`.
        mutates: Names of the arguments that the function writes into, in place. The function returns None,
            or new tensors that share no memory with them. Everything is derived from `op.functional`.
        returns: Name of the argument that the function writes into and returns, as torch's in-place
            operations do. It must be the first argument, and the only one written.

    Raises:
        NameFormatError, NameTakenError: If the operator's name is invalid, or belongs to another module.
        NotAFunctionError, MissingAnnotationError, UnsupportedTypeError: If the reference is invalid.
        ParameterKindError, ReservedNameError, DefaultError: If one of its parameters is invalid.
        ResultNameError, ShapePatternError, UsageError, UnknownInputError: If another option is invalid.

    Example:
        >>> import torch, opsmith
        >>> @opsmith.operator("demo::twice")
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return x + x
        >>> twice(torch.ones(2)), torch.ops.demo.twice(torch.ones(2))
        (tensor([2., 2.]), tensor([2., 2.]))
    """
    check_name(name, hint='write `@opsmith.operator("mylib::linear")`')
    check_flag(name, "opaque", opaque, (False, True))
    check_flag(name, "random", random, (False, True))
    check_flag(name, "deterministic", deterministic, (True, False))
    check_flag(name, "inline", inline, (None, False, True))
    if autocast not in get_args(Autocast):
        raise errors.UsageError(
            "unknown rule for autocast",
            operator=name,
            argument="autocast",
            expected=", ".join(f"`{rule}`" for rule in get_args(Autocast)),
            got=repr(autocast),
            hint='leave it out, or write `autocast="lower"`',
        )

    written = _names_of_written(name, mutates)

    def declare(reference: Callable[P, Any]) -> Operator[P, Any]:
        from opsmith.core.shapes import check_batching, read_shapes  # with the first operator

        schema = schema_of(reference, name, results=results, hidden=hidden, mutates=written, returns=returns)
        location = where(reference)
        with errors.about(name, location):
            pattern = None if shapes is None else read_shapes(shapes, schema)
            rule = check_batching(batching, pattern, schema)
        specification = Specification(
            name=name,
            reference=reference,
            schema=schema,
            module=reference.__module__,
            qualname=reference.__qualname__,
            where=location,
            opaque=opaque,
            random=random,
            deterministic=deterministic,
            autocast=autocast,
            inline=inline,
            shapes=pattern,
            batching=rule,
            accept=dict(accept or {}),
        )
        handle: Operator[P, Any] = declare_specified(specification)
        return handle

    return declare


def declare_specified(
    specification: Specification,
    kind: type[Operator[Any, Any]] = Operator,
    register: Callable[[Specification], Registration] | None = None,
) -> Operator[Any, Any]:
    """Register an operator, and return its handle; redeclare it if the same module has declared it before.

    Args:
        specification: The operator.
        kind: Class of a new handle.
        register: Registers an operator that torch already has; by default torch must not know the name.

    Raises:
        NameTakenError: If another module, or torch, has an operator of this name.
    """
    known = _declared.get(specification.name)
    if known is not None:
        _refuse_other_place(known.specification, specification)
        if not isinstance(known, kind):
            raise errors.NameTakenError(
                "the name is taken by an operator that was declared, and not adopted",
                operator=specification.name,
                where=known.specification.where,
                hint="choose another name for the adopted operator",
            )
        known.redeclare(specification, register or _register)
        return known
    if register is None:
        _refuse_taken(specification)
        register = _register
    registration = register(specification)
    try:
        handle: Operator[Any, Any] = kind(specification, registration, find_operator)
        _declared[specification.name] = handle
    except BaseException:  # also an interrupt: nobody else would deregister it
        registration.remove()
        raise
    return handle


def _register(specification: Specification) -> Registration:
    from opsmith.torch_library.in_place import register_operator  # half of the import time

    return register_operator(specification)


def check_name(name: Any, *, hint: str) -> None:
    """Refuse a value that is not a name of an operator.

    Raises:
        NameFormatError: With this hint.
    """
    word = _reserved_word(name) if isinstance(name, str) and _NAME.fullmatch(name) else None
    if word is not None:
        raise errors.NameFormatError(
            f"`{word}` cannot be part of an operator's name: torch or Python uses this word",
            expected="two identifiers with `::` between them, which torch does not use for itself",
            got=repr(name),
            hint=f"replace `{word}` by another word",
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise errors.NameFormatError(
            "an operator's name is `namespace::name`",
            expected="two identifiers with `::` between them, which torch does not use for itself",
            got=where(name) if callable(name) else repr(name),
            hint=hint,
        )


def check_flag(operator: str, flag: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not among the allowed values of an option; the first of them is the default.

    Raises:
        UsageError: If it is not allowed.
    """
    if not any(value is each for each in allowed):
        raise errors.UsageError(
            f"`{flag}` has an invalid value",
            operator=operator,
            argument=flag,
            expected=" or ".join(map(repr, allowed)),
            got=repr(value),
            hint=f"write `{flag}={allowed[-1]}`, or leave it out",
        )


def _names_of_written(operator: str, mutates: Any) -> tuple[str, ...]:
    if isinstance(mutates, str):
        return (mutates,)
    names = tuple(mutates) if isinstance(mutates, Iterable) else (mutates,)
    if all(isinstance(each, str) for each in names):
        return names
    raise errors.UsageError(
        "`mutates` must contain names of arguments",
        operator=operator,
        argument="mutates",
        expected="names of arguments",
        got=repr(mutates),
        hint='write `mutates=("x",)`, or leave it out if the operator writes into no argument',
    )


def _reserved_word(name: str) -> str | None:
    """Return the word that no operator's name can contain: a keyword, or a namespace or attribute of torch.

    torch finds an operator as an attribute of its namespace, which has others, such as `torch.ops.a.name`.
    """
    space, short = name.split("::")
    namespace = torch.ops.opsmith_without_operators
    if keyword.iskeyword(space) or _OF_TORCH.fullmatch(space) or _has_attribute(type(torch.ops), space):
        return space
    if keyword.iskeyword(short) or short in vars(namespace) or _has_attribute(type(namespace), short):
        return short
    return None


def _has_attribute(kind: type, name: str) -> bool:
    """Return True if a class or one of its bases defines this attribute."""
    return any(name in vars(each) for each in kind.__mro__)


def find_operator(name: str, module: str | None = None) -> Operator[..., Any]:
    """Return the operator of this name; `module` is imported first if it is not declared yet.

    Raises:
        OperatorNotFoundError: If it is not declared.

    Example:
        >>> import opsmith.ops
        >>> find_operator("opsmith::exp")
        <opsmith operator opsmith::exp(Tensor x) -> Tensor>
    """
    if name not in _declared and module is not None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module was found, but a module that it imports was not
            raise errors.OperatorNotFoundError(
                "the module that declared this operator cannot be found",
                operator=name,
                expected=f"a module `{module}`",
                got=str(error),
                hint=f"install the package of `{module}`, or put it where Python looks for modules",
            ) from error
    written_by = _declared.get(name.removesuffix(FUNCTIONAL_SUFFIX))
    if name not in _declared and written_by is not None and written_by.functional.name == name:
        return written_by.functional
    if name not in _declared:
        raise errors.OperatorNotFoundError(
            "no operator of this name is declared",
            operator=name,
            got=f"module `{module}`, which does not declare it" if module else None,
            hint="import the module that declares it first",
        )
    return _declared[name]


def declared_operators(module: str | None = None) -> list[Operator[..., Any]]:
    """List all declared operators, or those of one module, in the order of their declaration.

    Example:
        >>> import opsmith.ops.linear
        >>> [operator.name for operator in declared_operators("opsmith.ops.linear")]
        ['opsmith::linear']
    """
    return [known for known in _declared.values() if module is None or known.specification.module == module]


def _refuse_other_place(old: Specification, new: Specification) -> None:
    foreign = old.origin.registered
    # An operator of torch stays the same if its reference has another name.
    same = old.module == new.module and (foreign or old.qualname == new.qualname)
    if not same or foreign != new.origin.registered:
        problem = f"the name is taken by `{old.module}.{old.qualname}`"
        hint = "choose another name, best with the name of your package as its namespace"
        last = old.module.rpartition(".")[2]
        if (
            old.qualname == new.qualname
            and old.module != new.module
            and f".{new.module}".endswith(f".{last}")
        ):
            problem += ", which looks like another copy of the same package"
            hint = (
                "import only one of the two copies; if you need both, give this one its own namespace: "
                f"""`@opsmith.operator(__name__.replace(".", "_") + "::{new.short_name}")`"""
            )
        raise errors.NameTakenError(
            problem,
            operator=new.name,
            got=f"{new.module}.{new.qualname}, {new.where}",
            where=old.where,
            hint=hint,
        )


def _refuse_taken(specification: Specification) -> None:
    from opsmith.torch_library import capabilities
    from opsmith.torch_library.registration import HIDDEN_SUFFIX
    from opsmith.torch_library.served_libraries import library_of

    if library_of(specification.dispatched_name) is not None:
        return  # a library without Python has defined it; both compare their sources at the first call
    suffixes = ["", *[HIDDEN_SUFFIX] * bool(specification.schema.hidden)]
    suffixes += [FUNCTIONAL_SUFFIX] * bool(specification.schema.written)
    suffixes += [VOID_SUFFIX] * (specification.schema.returns is not None)
    for name in (specification.name + suffix for suffix in suffixes):
        if capabilities.operator_exists(name):
            raise errors.NameTakenError(
                f"torch already has an operator `{name}`, which opsmith did not declare",
                operator=specification.name,
                where=specification.where,
                hint="choose another name, best with the name of your package as its namespace",
            )
