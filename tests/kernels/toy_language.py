"""Toy language, as a package brings one: the text of its module, and what installs it."""

from __future__ import annotations

from collections.abc import Callable

TOY = """
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.core.kernels import BuiltKernel
from opsmith.kernels.languages import Language
from opsmith.kernels.on_cpu import CpuRun, OnCpu


@dataclass(frozen=True)
class ToySource:
    function: Any
    text: str = "text"
    where: str = "toy.py:1"

    @property
    def entry(self) -> str:
        return self.function.__name__


class ToyKernel(BuiltKernel[ToySource]):
    key, language = "toy", "Toy"

    def __init__(self, declaration: Any) -> None:
        source = ToySource(declaration.source)
        super().__init__(declaration.operator, lambda: source, strict=declaration.strict)
        self.scale = declaration.options.get("scale", 1)

    dtypes = None

    def _forget(self) -> None: ...

    def refusal(self, values: Sequence[Any]) -> None: ...

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        return ()

    def __call__(self, *args: Any) -> Any:
        return self.source.function(*args) * self.scale


class ToyOnCpu(OnCpu):
    promise = "kernels in Toy give what the reference gives"
    parts = "programs"

    def build(self, calls: Any) -> None: ...

    def prepare(self, call: Any) -> int:
        return 1

    def launch(self, calls: Any) -> list[list[CpuRun]]:
        return [[CpuRun("the kernel in Toy", self.kernel)] for _ in calls]


class ToyLanguage(Language):
    key, name, devices, options, on_cpu = "toy", "Toy", ("cpu", "cuda"), ("scale",), ToyOnCpu

    def kernel(self, declaration: Any) -> ToyKernel:
        return ToyKernel(declaration)


LANGUAGE = ToyLanguage()
"""

COMPILED = """
from opsmith.build.manifest import BuiltFile
from opsmith.build.processor import levels, machine
from opsmith.kernels.common.ahead import Ahead, Built
from opsmith.kernels.common.gpu_resources import KernelUsage, Resources
from opsmith.kernels.common.gpu_usage import GpuUsage


class ToyUsage(GpuUsage):
    def usage(self, kernel, architectures=("sm_80",), calls=None):
        for each in architectures:
            yield KernelUsage.of(
                kernel.operator.name, kernel.source, Resources(8), instance="", architecture=each,
                dynamic_shared=0, threads=None, occupancy=None, faults=(),
            )

    def refuse_unknown(self, architectures): ...


class ToyAhead(Ahead):
    def refuse(self, kernels, targets): ...

    def build(self, kernel, target, root, folder):
        described = BuiltFile(
            operator=kernel.operator.name, language="Toy", digest=kernel.digest(), abi=1, target=target,
            machine=machine(), features=levels()[target],
        )
        return Built(described, b"toy", "toy")


class CompiledToy(ToyLanguage):
    gpu_usage = ToyUsage()
    ahead = ToyAhead()


LANGUAGE = CompiledToy()
"""
"""What a language adds that is compiled without a call."""


Install = Callable[..., None]
