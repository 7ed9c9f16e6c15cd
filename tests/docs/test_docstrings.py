"""Every example in a docstring runs, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch

import opsmith


def _modules() -> list[Any]:
    found = pkgutil.walk_packages(opsmith.__path__, "opsmith.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    return [opsmith, *(importlib.import_module(name) for name in names)]


def _examples() -> dict[str, doctest.DocTest]:
    """Docstrings with examples, by the name of what they describe.

    An operator is a handle, which doctest does not always take for a function: operators are added by name.
    """
    finder, parser = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestParser()
    # What an example defines is the reader's code, and not that of the module whose docstring it stands in.
    known = {"torch": torch, "opsmith": opsmith}
    own = {"__name__": "example"}
    found: dict[str, doctest.DocTest] = {}
    for module in _modules():
        for test in finder.find(module, module.__name__, globs={**known, **vars(module)}, extraglobs=own):
            if test.examples:
                found[test.name] = test
    for operator in opsmith.declared_operators():
        module = operator.specification.module
        name = f"{module}.{operator.specification.qualname}"
        if not module.startswith("opsmith.") or name in found:
            continue
        globs = {**known, **vars(importlib.import_module(module)), **own}
        found[name] = parser.get_doctest(operator.__doc__ or "", globs, name, None, 0)
    return found


EXAMPLES = _examples()

SLOW = {
    "opsmith.benchmarking.benchmarker.benchmark",
    "opsmith.checking.properties.torch.compile.load_compiler",
    "opsmith.core.aspects.Aspects.require_kernel",
    "opsmith.exporting.export.export_onnx",
    "opsmith.exporting.runtime.load",
    "opsmith.kernels.cuda.emulation.access_model.kernel_access",
    "opsmith.kernels.cuda.emulation.call.emulate",
    "opsmith.surveying.surveyor.survey",
    "opsmith.testing.assert_correct",
    "opsmith.testing.emulation.emulated_cuda",
}
"""Examples that take longer than all others together: they check, survey, measure, compile or export."""


def test_the_slow_examples_are_examples() -> None:
    assert {*EXAMPLES} >= SLOW


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in sorted(EXAMPLES)],
)
def test_the_example_is_true(name: str) -> None:
    test = EXAMPLES[name]
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    results = runner.run(test, out=report.append)
    assert results.attempted
    assert not results.failed, "".join(report)


def _public() -> dict[str, Any]:
    """Every name a user meets: those of the package and of its parts, and the methods of an operator."""
    names = {name: getattr(opsmith, name) for name in opsmith.__all__ if not name.startswith("__")}
    for part in (opsmith.init, opsmith.modules, opsmith.ops):
        names |= {
            f"{part.__name__.removeprefix('opsmith.')}.{name}": getattr(part, name) for name in part.__all__
        }
    for kind in (opsmith.Operator, opsmith.Make):
        members = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
        names |= {
            f"{kind.__name__}.{name}": member
            for name, member in members.items()
            if callable(member) and name != "redeclare"
        }
    return names


@pytest.mark.parametrize("name", sorted(_public()))
def test_a_public_name_has_a_docstring(name: str) -> None:
    described = _public()[name]
    text = getattr(described, "__doc__", None)
    assert text, f"{name} has no docstring"


def test_public_names_have_examples() -> None:
    """Modules hold names with examples of their own; an example of `Operator` may show all its methods."""
    without = [
        name
        for name, described in _public().items()
        if not isinstance(described, ModuleType) and ">>>" not in (getattr(described, "__doc__", None) or "")
    ]
    assert without == []
