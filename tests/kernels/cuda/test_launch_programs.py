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
from fake_driver import OnCpu, forget
from torch import Tensor

import opsmith.ops
from opsmith import errors
from opsmith.core.expression import Expression, ExpressionError, parse
from opsmith.declaration import declared_operators
from opsmith.kernels.common.parameters import PARAMETER_TYPES
from opsmith.kernels.common.sample_values import sample_values
from opsmith.kernels.cpp.compiler import HEADER, kernel_toolchain
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.cuda.launch import LAUNCH, LaunchRule
from opsmith.kernels.cuda.plan import without_data
from opsmith.kernels.cuda.recipe import RulePrograms
from opsmith.kernels.runtime.library import RECIPE
from opsmith.kernels.runtime.recipe import CODES, MOST_OPERANDS, NotEncodedError
from opsmith.torch_library.result_layouts import result_layouts

SOURCE = """
#include <memory>
#include <vector>
#include "recipe.h"
using namespace opsmith;
namespace {
struct Given {
  std::vector<Value> values;
  std::vector<int64_t> item_sizes;
  std::vector<std::unique_ptr<std::vector<int64_t>>> sizes;
  std::vector<std::unique_ptr<bool[]>> flags;
};
}
extern "C" {
void* given() { return new Given; }
void give(void* held, int32_t type, bool given, const int64_t* numbers, int64_t count, int64_t item_size) {
  Given& to = *static_cast<Given*>(held);
  Value value;
  value.given = given;
  to.sizes.emplace_back(new std::vector<int64_t>(numbers, numbers + count));
  if (type == TENSOR) value.tensor = {nullptr, to.sizes.back()->data(), nullptr, count};
  else if (type == INTEGER) value.integer = *numbers;
  else if (type == FLAG) value.flag = *numbers != 0;
  else value.list = {to.sizes.back()->data(), count};
  if (type == FLAGS) {
    to.flags.emplace_back(new bool[size_t(count)]);
    std::copy(numbers, numbers + count, to.flags.back().get());
    value.list.data = to.flags.back().get();
  }
  to.values.push_back(value);
  to.item_sizes.push_back(item_size);
}
void computed(const int64_t* program, void* held, int64_t* found) {
  Given& given = *static_cast<Given*>(held);
  const Fraction value = evaluated(program, {nullptr, given.values.data(), given.item_sizes.data()});
  found[0] = value.over, found[1] = value.under;
  delete &given;
}
}
"""
Compute = Callable[..., Fraction | None]


def type_of(value: Any) -> str:
    """The type of a value's argument, one of `PARAMETER_TYPES`; None is an optional number."""
    if isinstance(value, list):
        return f"{type_of(value[0])}[]"
    return "Tensor" if isinstance(value, Tensor) else "int" if value is None else type(value).__name__


@pytest.fixture(autouse=True)
def launches_are_written_down_alone() -> None:
    """The driver runs nothing, whatever another module has left."""
    forget()


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
    library = ctypes.CDLL(str(folder / "computed.so"))
    library.given.restype = ctypes.c_void_p

    def numbers(listed: Sequence[Any]) -> Any:
        return (ctypes.c_int64 * (len(listed) + 1))(*listed)

    def computed(text: str, named: dict[str, Any]) -> Fraction | None:
        types = {name: type_of(value) for name, value in named.items()}
        rule = LaunchRule("grid", (parse(text, LAUNCH),), (), "programs::it")
        (program,) = RulePrograms(types).programs(rule)
        held = ctypes.c_void_p(library.given())
        for value in named.values():
            tensor, number = isinstance(value, Tensor), PARAMETER_TYPES.index(type_of(value))
            listed = value.shape if tensor else value if isinstance(value, list) else [value or 0]
            whole = [each if isinstance(each, int) else 0 for each in listed]
            size = value.element_size() if tensor else 0
            count = ctypes.c_int64(len(whole))
            library.give(held, number, value is not None, numbers(whole), count, ctypes.c_int64(size))
        found = numbers([0])
        library.computed(numbers([len(program), *program]), held, found)
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


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_expressions_are_computed_as_python_computes_them_or_not_at_all(
    in_cpp: Compute, count: int
) -> None:
    chance = random.Random(5)
    agreed = beyond = 0
    for _ in range(count):
        text = expression(chance.randint(1, 4), chance)
        x = torch.empty(chance.randint(0, 50), chance.randint(1, 700), device="meta", dtype=torch.float16)
        y = torch.empty(chance.randint(1, 9), 2, 3, device="meta")
        named = {"x": x, "y": y, "n": chance.randint(-5, 4000), "m": chance.randint(0, 3)}
        try:
            found = in_cpp(text, named)
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
    *("x.shape", "(n, m)", "rate * n", "min(x.shape)", "weights[0]", f"n + {2**64}", "sizes", "max(sizes)"),
    *("(None if x.shape[0] > 2 else n) is None", "3 if n else (not x) is None"),
)
"""Expressions without a program; some have no value either."""


@pytest.mark.parametrize("text", LEFT)
def test_python_computes_what_no_program_says(text: str, in_cpp: Compute) -> None:
    x = torch.empty(2, 3, device="meta")
    with pytest.raises(NotEncodedError):
        in_cpp(text, {"x": x, "n": 2, "m": 3, "rate": 0.5, "sizes": [2, 3], "weights": [0.5]})


def most_held(program: Sequence[int]) -> int:
    """Largest number of operands that a program holds at once."""
    most = held = 0
    codes = iter(program)
    for name in map(CODES.__getitem__, codes):
        if name in (*LEAVES, *ITEMS):
            next(codes)
        if name in LEAVES:
            held += 1
        elif name not in ("NEGATE", "CEIL", "FLOOR", "NOT", *ITEMS):
            held -= 2 if name == "SELECT" else 1
        most = max(most, held)
    return most


LEAVES = ("CONSTANT", "PLACE", "VALUE", "TRUTH", "GIVEN", "DIMENSIONS", "ELEMENTS", "ITEMSIZE", "LENGTH")
ITEMS = ("SIZE", "ITEM", "TRUTH_ITEM")
"""Codes with a number behind them; the latter ones take an index, too."""


@pytest.mark.parametrize("innermost", ["x.numel", "x.shape[0]", "1"])
def test_no_program_holds_more_operands_than_there_is_room_for(innermost: str) -> None:
    rules = RulePrograms({"x": "Tensor", "n": "int"})
    held = []
    text = innermost
    with pytest.raises(NotEncodedError, match="too deep"):  # noqa: PT012  # the last one of many
        while True:
            text = f"(x.dim * x.shape[0] + {text})"
            (program,) = rules.programs(LaunchRule("grid", (parse(text, LAUNCH),), (), "programs::it"))
            held.append(most_held(program))
    assert MOST_OPERANDS - 2 <= max(held) <= MOST_OPERANDS


READ = (
    "sizes[1] * x.shape[0]",
    "sizes[n]",
    "sizes[5]",
    "len(several) + len(sizes) + len(x.shape)",
    "len(x)",
    "len(flags)",
    "flags[-1] + flags[0]",
    "x.numel if weight is None else 1",
    "x.numel if weight is not None else 1",
    "x is None",
    "3 if flag else x.numel",
    "x.shape[-sizes[0] + 4]",
    "x.shape[5]",
    "x.shape[n / 4]",
    "weight",
    "not weight",
    "weight + 1",
    "weight == 0",
    "weight != 0",
    "weight == weight",
    "1 / 0 == weight",
    "weight < 1",
    "-weight",
    "5 if weight else 6",
    "n if 1 / 0 else 2",
    "flag + 1",
    "not flag",
)


@pytest.mark.parametrize("text", READ)
def test_parts_are_read_from_the_values_of_a_call(text: str, in_cpp: Compute) -> None:
    x = torch.empty(2, 3, device="meta")
    several = {"sizes": [5, 7], "several": [x, x], "flags": [False, True]}
    named = {"x": x, "weight": None, "flag": True, "n": 1, **several}
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
    expected = caught.value.message()
    kernel.direct(torch.randn(8, 2))
    kernel.direct(torch.randn(8, 3))
    assert kernel.cached_plans == 1
    with pytest.raises(errors.LaunchError) as caught:
        kernel.direct(torch.randn(rows, 2))
    assert caught.value.message() == expected


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
