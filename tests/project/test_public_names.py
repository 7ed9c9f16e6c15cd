"""Public names mean one thing, whatever else has been imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith

# Each name is looked up and used; then all submodules are imported; then all of it again.
PROGRAM = """
import importlib, json, pkgutil, sys
import torch
import opsmith

def declare(x: torch.Tensor) -> torch.Tensor:
    return x * 2

class Adopted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

USES = {
    "Benchmark": lambda: opsmith.Benchmark("public::names", "quick", 0, 1, {}, {}, (), ()).operator,
    "Launch": lambda: opsmith.Launch("fold(sums, result)", grid=1).kernel,
    "Make": lambda: str(opsmith.Make()(2).shape),
    "Operator": lambda: str(opsmith.Operator.__call__(operator, torch.ones(2))),
    "Report": lambda: opsmith.Report("public::names", (), 0).verdict(),
    "__version__": lambda: opsmith.__version__,
    "adopt": lambda: opsmith.adopt(Adopted, "public::adopted").name,
    "benchmark": lambda: opsmith.benchmark(
        operator, samples=[(torch.ones(2),)], effort="quick", compiled=False
    ).operator,
    "check": lambda: str(opsmith.check(operator, samples=lambda: [(torch.ones(2).double(),)]).passed),
    "declared_operators": lambda: str(operator in opsmith.declared_operators("__main__")),
    "draw": lambda: str(
        len(opsmith.draw(operator(torch.ones(2, requires_grad=True)), "twice.html").nodes)
    ),
    "emulate": lambda: opsmith.emulate.__name__,
    "errors": lambda: opsmith.errors.UsageError("x").problem,
    "export_onnx": lambda: str(opsmith.export_onnx(operator, torch.ones(2), "twice.onnx").nodes),
    "find_operator": lambda: opsmith.find_operator("public::names").name,
    "init": lambda: repr(opsmith.init.uniform(-1.0, 1.0)),
    "modules": lambda: opsmith.modules.OperatorModule.__name__,
    "non_differentiable": lambda: repr(opsmith.non_differentiable),
    "not_implemented": lambda: repr(opsmith.not_implemented("why")),
    "onnx": lambda: opsmith.onnx.load.__name__,
    "operator": lambda: repr(opsmith.operator("public::names")(declare)),
    "ops": lambda: opsmith.ops.exp.name,
    "page": lambda: str([file.name for file in opsmith.page(operator, "twice.html", effort="quick")]),
    "testing": lambda: opsmith.testing.assert_correct.__name__,
    "zero": lambda: repr(opsmith.zero),
}
operator = opsmith.operator("public::names")(declare)
rounds = []
for _ in range(2):
    found = {name: getattr(opsmith, name) for name in opsmith.__all__}
    rounds.append((found, {name: USES[name]() for name in opsmith.__all__}))
    modules = [
        info.name
        for info in pkgutil.walk_packages(opsmith.__path__, "opsmith.")
        if not info.name.endswith("__main__")
    ]
    for name in modules:
        importlib.import_module(name)
(first, used), (second, used_again) = rounds
print(json.dumps({
    "same": [name for name in opsmith.__all__ if first[name] is second[name]],
    "used": used,
    "used_again": used_again,
    "check": type(opsmith.check).__name__,
    "modules": modules,
    "listed": dir(opsmith),
    "star": sorted(vars(importlib.import_module("star"))["names"]),
}))
"""


@pytest.mark.slow
def test_each_name_resolves_and_works_before_and_after_all_submodules(tmp_path: Path) -> None:
    (tmp_path / "star.py").write_text(
        "from opsmith import *\nnames = {each for each in globals() if not each.startswith('__')}\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    public = sorted(opsmith.__all__)
    assert sorted(found["same"]) == public
    assert found["used"] == found["used_again"]
    assert found["used"]["check"] == "True"
    assert found["check"] == "function"
    assert "opsmith.checking" in found["modules"]
    assert found["listed"] == public
    assert set(found["star"]) == set(public) - {"__version__"}


def test_all_is_sorted_and_without_doubles() -> None:
    assert opsmith.__all__ == sorted(set(opsmith.__all__))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(opsmith, "linear")


def test_errors_are_all_public() -> None:
    classes = {
        name
        for name, value in vars(opsmith.errors).items()
        if isinstance(value, type) and issubclass(value, opsmith.errors.OpsmithError)
    }
    assert sorted(classes) == sorted(opsmith.errors.__all__)
