"""Kernels for the CPU that run an emulated CUDA C++ kernel: `opsmith.testing.emulated_cuda`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from opsmith import errors
from opsmith.core.kernels import BuiltKernel, choose
from opsmith.kernels.common.call_cache import call_signature, is_symbolic
from opsmith.kernels.common.parameters import dtype_refusal
from opsmith.kernels.cuda.emulation.call import EmulatedCall, KernelEmulation
from opsmith.kernels.cuda.emulation.launch import Order
from opsmith.kernels.cuda.kernel import CudaKernel, with_defaults
from opsmith.kernels.cuda.source import CudaSource


@dataclass(eq=False)
class EmulatedCalls:
    """Record of the calls that kernels in CUDA C++ ran on the CPU inside of a context.

    Args:
        order: Order of the threads of a block.
        in_process: True if the kernels run in this process.

    Attributes:
        calls: Number of calls that kernels ran, by the operator's name.
        refused: Reasons why a kernel did not take a call, by the operator's name.
    """

    order: Order
    in_process: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{name}: {'1 call' if times == 1 else f'{times} calls'}" for name, times in self.calls.items()
        ]
        lines += [
            f"{name}: not taken: {reason}" for name, reasons in self.refused.items() for reason in reasons
        ]
        return "\n".join(lines) or "no call of an operator with a kernel in CUDA C++"


_contexts: ContextVar[tuple[EmulatedCalls, ...]] = ContextVar("emulated_calls", default=())
"""The active contexts, the innermost last."""


@contextmanager
def recorded_calls(order: Order, *, in_process: bool) -> Iterator[EmulatedCalls]:
    """Context manager in which emulated kernels take the calls of this thread, and calls are counted."""
    calls = EmulatedCalls(order, in_process)
    token = _contexts.set((*_contexts.get(), calls))
    try:
        yield calls
    finally:
        _contexts.reset(token)


class EmulatedKernel(BuiltKernel[CudaSource]):
    """Kernel for the CPU that runs a kernel in CUDA C++, with a check of every memory access.

    It takes the calls of threads inside of `recorded_calls`.

    Attributes:
        emulated: The kernel in CUDA C++.
    """

    language = "emulated CUDA"
    manner = "in CUDA C++, emulated"
    by_context = True

    def __init__(self, kernel: CudaKernel) -> None:
        self.emulated = kernel
        super().__init__(
            kernel.operator,
            lambda: kernel.source,
            strict=False,
            copies_back=kernel.copies_back,
            deterministic=kernel.deterministic,
        )

    def _forget(self) -> None:
        self._emulation = KernelEmulation(self.emulated)
        self._limits: dict[Any, str] = {}

    @property
    def _current(self) -> KernelEmulation:
        """The emulation of the kernel; it is new after the kernel has read its source again."""
        if self.source is not self.emulated.source:
            self.reload()
        return self._emulation

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the kernel."""
        return self.emulated.dtypes

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why the kernel does not take a call; None if it does.

        Raises:
            CompileError: If its source is wrong.
            KernelSignatureError: If its parameters do not match the operator's arguments and results.
            LaunchError: If a constant cannot be computed.
        """
        contexts = _contexts.get()
        if not contexts:
            return "`emulated_cuda` is active in another thread"
        reason = self._refusal(values)
        if reason is not None:
            for each in contexts:
                reasons = each.refused.setdefault(self.operator.name, [])
                if reason not in reasons:
                    reasons.append(reason)
        return reason

    def _refusal(self, values: Sequence[Any]) -> str | None:
        specification = self.operator.specification
        signature = call_signature(values)
        if is_symbolic(signature):  # each run of the compiled code makes a new choice
            return dtype_refusal(specification.schema.names, values, self.dtypes)
        emulation = self._current
        if signature in self._limits:
            return self._limits[signature]
        try:
            choice = emulation.choose(with_defaults(specification, values))
        except (errors.NotEmulatedError, errors.ToolchainError) as error:
            return self._limit(signature, error)
        return choice if isinstance(choice, str) else None

    def _limit(self, signature: Any, error: errors.OpsmithError) -> str:
        """Store, until `reload`, and return the reason why the CPU cannot run calls of a signature."""
        reason = self._limits[signature] = f"{error.problem}: {error.got}; {error.hint}"
        return reason

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the arguments that the kernel copies into a different layout."""
        values = with_defaults(self.operator.specification, values)
        choice = self._current.choose(values)
        return () if isinstance(choice, str) else self.emulated.copied_tensors(choice, values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; if the kernel cannot run on the CPU, by the next kernel or the reference.

        Raises:
            KernelFaultError: If the kernel has a fault.
        """
        specification = self.operator.specification
        values = specification.schema.call_values(args, kwargs)
        contexts = _contexts.get()
        if contexts and self.refusal(values) is None:
            emulation, innermost = self._current, contexts[-1]
            try:
                with torch.no_grad():
                    call = emulation.prepare(values)
                    assert isinstance(call, EmulatedCall), call
                    results = emulation.compute(call, innermost.order, in_process=innermost.in_process)
            except errors.NotEmulatedError as error:
                self._limit(call_signature(values), error)
            except errors.KernelFaultError:
                self._count(contexts)
                raise
            else:
                self._count(contexts)
                return results
        accepted, _ = choose(specification.kernels, values)
        computed: Callable[..., Any] = accepted.kernel.function if accepted else specification.computed_by
        return computed(*args, **kwargs)

    def _count(self, contexts: Sequence[EmulatedCalls]) -> None:
        for each in contexts:
            each.calls[self.operator.name] += 1
