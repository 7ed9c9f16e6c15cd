"""Launch expressions as programs: C++ computes what Python computes, or leaves the call to Python."""

from __future__ import annotations

import ctypes
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import cuda_operators
import kernel_cases
import kernels_matrices
import kernels_reductions
import kernels_reported
import kernels_rows
import pytest
import torch
from fake_driver import OnCpu
from torch import Tensor

import opsmith.ops
from opsmith import errors
from opsmith.core.expression import Expression, ExpressionError, parse
from opsmith.declaration import declared_operators
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.cpp.compiler import HEADER, kernel_toolchain
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.cuda.launch import LAUNCH, LaunchRule
from opsmith.kernels.cuda.plan import without_data
from opsmith.kernels.cuda.recipe import CallKind
from opsmith.kernels.runtime.library import RECIPE
from opsmith.kernels.runtime.recipe import CODES, MOST_OPERANDS, NotEncodedError
from opsmith.torch_library.result_layouts import result_layouts

SOURCE = """
#include <vector>
#include "recipe.h"
extern "C" void computed(const int64_t* program, const int64_t* sizes, int64_t count, int64_t* found) {
  std::vector<opsmith::Fraction> places;
  for (int64_t at = 0; at < count; at++) places.push_back({sizes[at], 1});
  const opsmith::Fraction value = opsmith::evaluated(program, places.data());
  found[0] = value.over, found[1] = value.under;
}
"""
Compute = Callable[..., Fraction | None]


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Compute:
    """Computes an expression by its program, made for a call of the same kind; None where it is undefined."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "computed.cpp").write_text(SOURCE)
    for path in (HEADER, RECIPE):
        (folder / path.name).write_bytes(path.read_bytes())
    undefined = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
    command = ["-std=c++17", "-O1", "-fPIC", "-shared", *undefined, "computed.cpp", "-o", "computed.so"]
    kernel_toolchain().build("programs", command, folder, "a compiler of C++17")
    function = ctypes.CDLL(str(folder / "computed.so")).computed

    def computed(text: str, named: dict[str, Any], known: dict[str, Any] | None = None) -> Fraction | None:
        rule = LaunchRule("grid", (parse(text, LAUNCH),), (), "programs::it")
        (program,) = CallKind(known or named).programs(rule)
        sizes = [size for each in named.values() if isinstance(each, Tensor) for size in each.shape]
        found = (ctypes.c_int64 * 2)()
        function(
            (ctypes.c_int64 * (len(program) + 1))(len(program), *program),
            (ctypes.c_int64 * (len(sizes) + 1))(*sizes),
            ctypes.c_int64(len(sizes)),
            found,
        )
        return Fraction(found[0], found[1]) if found[1] else None

    return computed


def in_python(text: str, named: dict[str, Any]) -> Any:
    """Computes an expression; None where it has no value."""
    try:
        return parse(text, LAUNCH).value(named)
    except ExpressionError:
        return None


EXAMPLES = Path(__file__).parents[3] / "examples"
BUNDLED = Path(opsmith.ops.__file__).parent
CORPORA = (kernel_cases, cuda_operators, kernels_matrices, kernels_reductions, kernels_reported, kernels_rows)


def declared() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each launch expression of a kernel, with values of calls."""
    corpora = {Path(str(each.__file__)) for each in CORPORA}
    for operator in list(declared_operators()):
        specification = operator.specification
        file = Path(specification.where.rpartition(":")[0])
        if not (file in corpora or file.is_relative_to(BUNDLED) or file.is_relative_to(EXAMPLES)):
            continue  # of another test of this process
        for kernel in cuda_kernels(specification):
            rules = [
                rule
                for launch in kernel.rules.launches
                for rule in (launch.grid, launch.block, launch.shared, *launch.constants.values())
            ]
            texts = [part.text for rule in rules for part in rule.parts if isinstance(part, Expression)]
            for values in list(sample_values(operator, torch.float32))[:3] if texts else ():
                schema = specification.schema
                named = dict(zip(schema.names, without_data(schema, values), strict=True))
                made = result_layouts(specification, values)
                named |= {
                    result.name: layout.allocate("meta")
                    for result, layout in zip(schema.results, made, strict=True)
                }
                scratch = {each.name: each.layout(named).allocate("meta") for each in kernel.rules.scratch}
                yield from ((text, named | scratch) for text in texts)


def test_launch_expressions_of_kernels_are_computed_as_python_computes_them(
    in_cpp: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("softmax_cuda", "matmul_cuda", "histogram_cuda", "involution_cuda"):
        importlib.import_module(name)
    texts = set()
    for text, named in declared():
        found = in_cpp(text, named)
        assert found is not None, text
        assert found == in_python(text, named), text
        texts.add(text)
    assert len(texts) >= 24


def expression(depth: int, chance: random.Random) -> str:
    """A random expression."""
    if depth == 0 or chance.random() < 0.15:
        numbers = [str(chance.randint(0, 300)), str(chance.choice([2**31, 2**62, 2**63 - 1]))]
        return chance.choice(
            [
                *("n", "m", "x.numel", "x.shape[0]", "x.shape[-1]", "y.numel", "y.shape[m % 3]"),
                *("x.dim", "x.itemsize", "len(x.shape)", *numbers),
            ]
        )

    def part() -> str:
        return expression(depth - 1, chance)

    operation = chance.choice(["+", "-", "*", "/", "//", "%"])
    comparison = chance.choice(["<", "<=", ">", ">=", "==", "!="])
    function = chance.choice(["ceil", "floor"])
    several = chance.choice(["min", "max"])
    return chance.choice(
        [
            f"({part()} {operation} {part()})",
            f"{function}({part()})",
            f"{several}({part()}, {part()}, {part()})",
            f"({part()} if {part()} {comparison} {part()} else {part()})",
            f"(-{part()})",
            f"(not {part()})",
        ]
    )


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_expressions_are_computed_as_python_computes_them_or_not_at_all(
    in_cpp: Compute, count: int
) -> None:
    chance = random.Random(5)
    agreed = beyond = 0
    for _ in range(count):
        text = expression(chance.randint(1, 4), chance)
        numbers = {"n": chance.randint(-5, 4000), "m": chance.randint(0, 3)}
        known, named = (
            {
                "x": torch.empty(
                    chance.randint(0, 50), chance.randint(1, 700), device="meta", dtype=torch.float16
                ),
                "y": torch.empty(chance.randint(1, 9), 2, 3, device="meta"),
                **numbers,
            }
            for _ in range(2)
        )
        try:
            found = in_cpp(text, named, known)
        except NotEncodedError:
            beyond += 1
            continue
        right = in_python(text, named)
        if found is None:
            beyond += right is not None
        else:
            agreed += 1
            assert found == right, text
    assert agreed > 0.7 * count
    assert beyond < 0.2 * count


LEFT = (
    *("x.shape", "(n, m)", "rate * n", "min(x.shape)", "x.shape[5]", f"n + {2**64}", "sizes", "len(x)"),
    *("(None if x.shape[0] > 2 else n) is None", "3 if n else (not x) is None"),
)
"""Expressions without a program; some have no value either."""


@pytest.mark.parametrize("text", LEFT)
def test_python_computes_what_no_program_says(text: str, in_cpp: Compute) -> None:
    x = torch.empty(2, 3, device="meta")
    with pytest.raises(NotEncodedError):
        in_cpp(text, {"x": x, "n": 2, "m": 3, "rate": 0.5, "sizes": [2, 3]})


def most_held(program: Sequence[int]) -> int:
    """Largest number of operands that a program holds at once."""
    most = held = 0
    codes = iter(program)
    for name in map(CODES.__getitem__, codes):
        if name in ("CONSTANT", "PLACE"):
            next(codes)
            held += 1
        elif name not in ("NEGATE", "CEIL", "FLOOR", "NOT"):
            held -= 2 if name == "SELECT" else 1
        most = max(most, held)
    return most


@pytest.mark.parametrize("innermost", ["x.numel", "x.shape[0]", "1"])
def test_no_program_holds_more_operands_than_there_is_room_for(innermost: str) -> None:
    kind = CallKind({"x": torch.empty(2, 3, 4, device="meta"), "n": 2})
    held = []
    text = innermost
    with pytest.raises(NotEncodedError, match="too deep"):  # noqa: PT012  # the last one of many
        while True:
            text = f"(x.dim * x.shape[0] + {text})"
            (program,) = kind.programs(LaunchRule("grid", (parse(text, LAUNCH),), (), "programs::it"))
            held.append(most_held(program))
    assert MOST_OPERANDS - 2 <= max(held) <= MOST_OPERANDS


def test_parts_that_are_the_same_in_all_calls_of_a_kind_are_constants(in_cpp: Compute) -> None:
    x = torch.empty(2, 3, device="meta")
    named = {"x": x, "weight": None, "sizes": [5, 7], "flag": True, "several": [x, x]}
    for text in (
        "sizes[1] * x.shape[0]",
        "len(several) + len(sizes) + len(x.shape)",
        "x.numel if weight is None else 1",
        "3 if flag else x.numel",
        "x.shape[-sizes[0] + 4]",
    ):
        assert in_cpp(text, named) == in_python(text, named), text


LIMITED = {
    "a grid without blocks": ({"grid": "x.shape[0] - 6"}, 6),
    "a negative grid": ({"grid": "x.shape[0] - 7"}, 6),
    "a grid that is no whole number": ({"grid": "x.shape[0] / 4"}, 6),
    "a division by zero": ({"grid": "8 // (x.shape[0] - 6)"}, 6),
    "a grid beyond a GPU's": ({"grid": (1, 1, "(x.shape[0] - 8) * 32768 + 1")}, 10),
    "too many threads": ({"grid": 1, "block": "x.shape[0] * 100"}, 12),
    "too much shared memory": ({"grid": 1, "shared": "x.shape[0] * 10000 - 79000"}, 40),
    "a negative scratch buffer": ({"grid": 1, "scratch": {"s": ("x.shape[0] - 7", torch.float32)}}, 6),
    "beyond 64 bits": ({"grid": f"(x.shape[0] - 8) * {2**62} * 4 + 1"}, 9),
}
"""Launches that 8 rows are right for; a number of rows for which it is refused."""


@pytest.mark.parametrize("case", LIMITED)
def test_python_refuses_a_launch_in_its_own_words(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, rows = LIMITED[case]
    scratch = ", View<float, 1> s" if "scratch" in options else ""

    @opsmith.operator("launch_programs::limited", shapes="x: N M -> N M")
    def limited(x: Tensor) -> Tensor:
        return x * 2

    limited.kernel(
        "cuda",
        cuda=f"__global__ void limited(View<const float, 2> x, View<float, 2> y{scratch}) {{}}",
        **options,
    )
    (kernel,) = cuda_kernels(limited.specification)
    monkeypatch.setattr(kernel, "machine", OnCpu())
    with pytest.raises(errors.LaunchError) as caught:
        kernel.direct(torch.randn(rows, 2))
    expected = str(caught.value)
    kernel.direct(torch.randn(8, 2))
    kernel.direct(torch.randn(8, 3))
    assert kernel.cached_plans == 1
    with pytest.raises(errors.LaunchError) as caught:
        kernel.direct(torch.randn(rows, 2))
    assert str(caught.value) == expected


def test_another_number_of_the_template_is_another_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    @opsmith.operator("launch_programs::wide", shapes="x: N M -> N M")
    def wide(x: Tensor) -> Tensor:
        return x * 2

    wide.kernel(
        "cuda",
        cuda="template <int W> __global__ void wide(View<const float, 2> x, View<float, 2> y) {}",
        grid="x.shape[0]",
        constants={"W": "4 if x.shape[1] % 4 == 0 else 1"},
    )
    (kernel,) = cuda_kernels(wide.specification)
    monkeypatch.setattr(kernel, "machine", OnCpu())
    for columns, plans in ((4, 1), (8, 1), (12, 1), (5, 2), (16, 2)):
        kernel.direct(torch.randn(3, columns))
        assert kernel.cached_plans == plans, columns
    assert len(kernel.functions.loaded) == 2
