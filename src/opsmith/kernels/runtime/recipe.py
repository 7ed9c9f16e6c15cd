"""Recipe for a kind of call, with which the runtime plans calls of other sizes, without Python."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.core.expression import parse
from opsmith.core.schema import Schema
from opsmith.core.shapes import ANY, Dims, Shapes
from opsmith.core.specification import Specification
from opsmith.kernels.runtime.plan import counted, counted_all, strides_in
from opsmith.torch_library.result_layouts import ResultLayout

CODES = (
    *("CONSTANT", "PLACE", "ADD", "SUBTRACT", "MULTIPLY", "DIVIDE", "QUOTIENT", "REMAINDER", "NEGATE"),
    *("CEIL", "FLOOR", "LEAST", "LARGEST", "LESS", "LESS_OR_EQUAL", "EQUAL", "NOT", "SELECT"),
    *(
        "VALUE",
        "TRUTH",
        "GIVEN",
        "DIMENSIONS",
        "ELEMENTS",
        "ITEMSIZE",
        "LENGTH",
        "SINGLE",
        "SIZE",
        "ITEM",
        "TRUTH_ITEM",
        "SINGLE_ITEM",
        "BYTE_ITEM",
    ),
)
"""Codes of programs, in the order of `enum Code` in recipe.h."""
_CODE = {name: number for number, name in enumerate(CODES)}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "ADD",
    ast.Sub: "SUBTRACT",
    ast.Mult: "MULTIPLY",
    ast.Div: "DIVIDE",
    ast.FloorDiv: "QUOTIENT",
    ast.Mod: "REMAINDER",
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.Lt: ("LESS", False),
    ast.LtE: ("LESS_OR_EQUAL", False),
    ast.Gt: ("LESS", True),
    ast.GtE: ("LESS_OR_EQUAL", True),
    ast.Eq: ("EQUAL", False),
    ast.NotEq: ("EQUAL", False),
}
"""Code of a comparison, and True if its operands are swapped."""
MOST_OPERANDS, MOST_LETTERS = 32, 64
"""Limits in recipe.h."""

Program = tuple[int, ...]
"""Codes and numbers in the format of `evaluated` in recipe.h, without their count."""
Leaf = tuple[Program, tuple[ast.expr, ...]]
"""Codes that read a value, and the programs of their operands, which are computed first."""


class NotEncodedError(Exception):
    """A part of a rule that only Python can compute; the message names the construct.

    Attributes:
        rule: Name of the rule in its language, with quotes; empty if it is unknown.
    """

    rule = ""


@dataclass(frozen=True, slots=True)
class SizedLaunch:
    """Parts of a launch that depend on sizes.

    Attributes:
        constants: Numbers of the kernel's template, each with its program. A call with different numbers
            needs a different instance.
        grid: Number of blocks, in three dimensions.
        block: Number of threads of a block, in three dimensions.
        shared: Bytes of dynamic shared memory.
        most_threads: Maximum threads per block.
        most_shared: Maximum bytes of dynamic shared memory.
    """

    constants: tuple[tuple[int, Program], ...]
    grid: tuple[Program, Program, Program]
    block: tuple[Program, Program, Program]
    shared: Program
    most_threads: int
    most_shared: int

    def encode(self) -> list[int]:
        """Return the parts as numbers."""
        numbers = counted_all([number, *encode_program(each)] for number, each in self.constants)
        for each in (*self.grid, *self.block, self.shared):
            numbers += encode_program(each)
        return [*numbers, self.most_threads, self.most_shared]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe for calls of one kind: with the same dtypes, numbers of dimensions, whole numbers, flags, None.

    It belongs to the plan of one such call, which contains all parts that do not depend on sizes.

    Attributes:
        ones: For each tensor of the arguments, then for each result, a bit for each dimension whose size is
            always 1.
        sizing: Sizes of the results: see `sizing_of`.
        scratch: Programs for the sizes of each scratch buffer: see `ValueLeaves`.
        launches: The launches of the plan.
    """

    ones: tuple[int, ...]
    sizing: tuple[int, ...]
    scratch: tuple[tuple[Program, ...], ...] = ()
    launches: tuple[SizedLaunch, ...] = ()

    def encode(self) -> list[int]:
        """Return the recipe as the numbers that `Recipe::read` in planning.h expects."""
        programs = encode_programs(self.scratch, self.launches)
        return [*counted(self.ones), *counted(self.sizing), *programs]


def encode_programs(scratch: Sequence[Sequence[Program]], launches: Sequence[SizedLaunch]) -> list[int]:
    """Return programs as the numbers that `LaunchPrograms::read` in planning.h expects.

    Args:
        scratch: See `Recipe`.
        launches: The launches.
    """
    sizes = counted_all(counted_all(map(encode_program, each)) for each in scratch)
    return sizes + counted_all(each.encode() for each in launches)


def encode_program(codes: Program) -> list[int]:
    """Return the length and the codes of a program, the list that `evaluated` in recipe.h takes."""
    return counted(counted(codes))


def contiguous_recipe(
    specification: Specification, values: Sequence[Any], results: Sequence[ResultLayout]
) -> Recipe | None:
    """Return the recipe for calls of the same kind as a call whose tensors and results are all contiguous.

    Args:
        specification: The operator.
        values: Argument values of the call.
        results: Layouts of the reference's results.

    Returns:
        The recipe. None if `shapes=` does not determine the sizes of the results, or if the call does not
        show that the reference returns contiguous results: strides at sizes of 0 or 1 are arbitrary.
    """
    shapes = specification.shapes
    sizing = sizing_of(shapes, specification.schema)
    if shapes is None or sizing is None:
        return None
    ones = []
    for name, value in zip(specification.schema.names, values, strict=True):
        for tensor in tensors_in([value]):
            known = _ones(shapes.arguments.get(name), tensor.dim())
            if not _is_shown(tensor, tensor.stride(), known):
                return None
            ones.append(sum(1 << dim for dim in known))
    for dims, result in zip(shapes.results, results, strict=True):
        known = _ones(dims, len(result.shape))
        if not _is_shown(result, result.stride, known):
            return None
        ones.append(sum(1 << dim for dim in known))
    return Recipe(tuple(ones), sizing)


def _ones(dims: Dims | None, count: int) -> set[int]:
    """Return the dimensions of a tensor of `count` dimensions that are declared as 1."""
    sizes = () if dims is None else dims.sizes
    return {count - len(sizes) + at for at, size in enumerate(sizes) if size == "1"}


def _is_shown(tensor: Tensor | ResultLayout, stride: Sequence[int], ones: set[int]) -> bool:
    """Return True if a tensor is contiguous, and no size is 0, or 1 without being declared as 1."""
    plain = all(size > 1 or dim in ones for dim, size in enumerate(tensor.shape))
    return plain and tuple(stride) == strides_in(tensor.shape, "contiguous")


def sizing_of(shapes: Shapes | None, schema: Schema) -> tuple[int, ...] | None:
    """Return numbers with which C++ computes the sizes of results; None if `shapes=` does not determine all.

    `declared_sizes` in recipe.h reads them. They are, in this order: the number of letters; for each whole
    number that is a size, its letter and its argument; for each tensor with a declared shape, its argument,
    its index in a list or -1, and its dimensions; for each condition, a program (here there are none); and
    for each result, its dimensions. Dimensions are: 1 if leading dimensions are allowed, else 0; the number
    of the other dimensions; and a program for each of them, empty for any size.

    Example:
        >>> from opsmith.core.schema import schema_of
        >>> from opsmith.core.shapes import read_shapes
        >>> def doubled(x: Tensor) -> Tensor:
        ...     return torch.cat((x, x), -1)
        >>> schema = schema_of(doubled, "demo::doubled")
        >>> sizing_of(read_shapes("x: ... N -> ... 2*N", schema), schema)
        (1, 0, 1, 0, -1, 1, 1, 2, 1, 0, 0, 1, 1, 1, 5, 0, 2, 1, 0, 4)
    """
    if shapes is None or len(shapes.results) < len(schema.results):
        return None
    sequences = {each.name for each in schema.arguments if each.kind.sequence}
    if sequences & shapes.arguments.keys() or any(ANY in dims.sizes for dims in shapes.results):
        return None
    every = (*shapes.arguments.values(), *shapes.results)
    letters = sorted({letter for dims in every for letter in dims.letters})
    if len(letters) > MOST_LETTERS:
        return None
    place = {name: at for at, name in enumerate(letters)}
    index = {name: at for at, name in enumerate(schema.names)}
    numbers = [len(letters), len(shapes.integers)]
    for name in sorted(shapes.integers):
        numbers += [place[name], index[name]]
    try:
        numbers.append(len(shapes.arguments))
        for name, dims in shapes.arguments.items():
            numbers += [index[name], -1, *_dims(dims, place)]
        numbers += [0, len(shapes.results)]
        for dims in shapes.results:
            numbers += _dims(dims, place)
    except NotEncodedError:
        return None
    return tuple(numbers)


def _dims(dims: Dims, place: dict[str, int]) -> list[int]:
    def leaf(node: ast.expr) -> Leaf | None:
        return ((_CODE["PLACE"], place[node.id]), ()) if isinstance(node, ast.Name) else None

    numbers = [int(dims.leading), len(dims.sizes)]
    for each in dims.sizes:
        codes = () if each == ANY else program(parse(each).tree, leaf)
        numbers += [len(codes), *codes]
    return numbers


def program(node: ast.expr, leaf: Callable[[ast.expr], Leaf | None]) -> Program:
    """Return the program of an expression.

    Args:
        node: Tree of the expression.
        leaf: Function that returns the code for a part that depends on the call; None for other parts.

    Raises:
        NotEncodedError: If no program can compute it.

    Example:
        >>> program(parse("7 // 2").tree, lambda node: None)
        (0, 7, 0, 2, 6)
    """
    codes, operands = _encoded(node, leaf)
    if operands > MOST_OPERANDS:
        raise NotEncodedError(f"has `{ast.unparse(node)}`, which is too deep")
    return codes


def constant(number: int) -> Program:
    """Return the program of a whole number.

    Raises:
        NotEncodedError: If it exceeds 64 bits.
    """
    if not -(2**63) <= number < 2**63:
        raise NotEncodedError("has a number of more than 64 bits")
    return _CODE["CONSTANT"], int(number)


def _encoded(node: ast.expr, leaf: Callable[[ast.expr], Leaf | None]) -> tuple[Program, int]:
    """Return the program of an expression, and the maximum number of its operands on the stack."""

    def after(last: Program, operands: Sequence[ast.expr]) -> tuple[Program, int]:
        parts = [_encoded(each, leaf) for each in operands]
        codes = tuple(code for part, _ in parts for code in part)
        return (*codes, *last), max([1, *(at + most for at, (_, most) in enumerate(parts))])

    def joined(name: str, *operands: ast.expr) -> tuple[Program, int]:
        return after((_CODE[name],), operands)

    found = leaf(node)
    if found is not None:
        return after(*found)
    match node:
        case ast.Constant(value=int(value)):
            return constant(value), 1
        case ast.BinOp(left=left, op=op, right=right):
            return joined(_ARITHMETIC[type(op)], left, right)
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            return joined("NOT" if isinstance(op, ast.Not) else "NEGATE", operand)
        case ast.Call(func=ast.Name(id="ceil" | "floor" as name), args=[argument]):
            return joined(name.upper(), argument)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as arguments):
            return _folded(
                "LEAST" if name == "min" else "LARGEST", [_encoded(each, leaf) for each in arguments]
            )
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            code, turned = _COMPARISONS[type(op)]
            codes, most = joined(code, *((right, left) if turned else (left, right)))
            return ((*codes, _CODE["NOT"]) if isinstance(op, ast.NotEq) else codes), most
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return joined("SELECT", test, body, orelse)
    raise NotEncodedError(
        f"has `{ast.unparse(node)}`, which C++ does not compute: it takes arguments that are whole numbers, "
        "flags or None, and sizes of tensors and lists"
    )


def _folded(name: str, parts: Sequence[tuple[Program, int]]) -> tuple[Program, int]:
    """Return the program that applies a binary operation to several values, from the first to the last."""
    (codes, most), *others = parts
    for part, operands in others:
        codes, most = (*codes, *part, _CODE[name]), max(most, 1 + operands)
    return codes, most


class ValueLeaves:
    """Parts of expressions that programs read from the values of a call.

    Args:
        types: Type of each value by its name (see `PARAMETER_TYPES`): first the arguments, then the results
            and the scratch buffers.

    Example:
        >>> program(parse("2 * n").tree, ValueLeaves({"x": "Tensor", "n": "int"}))
        (0, 2, 18, 1, 4)
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self._at = {name: at for at, name in enumerate(types)}

    def __call__(self, node: ast.expr) -> Leaf | None:
        """Return the code that reads a part; None if there is no such code."""
        match node:
            case ast.Name(id=name):
                return self._read({"int": "VALUE", "bool": "TRUTH"}, name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                codes = {"numel": "ELEMENTS", "dim": "DIMENSIONS", "itemsize": "ITEMSIZE"}
                return self._read({"Tensor": codes.get(attribute, "")}, name)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(value=ast.Name(id=name))]):
                return self._read({"Tensor": "DIMENSIONS"}, name)
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]) if name in self._types:
                if self._types[name].endswith("[]"):
                    return self._read({self._types[name]: "LENGTH"}, name)
                return self._read({"Tensor": "SIZE"}, name, ast.Constant(0))
            case ast.Compare(
                left=ast.Name(id=name),
                ops=[ast.Is() | ast.IsNot() as op],
                comparators=[ast.Constant(value=None)],
            ):
                given = _CODE["GIVEN"], self._at[name]
                return ((*given, _CODE["NOT"]) if isinstance(op, ast.Is) else given), ()
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name)), slice=index):
                return self._read({"Tensor": "SIZE"}, name, index)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return self._read({"int[]": "ITEM", "bool[]": "TRUTH_ITEM"}, name, index)
        return None

    def _read(self, codes: Mapping[str, str], name: str, *operands: ast.expr) -> Leaf | None:
        code = codes.get(self._types.get(name, ""))
        return ((_CODE[code], self._at[name]), operands) if code else None
