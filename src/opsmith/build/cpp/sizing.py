"""What `shapes=` says, in C++: the sizes of the results without Python."""

from __future__ import annotations

import ast

from opsmith.core.schema import Schema
from opsmith.core.shapes import ANY, Dims, Shapes

NAME = "opsmith_shapes"
"""The function in C++ that tells them."""

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


def shapes_in_cpp(shapes: Shapes | None, schema: Schema) -> str:
    """A function in C++ that tells the sizes of the results; nothing where they are not all said.

    It tells none for tensors that do not have the shapes, which are refused in Python.

    Example:
        >>> from torch import Tensor
        >>> from opsmith.core.schema import schema_of
        >>> from opsmith.core.shapes import read_shapes
        >>> def linear(x: Tensor, weight: Tensor) -> Tensor:
        ...     return x @ weight.mT
        >>> schema = schema_of(linear, "demo::linear")
        >>> shapes = read_shapes("x: B M, weight: N M -> B N", schema, "demo::linear", "demo.py:1")
        >>> [line.strip() for line in shapes_in_cpp(shapes, schema).splitlines() if "push" in line]
        ['r[0].push(s_B.size);', 'r[0].push(s_N.size);']
    """
    if shapes is None or len(shapes.results) < len(schema.results):
        return ""
    named = {each.name: each for each in schema.arguments}
    if any(named[name].kind.sequence for name in shapes.arguments):
        return ""
    if any(ANY in dims.sizes for dims in shapes.results):
        return ""
    letters = sorted(
        {letter for dims in (*shapes.arguments.values(), *shapes.results) for letter in dims.letters}
    )
    places = {name: place for place, name in enumerate(schema.names)}
    lines = [f"static opsmith::Told {NAME}(const opsmith::Value* v, opsmith::Shape* r, char*, size_t) {{"]
    lines += [f"  opsmith::Letter {_letter(letter)};" for letter in letters]
    lines.append("  bool bad = false; int64_t lead_dim = -1; const int64_t* lead = nullptr;")
    lines.append("  (void)bad; (void)lead_dim; (void)lead;")
    for name in sorted(shapes.integers):
        place = places[name]
        lines.append(f"  if (v[{place}].given) {_letter(name)}.takes(v[{place}].integer);")
    for name, dims in shapes.arguments.items():
        lines += _bound(dims, places[name])
    for name, dims in shapes.arguments.items():
        lines += _held(dims, places[name])
    for number, dims in enumerate(shapes.results):
        lines += _told(dims, number)
    return "\n".join([*lines, "  return opsmith::TOLD;", "}"])


def _letter(name: str) -> str:
    return f"s_{name}"


def _bound(dims: Dims, place: int) -> list[str]:
    """Letters get their sizes from a tensor, or it is seen not to fit."""
    count = len(dims.sizes)
    lines = [
        f"  if (v[{place}].given) {{",
        f"    const opsmith::RawTensor& t = v[{place}].tensor;",
        f"    if (t.dim {'<' if dims.leading else '!='} {count}) return opsmith::UNTOLD;",
    ]
    if dims.leading:
        lines += [
            f"    if (lead_dim < 0) {{ lead_dim = t.dim - {count}; lead = t.sizes; }}",
            f"    if (lead_dim != t.dim - {count}) return opsmith::UNTOLD;",
            "    for (int64_t at = 0; at < lead_dim; at++)",
            "      if (lead[at] != t.sizes[at]) return opsmith::UNTOLD;",
        ]
    for number, size in enumerate(dims.sizes):
        if size.isidentifier() and size != ANY:
            found = f"t.sizes[t.dim - {count - number}]"
            lines.append(f"    if (!{_letter(size)}.takes({found})) return opsmith::UNTOLD;")
    return [*lines, "  }"]


def _held(dims: Dims, place: int) -> list[str]:
    """Sizes that are numbers or expressions are held to what they come to, where their letters are known."""
    lines = []
    for number, size in enumerate(dims.sizes):
        if not size.isidentifier():
            found = f"v[{place}].tensor.sizes[v[{place}].tensor.dim - {len(dims.sizes) - number}]"
            known = " && ".join([f"v[{place}].given", *_known(size)])
            lines.append(f"  if ({known} && ({_value(size)} != {found} || bad)) return opsmith::UNTOLD;")
    return lines


def _told(dims: Dims, number: int) -> list[str]:
    lines = []
    if dims.leading:
        lines.append(f"  for (int64_t at = 0; at < lead_dim; at++) r[{number}].push(lead[at]);")
    for size in dims.sizes:
        missing = " || ".join(f"!{each}" for each in _known(size))
        if missing:
            lines.append(f"  if ({missing}) return opsmith::UNTOLD;")
        lines.append(f"  r[{number}].push({_value(size)});")
    lines.append("  if (bad) return opsmith::UNTOLD;")
    return lines


def _known(size: str) -> list[str]:
    tree = ast.parse(size, mode="eval")
    return [f"{_letter(node.id)}.known" for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _value(size: str) -> str:
    """An expression of letters and whole numbers, in C++."""

    def written(node: ast.expr) -> str:
        if isinstance(node, ast.BinOp):
            left, right = written(node.left), written(node.right)
            if isinstance(node.op, ast.FloorDiv):
                return f"opsmith::floor_divided({left}, {right}, bad)"
            return f"({left} {_OPERATORS[type(node.op)]} {right})"
        if isinstance(node, ast.Name):
            return f"{_letter(node.id)}.size"
        assert isinstance(node, ast.Constant)
        return f"int64_t({node.value!r})"

    return written(ast.parse(size, mode="eval").body)
