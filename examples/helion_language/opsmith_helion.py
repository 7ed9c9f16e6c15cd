"""Kernels in Helion: called on a GPU as Helion calls them, and on the CPU in its reference mode.

A kernel in Helion allocates its results itself and is a function of the operator's arguments, so that nothing
is compiled, launched or laid out here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.location import where
from opsmith.kernels.common.parameters import device_refusal, dtype_refusal
from opsmith.kernels.languages import Declaration, Language
from opsmith.kernels.on_cpu import CpuCall, CpuRun, OnCpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Default dtypes of floating-point tensors, which a kernel may narrow down."""
ELEMENTS = 1024
"""Elements that count as one program in the effort of a check."""


@dataclasses.dataclass(frozen=True)
class HelionSource:
    """A function under `helion.kernel`."""

    given: Any

    @property
    def entry(self) -> str:
        """Name of the function."""
        return str(self.given.fn.__name__)

    @property
    def text(self) -> str:
        """Text of the function."""
        return inspect.getsource(self.given.fn)

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return where(self.given.fn)


class HelionKernel(BuiltKernel[HelionSource]):
    """Function that computes an operator by a kernel in Helion."""

    key, language = "helion", "Helion"

    def __init__(self, declaration: Declaration) -> None:
        source = HelionSource(declaration.source)
        super().__init__(
            declaration.operator,
            lambda: source,  # a function in Python is read again by declaring it again
            strict=declaration.strict,
            deterministic=declaration.deterministic,
        )
        self._dtypes = declaration.ordered_dtypes(DTYPES) or DTYPES
        found, wanted = list(inspect.signature(source.given.fn).parameters), list(self._schema.names)
        if found != wanted:
            raise self.error(
                errors.KernelSignatureError,
                "the parameters of the kernel in Helion are not the operator's arguments",
                argument="helion",
                expected=f"({', '.join(wanted)})",
                got=f"({', '.join(found)})",
                hint="give the kernel these parameters in this order; it returns the results",
            )

    @property
    def _schema(self) -> Any:
        return self.operator.specification.schema

    def _forget(self) -> None:
        """Drop nothing: what Helion has compiled is Helion's."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of floating-point tensors that it takes."""
        return self._dtypes

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why it does not take these values; None if it does."""
        return device_refusal(values) or self.value_refusal(values)

    def value_refusal(self, values: Sequence[Any]) -> str | None:
        """Return why it takes these values nowhere; None if it does."""
        floating = [
            value if any(each.is_floating_point() for each in tensors_in([value])) else None
            for value in values
        ]
        return dtype_refusal(self._schema.names, floating, self._dtypes)

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return no tensor: Helion takes any strides."""
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a GPU."""
        return self.source.given(*self._schema.call_values(args, kwargs))

    def in_reference_mode(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on the CPU, by a copy of the kernel, whose settings stay as they are."""
        import helion

        given = self.source.given
        settings = dataclasses.replace(given.settings, ref_mode=helion.RefMode.EAGER)
        eager = helion.Kernel(given.fn, configs=given.configs, settings=settings)
        with torch.no_grad():
            return eager(*self._schema.call_values(args, kwargs))


class InReferenceMode(OnCpu):
    """A kernel in Helion on the CPU. Helion clamps indices there, so that none is out of bounds."""

    promise = "kernels in Helion give what the reference gives, in Helion's reference mode on the CPU"
    manner, parts = "run in Helion's reference mode", "programs"

    def build(self, calls: Sequence[CpuCall]) -> None:
        """Build nothing."""

    def prepare(self, call: CpuCall) -> int | str:
        """Count the elements of a call."""
        refused: str | None = self.kernel.value_refusal(call.values)
        return refused or 1 + sum(each.numel() for each in tensors_in(call.values)) // ELEMENTS

    def launch(self, calls: Sequence[CpuCall]) -> list[list[CpuRun]]:
        """Leave it to the comparison to run a call."""
        return [[CpuRun("the kernel in Helion, on the CPU,", self.kernel.in_reference_mode)] for _ in calls]


class HelionLanguage(Language):
    """Helion, for GPUs."""

    key, name, devices, options = "helion", "Helion", ("cuda",), ("deterministic",)
    on_cpu = InReferenceMode

    def kernel(self, declaration: Declaration) -> HelionKernel:
        """Make a kernel of a function under `helion.kernel`."""
        import helion

        if not isinstance(declaration.source, helion.Kernel):
            raise errors.KernelSourceError(
                "`helion=` is given something that is not a kernel in Helion",
                argument="helion",
                expected="a function under `@helion.kernel`",
                got=repr(declaration.source),
                hint="decorate the function: `@helion.kernel()`",
            )
        return HelionKernel(declaration)


LANGUAGE = HelionLanguage()
