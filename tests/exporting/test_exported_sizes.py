"""Sizes of results by a call of an exported program: for other sizes, and for no other arguments."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import native_operators as of
import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.exporting.calls import OperatorCall
from opsmith.exporting.result_sizes import sizing_of_call
from opsmith.kernels.cpp.compiler import HEADER, kernel_toolchain
from opsmith.kernels.runtime.library import RECIPE

Sizing = Sequence[int] | None
Compute = Callable[[Sizing, Sequence[Any]], list[list[int]] | None]

SOURCE = """
#include "recipe.h"
extern "C" bool sizes_of(const int64_t* sizing, const opsmith::Value* values, opsmith::Shape* shapes) {
  return opsmith::declared_sizes(sizing, values, shapes) == opsmith::KNOWN;
}
"""


class RawTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("dim", ctypes.c_int64),
    )


class RawList(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_int64))


class Either(ctypes.Union):
    _fields_ = (
        ("tensor", RawTensor),
        ("list", RawList),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("flag", ctypes.c_bool),
    )


class Value(ctypes.Structure):
    _fields_ = (("given", ctypes.c_bool), ("either", Either))


class Shape(ctypes.Structure):
    _fields_ = (("dim", ctypes.c_int64), ("sizes", ctypes.c_int64 * 64))


def raw(tensor: Tensor) -> RawTensor:
    return RawTensor(None, (ctypes.c_int64 * (tensor.dim() + 1))(*tensor.shape), None, tensor.dim())


ITEMS: dict[type, Any] = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double}


def value_of(given: Any, held: list[Any]) -> Value:
    """A value as the runtime has it; what it refers to is held by a list."""
    value = Value(given is not None)
    if isinstance(given, Tensor):
        value.either.tensor = raw(given)
    elif isinstance(given, str):
        held.append(ctypes.create_string_buffer(given.encode()))
        value.either.list = RawList(ctypes.addressof(held[-1]), len(given.encode()))
    elif isinstance(given, list):
        items = [raw(each) if isinstance(each, Tensor) else each for each in given]
        kind = RawTensor if isinstance(given[0], Tensor) else ITEMS[type(given[0])]
        held.append((kind * len(items))(*items))
        value.either.list = RawList(ctypes.addressof(held[-1]), len(items))
    elif given is not None:
        setattr(value.either, {bool: "flag", int: "integer", float: "number"}[type(given)], given)
    return value


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Compute:
    """Computes the sizes of results; None where they are not known."""
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "sizes.cpp").write_text(SOURCE)
    for path in (HEADER, RECIPE):
        (folder / path.name).write_bytes(path.read_bytes())
    undefined = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
    command = ["-std=c++17", "-O1", "-fPIC", "-shared", *undefined, "sizes.cpp", "-o", "sizes.so"]
    kernel_toolchain().build("sizes", command, folder, "a compiler of C++17")
    library = ctypes.CDLL(str(folder / "sizes.so"))
    library.sizes_of.restype = ctypes.c_bool

    def computed(sizing: Sizing, arguments: Sequence[Any]) -> list[list[int]] | None:
        assert sizing is not None
        held: list[Any] = []
        values = (Value * len(arguments))(*(value_of(each, held) for each in arguments))
        shapes = (Shape * 4)()
        if not library.sizes_of((ctypes.c_int64 * len(sizing))(*sizing), values, shapes):
            return None
        return [list(each.sizes[: each.dim]) for each in shapes if each.dim]

    return computed


def sizing_by(operator: Any, arguments: Sequence[Any], dynamic: Any) -> Sizing:
    """The sizing of the only call in the program of an operator."""

    class Model(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            rest = iter(tensors)
            return operator(*(next(rest) if has_tensors(each) else each for each in arguments))

    tensors = tuple(each for each in arguments if has_tensors(each))
    program = torch.export.export(Model(), tensors, dynamic_shapes=(dynamic,))
    (node,) = [each for each in program.graph.nodes if str(each.target).startswith("native.")]
    return sizing_of_call(OperatorCall(operator.specification, node))


def has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))


def described(rows: int = 4, **others: Any) -> list[Any]:
    """Arguments of `described`, of which some are others."""
    given = {
        "xs": [torch.ones(rows, 6), torch.ones(rows, 6)],
        "weights": [0.1, math.nan],
        "steps": [3, -4],
        "flags": [True, False],
        "word": "süm",
        "count": 2,
        "also": True,
        "missing": -0.0,
    }
    return [*(given | others).values()]


@pytest.fixture(scope="module")
def of_described() -> Sizing:
    rows = torch.export.Dim("rows")
    return sizing_by(of.described, described(), ([{0: rows}, {0: rows}],))


def test_other_sizes_of_an_open_axis(in_cpp: Compute, of_described: Sizing) -> None:
    assert in_cpp(of_described, described()) == [[6, 4], [4]]
    assert in_cpp(of_described, described(9)) == [[6, 9], [9]]


def test_floats_are_compared_in_single_precision(in_cpp: Compute, of_described: Sizing) -> None:
    assert in_cpp(of_described, described(weights=[0.1 + 1e-12, math.nan])) == [[6, 4], [4]]
    assert in_cpp(of_described, described(missing=0.0)) == [[6, 4], [4]]


@pytest.mark.parametrize(
    "other",
    [
        {"xs": [torch.ones(4, 6)]},
        {"xs": [torch.ones(4, 6), torch.ones(4, 5)]},
        {"xs": [torch.ones(4, 6), torch.ones(5, 6)]},
        {"xs": [torch.ones(4, 6), torch.ones(4)]},
        {"weights": [0.1, 1.0]},
        {"weights": [0.1001, math.nan]},
        {"weights": [0.1]},
        {"steps": [3, 4]},
        {"steps": [3, -4, 0]},
        {"flags": [True, True]},
        {"word": "sum"},
        {"word": "süm "},
        {"count": 3},
        {"also": False},
        {"missing": 0.5},
        {"missing": None},
    ],
    ids=lambda other: next(iter(other)),
)
def test_sizes_of_other_arguments_are_not_known(
    in_cpp: Compute, of_described: Sizing, other: dict[str, Any]
) -> None:
    assert in_cpp(of_described, described(**other)) is None


@opsmith.operator("native::folded")
def folded(x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
    n, m = x.shape[0], y.shape[0]
    return x.new_zeros(3 * n + m * m, max(n, m) // 2 + 2, n % 3 + 2)


def test_sizes_are_whole_expressions(in_cpp: Compute) -> None:
    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    sizing = sizing_by(folded, [torch.ones(5), torch.ones(7), None], ({0: n}, {0: m}))
    for first, second in ((5, 7), (11, 4), (3, 2)):
        wanted = [3 * first + second**2, max(first, second) // 2 + 2, first % 3 + 2]
        assert in_cpp(sizing, [torch.ones(first), torch.ones(second), None]) == [wanted]
    assert in_cpp(sizing, [torch.ones(5), torch.ones(7), torch.ones(1)]) is None
    assert in_cpp(sizing, [torch.ones(5), torch.ones(7, 1), None]) is None
    assert in_cpp(sizing, [torch.ones(5), None, None]) is None


def test_a_size_that_follows_from_another_is_compared(in_cpp: Compute) -> None:
    half = torch.export.Dim("half")
    sizing = sizing_by(folded, [torch.ones(10), torch.ones(5), None], ({0: 2 * half}, {0: half}))
    assert in_cpp(sizing, [torch.ones(12), torch.ones(6), None]) == [[72, 8, 2]]
    assert in_cpp(sizing, [torch.ones(13), torch.ones(6), None]) is None
