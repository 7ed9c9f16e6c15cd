"""Context manager in which the CUDA kernels of all operators compute on CPU tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from opsmith.core.aspects import KERNEL_OBSERVERS
from opsmith.core.forked_locks import lock_of
from opsmith.core.kernels import Kernel
from opsmith.core.operator import Operator
from opsmith.declaration import declared_operators
from opsmith.kernels.cuda.emulation.call import parse_order
from opsmith.kernels.cuda.emulation.kernel import EmulatedCalls, EmulatedKernel, recorded_calls
from opsmith.kernels.cuda.kernel import cuda_kernels

_lock = lock_of(sys.modules[__name__], "_lock")
_contexts = 0


@contextmanager
def emulated_cuda(*, order: str = "forward", in_process: bool = False) -> Iterator[EmulatedCalls]:
    """Context manager in which operators run their CUDA C++ kernels on CPU tensors, by emulation.

    It affects the calls of this thread, forward and backward. Every memory access of a kernel is checked, as
    in `opsmith.emulate`. If a kernel does not take a call, or the CPU cannot run it, the next implementation
    computes the call: a kernel for the CPU or the reference. `op.explain(...)` gives the reason.

    Args:
        order: Order in which the threads of a block run: `forward`, `backward`, `alternating`, `random` or
            `random(7)`, with a seed.
        in_process: True to run the kernels in this process, where a debugger sees them; a crash then ends it.

    Returns:
        Record of the calls: `calls`, their number by operator, and `refused`, the reasons why a kernel did
        not take a call.

    Raises:
        KernelFaultError: From a call, if a kernel has a fault, such as a race.
        KernelSignatureError, LaunchError: From a call, as on a GPU.
        UsageError: If there is no such order.

    Warns:
        UserWarning: At the end, if no kernel has run.

    Example:
        >>> import opsmith.ops, torch
        >>> x = torch.ones(1, 2, 3, 3, requires_grad=True)
        >>> with emulated_cuda(order="backward") as emulated:
        ...     opsmith.ops.involution(x, torch.ones(1, 1, 3, 3, 3, 3), padding=1).sum().backward()
        >>> print(emulated)
        opsmith::involution: 1 call
        opsmith::involution_input_gradient: 1 call
    """
    wanted = parse_order(order, 'opsmith.testing.emulated_cuda(order="backward")')
    with _attached(), recorded_calls(wanted, in_process=in_process) as calls:
        yield calls
    if not calls.calls:
        warnings.warn(f"no CUDA C++ kernel ran in `emulated_cuda`: {calls}", UserWarning, stacklevel=3)


@contextmanager
def _attached() -> Iterator[None]:
    """Context manager in which the CUDA C++ kernels of every operator are emulated on the CPU."""
    global _contexts
    try:
        with _lock:
            _contexts += 1
            if _contexts == 1:
                KERNEL_OBSERVERS.append(_attach)
                for operator in declared_operators():
                    _attach(operator)
        yield
    finally:
        with _lock, ExitStack() as every:  # every operator is restored, even if restoring one of them fails
            _contexts -= 1
            if _contexts == 0:
                KERNEL_OBSERVERS.remove(_attach)
                for operator in declared_operators():
                    every.callback(_detach, operator)


def _attach(operator: Operator[..., Any]) -> None:
    """Make the CUDA C++ kernels of an operator the first choice for its calls on the CPU."""
    wanted = cuda_kernels(operator.specification)
    kernels = operator.specification.kernels
    if [each.emulated for each in _emulated(kernels)] != wanted:
        emulated = (Kernel("cpu", EmulatedKernel(each)) for each in wanted)
        operator.replace_kernels((*emulated, *_others(kernels)))


def _detach(operator: Operator[..., Any]) -> None:
    kernels = operator.specification.kernels
    if _emulated(kernels):
        operator.replace_kernels(_others(kernels))


def _emulated(kernels: tuple[Kernel, ...]) -> list[EmulatedKernel]:
    return [each.function for each in kernels if isinstance(each.function, EmulatedKernel)]


def _others(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    return tuple(each for each in kernels if not isinstance(each.function, EmulatedKernel))
