"""Kernels by device: their declaration, and the choice of the kernel that takes a call."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from opsmith import config, errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.forked_locks import lock_of
from opsmith.core.guarded_part import GuardedPart
from opsmith.core.location import where
from opsmith.display import short_repr

Dtypes = torch.dtype | Iterable[torch.dtype]
"""The dtypes that a kernel is declared for."""
LaunchValue = int | str | Callable[..., Any] | Sequence[int | str]
"""A number, an expression over sizes, a function of arguments and results, or up to three of these."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of one of several kernels in CUDA C++ that compute an operator together.

    Args:
        kernel: A `__global__` function with the names of its arguments, results and scratch buffers, such as
            `"fold(partial, result)"`. Without parentheses it takes all of them, in this order.
        grid: Number of blocks, in up to three dimensions; without blocks it is not launched.
        block: Number of threads in a block.
        shared: Bytes of dynamic shared memory.
        constants: Integer parameters of its template, by name.

    Example:
        >>> Launch("fold(partial, result)", grid=1, block=128).kernel
        'fold(partial, result)'
    """

    __repr__ = short_repr

    kernel: str
    grid: LaunchValue = field(kw_only=True)
    block: LaunchValue = field(default=256, kw_only=True)
    shared: LaunchValue = field(default=0, kw_only=True)
    constants: Mapping[str, LaunchValue] = field(default_factory=dict, kw_only=True)


LAUNCH_OPTIONS = ("grid", "block", "shared", "constants")
"""Fields of `Launch` other than the kernel."""


NONDETERMINISTIC = (
    "it is declared with `deterministic=False`, and torch.use_deterministic_algorithms(True) is in force"
)
"""Reason for which a kernel whose rounding differs from run to run does not take a call."""


class KernelSource(Protocol):
    """Source of a kernel, as its author wrote it."""

    @property
    def where(self) -> str:
        """`file:line` of the function."""

    @property
    def text(self) -> str:
        """Text of the source."""

    @property
    def entry(self) -> str:
        """Name of the function."""


S = TypeVar("S", bound=KernelSource)


class BuiltKernel(errors.ErrorSubject, GuardedPart, ABC, Generic[S]):
    """A kernel that is built from source when it is first needed, and decides which calls it takes.

    Args:
        operator: The handle of the operator that the kernel computes.
        read: Reads the source: now, and again at each `reload`.
        strict: True if a missing compiler, or a call that the kernel does not take, raises an error.
            Otherwise the reference runs.
        copies_back: True if an argument that it writes may be copied into a layout that it takes, and back.
            Otherwise the kernel does not take such a call.
        deterministic: False if its rounding differs from run to run. It then takes no call while torch must
            be deterministic.

    Attributes:
        declared: File that declares it, whose package may contain the built kernel; None if unknown.
        operator: The operator that the kernel computes.
        source: The source, as it was last read.
        key: Key of the language; empty for a kernel that no author wrote, such as an emulation.
        language: Name of the language, for messages.
        pure: True if it is known to write only into arguments declared as written, and to return new tensors.
        traced: Computes the results in operations that torch.compile traces; None if torch.compile cannot see
            the kernel.
        by_context: True if the context of a call decides whether the kernel takes it. The choice is then made
            for each call, not by the call's signature.
        differentiable: True if autograd records its operations, because it has a backward of its own.
        manner: Description of how the kernel runs on its device, for messages; may be empty.
        required: True to raise an error if it can neither be loaded nor built.
    """

    key: ClassVar[str] = ""
    language: ClassVar[str]
    declared: str | None = None
    pure = False
    traced: Callable[..., Any] | None = None
    by_context: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False
    manner: str = ""
    required = False

    def __init__(
        self,
        operator: Any,
        read: Callable[[], S],
        *,
        strict: bool,
        copies_back: bool = False,
        deterministic: bool = True,
    ) -> None:
        self.operator = operator
        self.source = read()
        self.strict, self.copies_back, self.deterministic = strict, copies_back, deterministic
        self.__name__ = operator.specification.short_name
        self._read = read
        self._lock = lock_of(self, "_lock")
        self._forget()

    @property
    def where(self) -> str:
        """`file:line` of its source."""
        return self.source.where

    @property
    @abstractmethod
    def dtypes(self) -> Collection[torch.dtype] | None:
        """The dtypes that it is declared for; None if they are not given, or do not matter."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the results of the reference."""

    @property
    def direct(self) -> Callable[..., Any]:
        """The fastest callable, for calls that the kernel is known to take."""
        return self

    @property
    def takes_any_layout(self) -> bool:
        """True if it is known to take written arguments in any layout."""
        return False

    @property
    def computes_sizes(self) -> bool:
        """True if the kernel computes the sizes of its results itself, without the reference."""
        return False

    def serve(self, fallback: Callable[..., Any]) -> Callable[[], None] | None:
        """Receive the dispatcher's calls of the operator, if the kernel can be called without Python.

        Args:
            fallback: Function in Python for the calls that it does not take.

        Returns:
            Function to call before the operator is deregistered; None if there is nothing to undo.
        """
        return None

    def into_results(self, operator: Any) -> BuiltKernel[S] | None:
        """Return this kernel for the out form of its operator; None if it allocates its results itself."""
        return None

    def withdraw(self) -> None:
        """Stop receiving calls of the dispatcher, and clear the cache of calls."""

    @abstractmethod
    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return the reason why it does not take a call with these argument values; None if it takes it."""

    @property
    def sizing(self) -> str:
        """The source of the sizes of the results."""
        return "the reference"

    def narrow_indices(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the 32-bit indices that calls with these values use, by the compiler's names."""
        return ()

    def saved(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of the values that its backward needs; only a differentiable kernel has one."""
        return ()

    @abstractmethod
    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the tensors that it copies in a call with these values, each with the reason."""

    @property
    def _subject(self) -> tuple[str, str]:
        return self.operator.name, self.where

    def digest(self) -> str:
        """Return the digest of its author's source and options."""
        return hashlib.sha256(f"{self.source.entry}\n{self.source.text}".encode()).hexdigest()

    def sources(self) -> tuple[Any, ...]:
        """Return the values that define the kernel, for the source hash."""
        flags = self.strict, self.copies_back, self.deterministic
        return type(self).__name__, self.digest(), self.dtypes, flags

    def reload(self) -> None:
        """Read the source again. If it has changed, it is compiled at the next call."""
        source = self._read()
        with self._lock:
            self._forget()
            self.source = source

    def require(self) -> None:
        """Raise an error, from now on, if the kernel can neither be loaded nor built.

        Raises:
            KernelRefusedError: If it is already known that neither is possible.
        """
        self.required = True

    def load(self) -> None:
        """Load or build it now, if that needs neither a device nor a call.

        Raises:
            CompileError, KernelSignatureError: If the source is wrong.
            ToolchainError: If it can neither be loaded nor built.
        """

    def compile_ahead(self) -> None:
        """Compile it before the first call; an error is raised in the first call."""

    def origin_of(self, values: Sequence[Any]) -> str:
        """Return a description of where the built kernel for a call came from; empty before it is built.

        Args:
            values: Argument values, which the kernel takes.
        """
        return ""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the built kernel, and all caches of calls."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: a function that computes the operator on one type of device.

    Args:
        device: Device type, as in `torch.device(...).type`.
        function: A function with the reference's arguments and results.
        dtypes: The dtypes that it takes; None for all.
        in_place: For a functional form, the kernel that writes in place, which `function` runs on copies.
    """

    __repr__ = short_repr

    device: str
    function: Callable[..., Any]
    dtypes: frozenset[torch.dtype] | None = None
    in_place: Kernel | None = None

    @property
    def given(self) -> Callable[..., Any]:
        """The function, or the kernel from source, that its author gave."""
        return (self.in_place or self).function

    @property
    def where(self) -> str:
        """`file:line` of the function or source that its author gave."""
        return self.given.where if isinstance(self.given, BuiltKernel) else where(self.given)

    def __str__(self) -> str:
        """Return the device and the place of the kernel, as messages show them."""
        manner = self.given.manner if isinstance(self.given, BuiltKernel) else ""
        return f"kernel for {self.device}{manner and f' ({manner})'}, {self.where}"

    @property
    def by_context(self) -> bool:
        """True if the context of a call decides whether the kernel takes it."""
        return isinstance(self.given, BuiltKernel) and self.given.by_context

    @property
    def differentiable(self) -> bool:
        """True if autograd records its operations."""
        return isinstance(self.given, BuiltKernel) and self.given.differentiable

    @property
    def deterministic(self) -> bool:
        """False if its rounding is declared to differ from run to run."""
        return not isinstance(self.given, BuiltKernel) or self.given.deterministic

    def supersedes(self, other: Kernel) -> bool:
        """Return True if this kernel, declared later, replaces another kernel of its operator.

        It replaces a kernel for the same device and dtypes. A kernel from source replaces a kernel with the
        same entry and some of the same dtypes, as when a notebook cell is run again.
        """
        new, old = self.function, other.function
        if isinstance(new, BuiltKernel) and isinstance(old, BuiltKernel):
            disjoint = new.dtypes and old.dtypes and not set(new.dtypes) & set(old.dtypes)
            return self.device == other.device and new.source.entry == old.source.entry and not disjoint
        alike = isinstance(new, BuiltKernel) == isinstance(old, BuiltKernel)
        return alike and (self.device, self.dtypes) == (other.device, other.dtypes)

    def consider(self, values: Sequence[Any]) -> Accepted | Rejected:
        """Accept or reject a call with these argument values."""
        for tensor in tensors_in(list(values)):
            if tensor.device.type != self.device:
                return Rejected(self, f"a tensor is on {tensor.device.type}", elsewhere=True)
            if self.dtypes is not None and tensor.dtype not in self.dtypes:
                return Rejected(self, f"it does not take {tensor.dtype}")
        if not self.deterministic and torch.are_deterministic_algorithms_enabled():
            return Rejected(self, NONDETERMINISTIC)
        reason = None
        if isinstance(self.given, BuiltKernel):
            config.kernels_required()  # reports a typing error in it even if no kernel is missing
            reason = self.given.refusal(values)
        return Accepted(self) if reason is None else Rejected(self, reason)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel that will run."""

    __repr__ = short_repr

    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel that will not run, with the reason.

    Args:
        kernel: The kernel.
        reason: The reason.
        elsewhere: True if the only reason is that the call is on another type of device.
    """

    __repr__ = short_repr

    kernel: Kernel
    reason: str
    elsewhere: bool = False

    @property
    def strict(self) -> bool:
        """True if the rejection raises an error, because the kernel was declared with `strict=True`."""
        given = self.kernel.given
        return not self.elsewhere and isinstance(given, BuiltKernel) and given.strict


def refuse_strictly(rejected: Iterable[Rejected], operator: str) -> None:
    """Refuse a call that a kernel with `strict=True` does not take.

    Raises:
        KernelRefusedError: With the reason.
    """
    for each in rejected:
        if each.strict:
            raise errors.KernelRefusedError(
                f"its kernel for {each.kernel.device} does not take the call: {each.reason}",
                operator=operator,
                where=each.kernel.where,
                hint="call it with arguments that the kernel takes; or leave `strict=True` out: then the "
                "next kernel or the reference computes other calls",
            )


def choose(
    kernels: tuple[Kernel, ...], values: Sequence[Any]
) -> tuple[Accepted | None, tuple[Rejected, ...]]:
    """Return the first kernel that accepts these argument values, and the rejections before it."""
    rejected: list[Rejected] = []
    for kernel in kernels:
        verdict = kernel.consider(values)
        if isinstance(verdict, Accepted):
            return verdict, tuple(rejected)
        rejected.append(verdict)
    return None, tuple(rejected)


def check_device(device: Any, operator: str, call: str = "op.kernel({device!r}, ...)") -> None:
    """Refuse a value that is not the name of a device type that torch knows.

    Args:
        device: The value.
        operator: Name of the operator.
        call: The call that received it, for the hint.
    """
    try:
        known = isinstance(device, str) and torch.device(device).type == device
    except RuntimeError:
        known = False
    if not known:
        calls = (f"`{call.format(device=each)}`" for each in ("cpu", "cuda"))
        raise errors.DeviceNameError(
            "the device of a kernel is not a device type that torch knows",
            operator=operator,
            expected="a str such as 'cpu', 'cuda' or 'mps', without an index",
            got=repr(device),
            hint=f"write {' or '.join(calls)}",
        )


def dtypes_of(dtypes: Any, operator: str) -> frozenset[torch.dtype]:
    """Return the dtypes that a kernel is declared for, from a list or a single dtype.

    Raises:
        KernelDtypeError: If one of the values is not a dtype, or the list is empty.
    """
    listed = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
    if isinstance(listed, Iterable):
        listed = list(listed)
        if listed and all(isinstance(each, torch.dtype) for each in listed):
            return frozenset(listed)
    raise errors.KernelDtypeError(
        "a kernel is declared for a value that is not a dtype",
        operator=operator,
        argument="dtypes",
        expected="a list of at least one torch.dtype",
        got=repr(dtypes),
        hint="write `dtypes=[torch.float32, torch.float64]`",
    )
