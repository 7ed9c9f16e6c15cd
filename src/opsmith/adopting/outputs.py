"""Outputs of an adopted class: the number of results, their structure, and those that may be None.

They come from `signature=`; else from the return annotation of the reference or of `forward`; else from a run
on the first sample; else from the return statements of `forward`. If a call returns something else, the call
outranks all of these except `signature=`.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core import source
from opsmith.core.call_arguments import shown
from opsmith.core.forward_arguments import ForwardArguments
from opsmith.core.origins.function_class import Outputs, WrittenOutput, may_write, side_by_side
from opsmith.core.reading import FunctionReader, Reading
from opsmith.core.results import Result
from opsmith.torch_library.arguments import unsupported_kind
from opsmith.torch_library.origins.forward import Returned

Shape = Any
"""A structure: "tensor", "optional", None, a `WrittenOutput`, or a tuple of structures."""


def outputs_of(
    function_class: type[torch.autograd.Function],
    stated: Any,
    hints: Sequence[Any],
    run: Callable[[], tuple[int, Returned]] | None,
    parameters: ForwardArguments,
    mutates: Sequence[str] | None,
) -> tuple[Outputs, tuple[Result, ...]]:
    """Return the structure of the outputs of a class, and its results, new values of arguments first.

    Args:
        function_class: The class.
        stated: Return annotation of `signature=`; `inspect.Signature.empty` if there is none.
        hints: Other return annotations; the first one that can be read is used.
        run: Runs the class on a sample; returns the sample's index and the outputs. None without samples.
        parameters: The parameters of forward, as the operator's arguments carry them.
        mutates: Names of the arguments that the class writes into, if its author declared them.

    Raises:
        MissingAnnotationError: If its source shows no result.
        UnsupportedTypeError: If it returns, or declares, something other than tensors.
        LayoutError: If it returns a sparse, nested, quantised or mkldnn tensor.
        ResultTypeError: If it returns nothing.
        UsageError: If it is not known which output is a declared argument.
    """
    if stated is not inspect.Signature.empty and _of_hint(stated) is _UNKNOWN:
        raise errors.UnsupportedTypeError(
            "`signature` declares a type of result that an operator cannot return",
            argument="return",
            expected="`Tensor`, `Tensor | None`, `None`, or a tuple of these",
            got=str(stated),
            hint='write for example `signature="(x: Tensor) -> tuple[Tensor, Tensor]"`',
        )
    shape = next((found for found in map(_of_hint, [stated, *hints]) if found is not _UNKNOWN), _UNKNOWN)
    arguments = [slot.name for slot in parameters.slots]
    reading = Reading()
    reading.read_class(function_class, arguments)
    carried = {slot.name for slot in parameters.slots if slot.form in ("plain", "either")}
    dirty = carried & (reading.marked if mutates is None else {*mutates})
    forward = reading.methods.get("forward")
    written = _of_source(function_class.forward, dirty, forward)
    if run is not None and (shape is _UNKNOWN or (mutates != () and may_write(function_class))):
        position, returned = run()
        seen = _of_returned(position, returned, function_class, arguments, mutates)
        shape = seen if shape is _UNKNOWN else _with_written(shape, seen)
    if shape is _UNKNOWN:
        shape = written
    if shape is _UNKNOWN:
        shape = "tensor"  # until the first call shows it
    if not list(_leaves(shape)):
        raise errors.MissingAnnotationError(
            f"the results of `{function_class.__qualname__}.forward` are not declared",
            hint='give `samples=`, or declare it: `signature="(x: Tensor) -> tuple[Tensor, Tensor]"`',
        )
    shape = _with_written(shape, written)
    if len(dirty) == 1 and shape == "tensor":
        shape = WrittenOutput(*dirty)
    unknown = set(mutates or ()) - {
        each.argument for each in _leaves(shape) if isinstance(each, WrittenOutput)
    }
    if unknown:
        raise errors.UsageError(
            f"it is not known which output of `{function_class.__qualname__}.forward` is `{min(unknown)}`: "
            "this needs a declaration",
            argument="mutates",
            expected=f"`return {min(unknown)}`, not inside a nested tuple",
            hint="give `samples=`, and let forward write in the first sample; or leave `mutates=` out",
        )
    return numbered(shape, arguments)


_UNKNOWN = object()


def learned_outputs(
    outputs: Outputs,
    results: Sequence[Result],
    returned: Any,
    arguments: Sequence[str],
    *,
    certain: bool,
    flagged: bool,
) -> tuple[Outputs, tuple[Result, ...]] | None:
    """Return a structure that fits the outputs so far and a newly returned value; None if there is none.

    Args:
        outputs: The structure so far.
        results: The results so far.
        returned: Structure of the newly returned value.
        arguments: Names of the operator's arguments.
        certain: False if no run has shown the structure so far.
        flagged: True if flags of the call may choose whether an argument is written.
    """
    before = _shape_of(outputs, results)
    shape = _merged(before, returned) if certain else returned
    if flagged and not certain:
        shape = _with_written(returned, before)
    if shape is _UNKNOWN or "other" in list(_leaves(shape)) or not list(_leaves(shape)):
        return None
    return numbered(shape, arguments)


def _shape_of(outputs: Outputs, results: Sequence[Result]) -> Shape:
    if isinstance(outputs, tuple):
        return tuple(_shape_of(inner, results) for inner in outputs)
    if outputs is None:
        return None
    result = results[outputs]
    if result.written is not None:
        return WrittenOutput(result.written)
    return "optional" if result.optional else "tensor"


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


def _of_returned(
    position: int,
    returned: Returned,
    function_class: Any,
    arguments: Sequence[str],
    mutates: Sequence[str] | None,
) -> Shape:
    """Return the structure of the value that forward returned on a sample, with the arguments it marked."""
    last = len(arguments) - 1
    marked = {each: arguments[min(at, last)] for each, at in returned.marked.items()}
    allowed = arguments if mutates is None else mutates
    written = {each: name for each, name in marked.items() if name in allowed}
    shape = _of_value(returned.value, function_class, written)
    if list(_leaves(shape)):
        return shape
    raise errors.ResultTypeError(
        f"`{function_class.__qualname__}.forward` returned {shown(returned.value)} on sample {position}",
        argument="return",
        expected="a tensor, or a tuple of tensors",
        got=shown(returned.value),
        hint="end `forward` with `return result`",
    )


def _of_value(value: Any, function_class: type, written: dict[int, str]) -> Shape:
    """Return the structure of a value; `written` has the names of the written arguments not yet found."""
    if id(value) in written:
        return WrittenOutput(written.pop(id(value)))
    if isinstance(value, torch.Tensor):
        foreign = unsupported_kind(value)
        if foreign is not None:
            raise errors.LayoutError(
                f"`{function_class.__qualname__}.forward` returns a tensor that is not strided and dense",
                argument="return",
                expected="torch.strided",
                got=foreign.name,
                hint=f"return `{foreign.hint.format('result')}`",
            )
        return "tensor"
    if value is None:
        return None
    if isinstance(value, tuple | list):
        return tuple(_of_value(item, function_class, written) for item in value)
    raise errors.UnsupportedTypeError(
        f"`{function_class.__qualname__}.forward` returns a value that is not a tensor",
        argument="return",
        got=shown(value),
        hint="return only tensors, `torch.as_tensor(...)` for a number; keep values that only the backward "
        "needs on `ctx`",
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
        >>> def by_name(ctx, grad):
        ...     grad_x = grad_size = None
        ...     if ctx.needs_input_grad[0]:
        ...         grad_x = 2 * grad
        ...     return grad_x, grad_size
        >>> never_returned(by_name, 0), never_returned(by_name, 1)
        (False, True)
        >>> def of_several(ctx, grad):
        ...     return None, 2 * grad, *(grad for _ in ctx.others)
        >>> never_returned(of_several, 0), never_returned(of_several, 2)
        (True, False)
    """
    shape = _of_source(function, head=True)
    return isinstance(shape, tuple) and position < len(shape) and shape[position] is None


def _of_source(
    function: Callable[..., Any],
    dirty: Collection[str] = (),
    reader: FunctionReader | None = None,
    *,
    head: bool = False,
) -> Shape:
    """Return the structure that all return statements of a function share: one value, or a tuple.

    Args:
        function: The function.
        dirty: Names of the operator's arguments that it marks as dirty.
        reader: Its reader, which finds arguments in its expressions.
        head: True to read only the values before a starred item.
    """

    def written(expression: ast.expr) -> str | None:
        name = None if reader is None else reader.argument(expression)
        return name if name in dirty else None

    tree, code = source.tree(function), source.code_of(function)
    shapes: list[Shape] = []
    if tree is not None:
        absent = _always_none(tree)
        returned = source.returns(tree)
        given = [*map(_head, returned)] if head else returned
        shapes = [_of_expression(each, written, absent) for each in given]
    if not shapes and code is not None:
        shapes = list(_of_code(code))
    return functools.reduce(_merged, shapes) if shapes else _UNKNOWN


def _head(expression: ast.expr | None) -> ast.expr | None:
    """Return a tuple with only the items before the first starred item, or before a `+`.

    Other expressions are returned unchanged.
    """
    first = expression
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    if not isinstance(first, ast.Tuple):
        return expression
    items = itertools.takewhile(lambda each: not isinstance(each, ast.Starred), first.elts)
    return ast.Tuple([*items], first.ctx)


def _of_code(code: types.CodeType) -> Iterator[Shape]:
    """Yield the structures of return statements from bytecode, without a source: a tuple, or one value."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for before, instruction in itertools.pairwise(instructions):
        if instruction.opname != "RETURN_VALUE":  # a constant is not a result
            continue
        if before.opname == "BUILD_TUPLE":
            yield ("tensor",) * int(before.arg or 0)
        else:
            yield None if before.opname == "LOAD_CONST" else "tensor"


def _always_none(function: source.Definition) -> frozenset[str]:
    """Return the names that only assignments of None set in a function."""
    names = [each for each in ast.walk(function) if isinstance(each, ast.Name)]
    stored = Counter(each.id for each in names if isinstance(each.ctx, ast.Store))
    given = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    pairs = [
        pair
        for each in ast.walk(function)
        if isinstance(each, ast.Assign)
        for target in each.targets
        for pair in _assigned(target, each.value)
    ]
    none = Counter(
        target.id
        for target, value in pairs
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and value.value is None
    )
    return frozenset(name for name, count in none.items() if count == stored[name] and name not in given)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value; the items of tuples in pairs."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for pair in zip(target.elts, value.elts, strict=True):
            yield from _assigned(*pair)
    else:
        yield target, value


def _of_expression(
    expression: ast.expr | None, written: Callable[[ast.expr], str | None], absent: Collection[str]
) -> Shape:
    match expression:
        case None | ast.Constant(value=None):
            return None
        case ast.Name() if expression.id in absent:
            return None
        case ast.expr() if (name := written(expression)) is not None:
            return WrittenOutput(name)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            inner = tuple(_of_expression(each, written, absent) for each in items)
            return _UNKNOWN if _UNKNOWN in inner else inner
        case ast.IfExp(body=body, orelse=orelse):
            return _merged(_of_expression(body, written, absent), _of_expression(orelse, written, absent))
        case ast.Constant() | ast.ListComp() | ast.GeneratorExp() | ast.Starred():
            return _UNKNOWN
    return "tensor"


def _with_written(shape: Shape, other: Shape) -> Shape:
    """Return a structure with the written arguments of another structure, where the two fit each other."""
    if isinstance(shape, tuple) and isinstance(other, tuple) and len(shape) == len(other):
        return tuple(map(_with_written, shape, other))
    return other if isinstance(other, WrittenOutput) and shape == "tensor" else shape


def _merged(one: Shape, other: Shape) -> Shape:
    if one == other:
        return one
    if "tensor" in (one, other):  # a flag chooses whether the output is the argument
        for written in (one, other):
            if isinstance(written, WrittenOutput):
                return written
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        inner = tuple(map(_merged, one, other))
        return _UNKNOWN if _UNKNOWN in inner else inner
    single = not isinstance(one, tuple) and not isinstance(other, tuple)
    return "optional" if single and {one, other} <= {"tensor", "optional", None} else _UNKNOWN


def _leaves(shape: Shape) -> Iterator[str | WrittenOutput]:
    if isinstance(shape, tuple):
        for inner in shape:
            yield from _leaves(inner)
    elif shape is not None:
        yield shape


def _once(shape: Shape, before: set[WrittenOutput]) -> Shape:
    """Return a structure in which an argument that is returned twice is a copy the second time."""
    if isinstance(shape, tuple):
        return tuple([_once(inner, before) for inner in shape])
    if shape in before:
        return "tensor"
    if isinstance(shape, WrittenOutput):
        before.add(shape)
    return shape


def numbered(shape: Shape, arguments: Sequence[str]) -> tuple[Outputs, tuple[Result, ...]]:
    """Return a structure with the positions of results, and the results: new values of arguments first."""
    shape = _once(shape, set())
    found = list(_leaves(shape))
    new = sorted(
        {each.argument for each in found if isinstance(each, WrittenOutput)}, key=list(arguments).index
    )
    others = [each for each in found if not isinstance(each, WrittenOutput)]
    position = iter(range(len(new), len(found)))

    def positions(shape: Shape) -> Outputs:
        if isinstance(shape, tuple):
            return tuple(map(positions, shape))
        if shape is None:
            return None
        return new.index(shape.argument) if isinstance(shape, WrittenOutput) else next(position)

    outputs = positions(shape)
    top = side_by_side(outputs)  # tensors in a nested tuple have no gradient in torch either
    names = ["result"] if len(others) == 1 else [f"result{at}" for at in range(len(others))]
    values = [Result(f"result_{name}", written=name) for name in new]
    rest = [
        Result(name, differentiable=len(new) + at in top, optional=kind == "optional")
        for at, (name, kind) in enumerate(zip(names, others, strict=True))
    ]
    return outputs, (*values, *rest)
