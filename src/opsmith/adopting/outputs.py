"""Outputs of an adopted class: the number of results, their structure, and those that may be None.

They come from `signature=`; else from the return annotation of the reference or of `forward`; else from a run
on the first sample; else from the return statements of `forward`. A call that returns something else outranks
all but the first.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core.adopted import Outputs
from opsmith.core.call_arguments import shown
from opsmith.torch_library.validation import unsupported_kind

Shape = Any
"""A structure: "tensor", "optional", None, or a tuple of structures."""


def outputs_of(
    function_class: type[torch.autograd.Function],
    stated: Any,
    hints: Sequence[Any],
    run: Callable[[], tuple[int, Any]] | None,
) -> tuple[Outputs, tuple[bool, ...]]:
    """Return the structure of the outputs of a class, and for each result True if it may be None.

    Args:
        function_class: The class.
        stated: Return annotation of `signature=`; `inspect.Signature.empty` if there is none.
        hints: Other return annotations; the first that can be read is used.
        run: Runs it on a sample, if there is one; returns the sample's index and the outputs.

    Raises:
        MissingAnnotationError: If it returns nothing as far as its source shows.
        UnsupportedTypeError: If it returns, or declares, something other than tensors.
        LayoutError: If it returns a sparse, nested, quantised or mkldnn tensor.
        ResultTypeError: If it returns nothing.
    """
    if stated is not inspect.Signature.empty and _of_hint(stated) is _UNKNOWN:
        raise errors.UnsupportedTypeError(
            "`signature` declares a type of result that an operator does not return",
            argument="return",
            expected="`Tensor`, `Tensor | None`, `None`, or a tuple of such",
            got=str(stated),
            hint='write for example `signature="(x: Tensor) -> tuple[Tensor, Tensor]"`',
        )
    shape = next((found for found in map(_of_hint, [stated, *hints]) if found is not _UNKNOWN), _UNKNOWN)
    if shape is _UNKNOWN:
        shape = _of_source(function_class.forward) if run is None else _of_run(run, function_class)
    if shape is _UNKNOWN:
        shape = "tensor"  # until the first call shows it
    if not list(_leaves(shape)):
        raise errors.MissingAnnotationError(
            f"the results of `{function_class.__qualname__}.forward` are not declared",
            hint='give `samples=`, or declare it: `signature="(x: Tensor) -> tuple[Tensor, Tensor]"`',
        )
    optional: list[bool] = []
    return _numbered(shape, optional), tuple(optional)


_UNKNOWN = object()


def learned_outputs(
    outputs: Outputs, optional: Sequence[bool], returned: Any, *, certain: bool
) -> tuple[Outputs, tuple[bool, ...]] | None:
    """Return the structure of outputs that also fits a value of another structure; None if there is none.

    Args:
        outputs: The structure so far.
        optional: For each result True if it may be None.
        returned: The other structure.
        certain: False if the structure so far was never seen in a run.
    """
    before = _shape_of(outputs, optional)
    shape = _merged(before, returned) if certain else returned
    if shape is _UNKNOWN or "other" in list(_leaves(shape)) or not list(_leaves(shape)):
        return None
    found: list[bool] = []
    return _numbered(shape, found), tuple(found)


def _shape_of(outputs: Outputs, optional: Sequence[bool]) -> Shape:
    if isinstance(outputs, tuple):
        return tuple(_shape_of(inner, optional) for inner in outputs)
    return None if outputs is None else "optional" if optional[outputs] else "tensor"


def _of_hint(hint: Any) -> Shape:
    if hint is torch.Tensor:
        return "tensor"
    if hint is type(None) or hint is None:
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = set(typing.get_args(hint))
        return "optional" if members == {torch.Tensor, type(None)} else _UNKNOWN
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint):
        inner = tuple(map(_of_hint, typing.get_args(hint)))
        return _UNKNOWN if _UNKNOWN in inner else inner
    return _UNKNOWN


def _of_run(run: Callable[[], tuple[int, Any]], function_class: Any) -> Shape:
    position, value = run()
    shape = _of_value(value, function_class)
    if list(_leaves(shape)):
        return shape
    raise errors.ResultTypeError(
        f"`{function_class.__qualname__}.forward` returned {shown(value)} on sample {position}",
        argument="return",
        expected="a tensor, or a tuple of tensors",
        got=shown(value),
        hint="end `forward` by `return result`",
    )


def _of_value(value: Any, function_class: type) -> Shape:
    if isinstance(value, torch.Tensor):
        foreign = unsupported_kind(value)
        if foreign is not None:
            raise errors.LayoutError(
                f"`{function_class.__qualname__}.forward` returns no strided dense tensor",
                argument="return",
                expected="torch.strided",
                got=foreign.name,
                hint=f"return `{foreign.hint.format('result')}`",
            )
        return "tensor"
    if value is None:
        return None
    if isinstance(value, tuple | list):
        return tuple(_of_value(item, function_class) for item in value)
    raise errors.UnsupportedTypeError(
        f"`{function_class.__qualname__}.forward` returns a value that is not a tensor",
        argument="return",
        got=shown(value),
        hint="return tensors alone: `torch.as_tensor(...)` of a number; what only its backward needs belongs "
        "on `ctx`",
    )


def never_returned(function: Callable[..., Any], position: int) -> bool:
    """Return True if the value at a position of a returned tuple is None in every return statement.

    Args:
        function: A Function class's backward.
        position: The position.

    Example:
        >>> def backward(ctx, grad):
        ...     return 2 * grad, None
        >>> never_returned(backward, 0), never_returned(backward, 1)
        (False, True)
    """
    shape = _of_source(function)
    return isinstance(shape, tuple) and position < len(shape) and shape[position] is None


def _of_source(function: Callable[..., Any]) -> Shape:
    """Return the structure that the return statements of a function agree on: one value, or a tuple."""
    plain: Any = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
        shapes = [_of_expression(each) for each in _returned(tree.body[0])]
        if not shapes:  # a lambda
            shapes = list(_of_code(plain.__code__))
    except (OSError, TypeError, SyntaxError):  # written at a prompt
        shapes = list(_of_code(plain.__code__))
    merged = shapes[0] if shapes else _UNKNOWN
    for other in shapes[1:]:
        merged = _merged(merged, other)
    return merged


def _of_code(code: types.CodeType) -> Iterator[Shape]:
    """Return the structure from bytecode, if there is no source: a tuple display, or one value."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for before, instruction in itertools.pairwise(instructions):
        if instruction.opname != "RETURN_VALUE":  # a constant is not a result
            continue
        if before.opname == "BUILD_TUPLE":
            yield ("tensor",) * int(before.arg or 0)
        else:
            yield None if before.opname == "LOAD_CONST" else "tensor"


def _returned(function: ast.AST) -> Iterator[ast.expr | None]:
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return):
            yield node.value
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returned(node)


def _of_expression(expression: ast.expr | None) -> Shape:
    if expression is None or (isinstance(expression, ast.Constant) and expression.value is None):
        return None
    if isinstance(expression, ast.Tuple | ast.List):
        if any(isinstance(item, ast.Starred) for item in expression.elts):
            return _UNKNOWN
        inner = tuple(map(_of_expression, expression.elts))
        return _UNKNOWN if _UNKNOWN in inner else inner
    if isinstance(expression, ast.IfExp):
        return _merged(_of_expression(expression.body), _of_expression(expression.orelse))
    return _UNKNOWN if isinstance(expression, ast.Constant | ast.ListComp | ast.GeneratorExp) else "tensor"


def _merged(one: Shape, other: Shape) -> Shape:
    if one == other:
        return one
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        inner = tuple(map(_merged, one, other))
        return _UNKNOWN if _UNKNOWN in inner else inner
    single = not isinstance(one, tuple) and not isinstance(other, tuple)
    return "optional" if single and {one, other} <= {"tensor", "optional", None} else _UNKNOWN


def _leaves(shape: Shape) -> Iterator[str]:
    if isinstance(shape, tuple):
        for inner in shape:
            yield from _leaves(inner)
    elif shape is not None:
        yield shape


def _numbered(shape: Shape, optional: list[bool]) -> Outputs:
    if isinstance(shape, tuple):
        return tuple(_numbered(inner, optional) for inner in shape)
    if shape is None:
        return None
    optional.append(shape == "optional")
    return len(optional) - 1
