"""Kernels by device: how they are declared, and which one takes a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypedDict

import torch

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.location import where

LaunchValue = int | str | Callable[..., Any] | Sequence[int | str]
"""A number, an expression over sizes, a function of arguments and results, or up to three numbers."""


class CudaOptions(TypedDict, total=False):
    """A kernel in CUDA C++, and how it is compiled and launched.

    Attributes:
        cuda: The text: a `__global__` function whose parameters are the arguments and then the results.
        cuda_file: Or a file that holds it, beside the one that declares the kernel.
        entry: Name of the function in it; by default the operator's own.
        dtypes: What its template is made for; float32 and float64 by default.
        strict: Whether it is an error that it cannot be built here.
        grid: How many blocks, in up to three directions; `"ceil(result.numel / 256)"`, for example.
        block: How many threads a block has; 256 by default.
        shared: Bytes of dynamic shared memory.
        constants: The numbers of its template, by name: from sizes that few calls change.
        max_spills: How many bytes it may spill: `check` and `opsmith compile` hold it to that.
        max_registers: How many registers a thread may take.
    """

    cuda: str
    cuda_file: str | PathLike[str]
    entry: str
    dtypes: Any
    strict: bool
    grid: LaunchValue
    block: LaunchValue
    shared: LaunchValue
    constants: Mapping[str, LaunchValue]
    max_spills: int
    max_registers: int


CUDA_SOURCES = ("cuda", "cuda_file")
CUDA_LAUNCH_OPTIONS = ("grid", "block", "shared", "constants", "max_spills", "max_registers")
"""The words that are for a kernel in CUDA C++ alone."""


class TritonOptions(TypedDict, total=False):
    """A kernel in Triton, and how it is launched.

    Attributes:
        triton: A function whose parameters are named after what they get; plain, or decorated by Triton.
        grid: How many programs of it run: up to three numbers, or a function of what it names.
        constants: What its other parameters get: values, or functions of what they name; `num_warps` too.
        layouts: Tensors that it wants `channels-last`, or `contiguous` although it takes their strides.
        dtypes: What it takes of floating tensors; float16, bfloat16 and float32 by default.
        strict: Whether it is an error that Triton is missing.
    """

    triton: Callable[..., Any]
    grid: int | Sequence[int] | Callable[..., Any]
    constants: Mapping[str, Any]
    layouts: Mapping[str, str]
    dtypes: Any
    strict: bool


TRITON_LAUNCH_OPTIONS = ("grid", "constants", "layouts")
"""The words that say how it is launched."""


class BuiltKernel(ABC):
    """A kernel that is built from source when it is first needed, and says itself what it takes.

    Attributes:
        pure: Whether it is known to write into none of its arguments, and to return new tensors.
        strict: Whether a call on its device that it does not take is an error.
    """

    pure = False
    strict = False

    @property
    @abstractmethod
    def where(self) -> str:
        """`file:line` of its source."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Its source."""

    @property
    @abstractmethod
    def entry(self) -> str:
        """Name of the function in it."""

    @property
    @abstractmethod
    def dtypes(self) -> Collection[torch.dtype] | None:
        """The dtypes that it is declared for; None where that is not said, or makes no difference."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the reference does."""

    @property
    def direct(self) -> Callable[..., Any]:
        """The kernel as it is called fastest, by who knows that it takes the call."""
        return self

    def serve(self, name: str, fallback: Callable[..., Any]) -> None:  # noqa: B027  many are called by Python
        """Take calls of an operator of torch's dispatcher, where a kernel can without Python.

        Args:
            name: Its name, `namespace::name`.
            fallback: Computes the calls that it does not take, in Python.
        """

    def withdraw(self) -> None:  # noqa: B027
        """Take no calls of the dispatcher any more, and forget what was remembered of them."""

    @abstractmethod
    def refusal(self, values: Sequence[Any]) -> str | None:
        """Why it does not take a call with these argument values; None where it does."""

    @property
    def sizing(self) -> str:
        """What tells the sizes of the results."""
        return "the reference"

    @abstractmethod
    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """What it copies in a call with these argument values, each with the reason."""

    @abstractmethod
    def reload(self) -> None:
        """Read the source again, and build it anew if it has changed."""


class VisibleKernel(BuiltKernel):
    """A kernel that compiled code sees into, as Triton's compiler is a part of torch's."""

    @abstractmethod
    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the reference does, in operations that torch can trace."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function that computes the operator on one type of device.

    Args:
        device: Device type, as in `torch.device(...).type`.
        function: Takes and returns what the reference does.
        dtypes: The dtypes it takes; None means all.
    """

    device: str
    function: Callable[..., Any]
    dtypes: frozenset[torch.dtype] | None = None

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return self.function.where if isinstance(self.function, BuiltKernel) else where(self.function)

    def supersedes(self, other: Kernel) -> bool:
        """Whether this kernel, declared later, takes the place of another one of its operator.

        So does one of the same device and dtypes; from source, one of the same function for some of the same
        dtypes, as where a cell of a notebook is run again. One for other dtypes stands beside it.
        """
        mine, its = self.function, other.function
        if isinstance(mine, BuiltKernel) and isinstance(its, BuiltKernel):
            apart = mine.dtypes and its.dtypes and not set(mine.dtypes) & set(its.dtypes)
            return self.device == other.device and mine.entry == its.entry and not apart
        alike = isinstance(mine, BuiltKernel) == isinstance(its, BuiltKernel)
        return alike and (self.device, self.dtypes) == (other.device, other.dtypes)

    def consider(self, values: Sequence[Any]) -> Accepted | Rejected:
        """Whether this kernel takes a call with these argument values."""
        for tensor in tensors_in(list(values)):
            if tensor.device.type != self.device:
                return Rejected(self, f"a tensor is on {tensor.device.type}", elsewhere=True)
            if self.dtypes is not None and tensor.dtype not in self.dtypes:
                return Rejected(self, f"it does not take {tensor.dtype}")
        reason = self.function.refusal(values) if isinstance(self.function, BuiltKernel) else None
        return Accepted(self) if reason is None else Rejected(self, reason)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel that will run."""

    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel that will not run, and why.

    Args:
        kernel: The kernel.
        reason: Why.
        elsewhere: Whether it is only that the call is on another type of device.
    """

    kernel: Kernel
    reason: str
    elsewhere: bool = False

    @property
    def strict(self) -> bool:
        """Whether the author wants an error, and no other kernel, on this kernel's device."""
        return (
            not self.elsewhere
            and isinstance(self.kernel.function, BuiltKernel)
            and self.kernel.function.strict
        )


def refuse_strictly(rejected: Iterable[Rejected], operator: str) -> None:
    """Refuse a call that a kernel under `strict=True` does not take.

    Raises:
        KernelRefusedError: Saying why it does not.
    """
    for each in rejected:
        if each.strict:
            raise errors.KernelRefusedError(
                f"its kernel for {each.kernel.device} does not take the call: {each.reason}",
                operator=operator,
                where=each.kernel.where,
                hint="call it with what the kernel takes, or leave `strict=True` out, and the next kernel or "
                "the reference computes the rest",
            )


def choose(
    kernels: tuple[Kernel, ...], values: Sequence[Any]
) -> tuple[Accepted | None, tuple[Rejected, ...]]:
    """The first kernel that takes these argument values, and those that were rejected before it."""
    rejected: list[Rejected] = []
    for kernel in kernels:
        verdict = kernel.consider(values)
        if isinstance(verdict, Accepted):
            return verdict, tuple(rejected)
        rejected.append(verdict)
    return None, tuple(rejected)


def check_device(device: str, operator: str) -> None:
    """Refuse a device type that torch does not know."""
    try:
        known = torch.device(device).type == device
    except RuntimeError:
        known = False
    if not known:
        raise errors.DeviceNameError(
            "a kernel is declared for a device type that torch does not know",
            operator=operator,
            expected="a device type such as `cpu`, `cuda` or `mps`, without an index",
            got=repr(device),
            hint="write `op.kernel('cpu', ...)` or `op.kernel('cuda', ...)`",
        )


def dtypes_of(dtypes: Any, operator: str) -> frozenset[torch.dtype]:
    """The dtypes that a kernel is declared for; one alone may stand without a list.

    Raises:
        KernelDtypeError: If something among them is no dtype, or there is none.
    """
    listed = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
    if isinstance(listed, Iterable):
        listed = list(listed)
        if listed and all(isinstance(each, torch.dtype) for each in listed):
            return frozenset(listed)
    raise errors.KernelDtypeError(
        "a kernel is declared for something that is no dtype",
        operator=operator,
        argument="dtypes",
        expected="a list of torch.dtype, with one at least",
        got=repr(dtypes),
        hint="write `dtypes=[torch.float32, torch.float64]`",
    )
