"""opsmith is a library for writing custom PyTorch operators.

An operator is declared once, by a reference in plain PyTorch. Gradients, shapes, transforms and exports are
derived from the reference. Formulas and kernels written by hand are checked against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opsmith import errors
from opsmith.core.feature_packages import connect_feature
from opsmith.core.formula import non_differentiable, not_implemented, zero
from opsmith.core.kernels import Launch
from opsmith.core.operator import Operator
from opsmith.core.samples import Make
from opsmith.declaration import declared_operators, find_operator, operator

if TYPE_CHECKING:
    from opsmith import init as init
    from opsmith import modules as modules
    from opsmith import onnx as onnx
    from opsmith import ops as ops
    from opsmith import testing as testing
    from opsmith.adopting import adopt
    from opsmith.benchmarking import Benchmark, benchmark
    from opsmith.checking import Report, check
    from opsmith.drawing import draw
    from opsmith.exporting import export_onnx
    from opsmith.kernels.cuda.emulation.call import emulate
    from opsmith.pages import page

__all__ = [
    "Benchmark",
    "Launch",
    "Make",
    "Operator",
    "Report",
    "__version__",
    "adopt",
    "benchmark",
    "check",
    "declared_operators",
    "draw",
    "emulate",
    "errors",
    "export_onnx",
    "find_operator",
    "init",
    "modules",
    "non_differentiable",
    "not_implemented",
    "onnx",
    "operator",
    "ops",
    "page",
    "testing",
    "zero",
]

__version__ = "0.10.0"

# A feature package is imported when it is first used, so that `import opsmith` stays light.
_FEATURES = {
    "adopt": "opsmith.adopting",
    "benchmark": "opsmith.benchmarking",
    "Benchmark": "opsmith.benchmarking",
    "check": "opsmith.checking",
    "Report": "opsmith.checking",
    "draw": "opsmith.drawing",
    "emulate": "opsmith.kernels.cuda.emulation.call",
    "export_onnx": "opsmith.exporting",
    "page": "opsmith.pages",
}
_SUBMODULES = ("init", "modules", "onnx", "ops", "testing")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _SUBMODULES:
        return importlib.import_module(f"opsmith.{name}")
    if name not in _FEATURES:
        raise AttributeError(f"module 'opsmith' has no attribute {name!r}")
    return getattr(importlib.import_module(_FEATURES[name]), name)


connect_feature("module", "opsmith.modules.generated_class", "module_class")
connect_feature("operator_html", "opsmith.pages.html", "operator_html")
connect_feature("build_kernel", "opsmith.kernels.declaration", "build_kernel")


def __dir__() -> list[str]:
    return sorted(__all__)
