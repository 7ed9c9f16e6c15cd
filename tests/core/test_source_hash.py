"""The hash of sources: it follows what a function reaches, and agrees between processes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith.core.source_hash import _PROCESS, NOT_IN_THE_KEY, _pieces, operator_hash, source_hash
from opsmith.core.specification import Specification


def written(source: str, **names: Any) -> Callable[..., Any]:
    """The function `f` of a source text, in a module of its own."""
    module = types.ModuleType("user_module")
    module.__file__ = "user_module.py"
    vars(module).update(names)
    exec(source, vars(module))
    return vars(module)["f"]


def member_of(value: float) -> types.ModuleType:
    module = types.ModuleType("helpers_of_user")
    module.__file__ = "helpers_of_user.py"
    sys.modules["helpers_of_user"] = module
    exec(f"def g(x): return x * {value}", vars(module))
    return module


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


PLACES: dict[str, Callable[[float], Any]] = {
    "constant": lambda v: written(f"def f(x): return x * {v}"),
    "nested function": lambda v: written(f"def f(x):\n    def g(y): return y * {v}\n    return g(x)"),
    "global": lambda v: written("def f(x): return x * K", K=v),
    "global in nested function": lambda v: written("def f(x): return (lambda y: y * K)(x)", K=v),
    "helper": lambda v: written(f"def g(x): return x * {v}\ndef f(x): return g(x)"),
    "helper of helper": lambda v: written(
        f"def h(x): return x * {v}\ndef g(x): return h(x)\ndef f(x): return g(x)"
    ),
    "default": lambda v: written(f"def f(x, k={v}): return x * k"),
    "keyword default": lambda v: written(f"def f(x, *, k={v}): return x * k"),
    "closure": lambda v: written(f"def make(k):\n    def f(x): return x * k\n    return f\nf = make({v})"),
    "table": lambda v: written("def f(x): return x * K['a'][0]", K={"a": [v]}),
    "set": lambda v: written("def f(x): return x in K", K={v, 7}),
    "member of a module": lambda v: written("def f(x): return helpers.g(x)", helpers=member_of(v)),
    "partial": lambda v: functools.partial(written("def f(k, x): return x * k"), v),
    "method": lambda v: written(f"class A:\n    def g(self, x): return x * {v}\ndef f(x): return A().g(x)"),
    "tensor": lambda v: written("def f(x): return x * T", T=torch.full((3,), v)),
    "function of a library": lambda v: written(
        f"def f(x): return torch.{'sin' if v == 1 else 'cos'}(x)", torch=torch
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen(place: str) -> None:
    assert source_hash(PLACES[place](1.0)) == source_hash(PLACES[place](1.0))
    assert source_hash(PLACES[place](1.0)) != source_hash(PLACES[place](2.0))


def test_recursion_ends() -> None:
    assert source_hash(written("def f(x): return f(x - 1) if x else 0"))


def test_what_cannot_be_followed_counts_as_this_process() -> None:
    function = written("def f(x): return x * S.factor", S=Scale(1.0))
    assert source_hash(function) == source_hash(function)


def test_an_operator_counts_with_its_formulas() -> None:
    @opsmith.operator("source_hash::square")
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    before = operator_hash(square.specification)
    square.samples(lambda make: [make(2)])
    assert operator_hash(square.specification) == before
    square.gradients(x=lambda grad, x: 2 * grad * x)
    assert operator_hash(square.specification) != before


@pytest.mark.slow
def test_processes_agree_on_the_bundled_operators() -> None:
    program = (
        "import opsmith.ops\n"
        "from opsmith.core.source_hash import operator_hash\n"
        "for operator in opsmith.declared_operators(): print(operator_hash(operator.specification))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in "12"
    ]
    assert runs[0] == runs[1] != b""


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: int) -> torch.Tensor:
        return x**by

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@dataclasses.dataclass(frozen=True)
class Window:
    size: int = 3
    stride: int = 1


def gathered(
    x: torch.Tensor, window: Window, by: int | tuple[int, int] = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    return x * by[0] + window.size, x * 3  # type: ignore[index]


@functools.cache  # torch 2.11 registers a `custom_op` once
def subjects() -> list[Specification]:
    """Specifications that have each part which a specification may have."""
    whole = opsmith.operator(
        "source_hash::whole",
        hidden=("kept",),
        results={"y": ..., "kept": opsmith.non_differentiable},
        shapes="x: B M -> B M, B M",
    )(gathered)
    whole.gradients(x=lambda grad_y: grad_y).tangents(y=opsmith.not_implemented("later"))
    whole.kernel("cpu", lambda x, window, by: (x, x))
    written = opsmith.operator("source_hash::written", mutates=["x"])(written_into)
    written.kernel("cpu", lambda x: None)
    adopted = opsmith.adopt(Cubed, "source_hash::adopted", signature="(x: Tensor, by: int) -> Tensor")
    twice = torch.library.custom_op("source_hash::library", mutates_args=())(cloned)
    library = opsmith.adopt(twice, reference=cloned)
    found = [each.specification for each in (whole, written, written.functional, adopted, library)]
    return found


def written_into(x: torch.Tensor) -> None:
    x.add_(1)


def cloned(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def parts_of(value: Any, found: dict[type, Any]) -> dict[type, Any]:
    """Collect one value of each of our dataclasses that a value holds."""
    ours = type(value).__module__.startswith("opsmith.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and ours:
        found.setdefault(type(value), value)
        left_out = NOT_IN_THE_KEY.get(type(value).__name__, {})
        names = [each.name for each in dataclasses.fields(value) if each.name not in left_out]
        for name in names:
            parts_of(getattr(value, name), found)
    elif isinstance(value, Mapping):
        for item in value.values():
            parts_of(item, found)
    elif isinstance(value, list | tuple | frozenset):
        for item in value:
            parts_of(item, found)
    return found


def test_every_field_of_a_specification_is_in_the_key_or_is_named_with_a_reason() -> None:
    found: dict[type, Any] = {}
    for specification in subjects():
        parts_of(specification, found)
    kinds = {kind.__name__ for kind in found}
    assert kinds >= {
        "Specification",
        "Schema",
        "Argument",
        "ArgumentType",
        "ValueType",
        "Structure",
        "Result",
    }
    assert kinds >= {"GradientRules", "TangentRules", "Formula", "NotImplementedGradient", "Kernel"}
    assert kinds >= {"Shapes", "Dims", "LibraryOperator", "AdoptedFunction", "ForwardArguments", "Slot"}
    moved: dict[str, set[str]] = {}
    still: dict[str, set[str]] = {}
    for kind, part in found.items():
        before = source_hash(part)
        for field in dataclasses.fields(kind):
            changed = copy.copy(part)
            object.__setattr__(changed, field.name, "another value")
            there = moved if source_hash(changed) != before else still
            there.setdefault(kind.__name__, set()).add(field.name)
    assert still == {kind: set(reasons) for kind, reasons in NOT_IN_THE_KEY.items()}
    assert all(reason for reasons in NOT_IN_THE_KEY.values() for reason in reasons.values())


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


KERNELS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "C++": (
        {"cpp": "template <class T> void doubled(View<const T> x, View<T> y) {}"},
        [{"strict": True}, {"dtypes": [torch.float64]}, {"flags": ["-O1"]}],
    ),
    "CUDA": (
        {"cuda": "template <class T> __global__ void doubled(View<const T> x, View<T> y) {}", "grid": 1},
        [{"strict": True}, {"grid": 2}, {"block": 32}, {"deterministic": False}, {"initial": {"result": 1}}],
    ),
}


@pytest.mark.parametrize("language", KERNELS)
def test_all_that_a_declaration_says_of_a_kernel_is_in_the_key(language: str) -> None:
    given, others = KERNELS[language]
    device = "cpu" if language == "C++" else "cuda"
    seen = set()
    for number, more in enumerate([{}, *others]):
        operator = opsmith.operator("source_hash::doubled")(doubled)
        operator.kernel(device, **{**given, **more})
        again = operator_hash(operator.specification)
        assert again == operator_hash(operator.specification)
        seen.add(again)
        assert len(seen) == number + 1, more


def test_values_of_a_structure_count_and_no_process_is_in_the_key() -> None:
    for specification in subjects():
        pieces = list(_pieces(specification, {}))
        assert not [piece for piece in pieces if _PROCESS in piece], specification.name


ROLES = """
import sys, torch, opsmith
from torch import Tensor
which = int(sys.argv[1])
b = opsmith.non_differentiable if which else ...
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3
def swapped(x: Tensor, n: int = 2) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3
role = opsmith.operator("cached::role", results={"a": ..., "b": b}, inline=False)(two)
order = opsmith.operator("cached::order", results=("b", "a") if which else ("a", "b"), inline=False)(swapped)
order.gradients(x=lambda grad_a: grad_a)
x = torch.arange(1.0, 3.0).requires_grad_()
def weighted(op):
    return lambda x: op(x)[0] * 5 + op(x)[1] * 7
def gradient(f):
    return torch.autograd.grad(f(x).sum(), x)[0][0].item()
for f in (weighted(role), weighted(order)):
    print(gradient(f), gradient(torch.compile(f)))
"""


@pytest.mark.slow
def test_a_process_does_not_take_the_compiled_code_of_another_declaration(tmp_path: Path) -> None:
    """The second process finds the caches of the first; roles and order are in no text of torch."""
    (tmp_path / "declares.py").write_text(ROLES)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    found = [
        subprocess.run(
            [sys.executable, str(tmp_path / "declares.py"), which],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for which in "01"
    ]
    assert found == [["31.0 31.0", "5.0 5.0"], ["10.0 10.0", "7.0 7.0"]]
