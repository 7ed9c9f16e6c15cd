"""Interface with which a language runs GPU kernels on the CPU, so that `check` can test them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from opsmith.core.guarded_part import GuardedPart

NOTE, SKIPPED = "note", "skipped"
"""Causes of findings that are not faults: legal but doubtful code, and a launch that cannot run here."""


@dataclass(frozen=True, slots=True)
class CpuFinding:
    """Finding about a run, in addition to its results.

    Attributes:
        cause: Name of a cause in `check`, or `NOTE` or `SKIPPED`.
        message: The fault, in a sentence.
        where: `file:line` of the author's line.
        line: Text of that line; empty if it is unknown.
        other_where: `file:line` of a race's other access, or of the other barrier; empty if there is none.
        other_line: Text of the line `other_where`.
        label: Name of the tensor; None if the finding is about no tensor.
        count: Number of times that it was found.
        hint: Advice.
    """

    cause: str
    message: str
    where: str
    line: str = ""
    other_where: str = ""
    other_line: str = ""
    label: str | None = None
    count: int = 1
    hint: str = ""


@dataclass
class CpuCall:
    """Call of a kernel: its argument values and its prepared form."""

    values: list[Any]
    prepared: Any = None


@dataclass(frozen=True)
class CpuRun:
    """One run of a call.

    Args:
        what: The kernel and how it ran, in messages.
        compute: Function of the reference's arguments that returns the results of the run.
        order: Order of its threads; empty if there is only one order.
        found: Faults, doubtful code, and launches that the CPU cannot run.
        launched: False if the call launches nothing.
    """

    what: str
    compute: Callable[..., Any]
    order: str = ""
    found: Sequence[CpuFinding] = ()
    launched: bool = True


class OnCpu(GuardedPart, ABC):
    """A kernel of one language, which runs on the CPU.

    Args:
        kernel: The kernel.
        exhaustive: True to run the kernel in every order of its threads.
        seed: Seed of random numbers.

    Attributes:
        promise: Promise of `check` for such kernels, in a sentence.
        manner: Words for the way calls ran, for reports.
        given_up: Words for calls that could not be run to their end.
        in_bfloat16: Words for the way bfloat16 is computed, if it differs from a GPU.
        launches_ran: Words for the way launches by any code ran; see `launches`.
        parts: Parallel parts of a kernel; the effort of a check limits their number.
        trials: If no call has run, the number of calls that may be given up before all others are given up.
        together: Number of calls that run together after a first call has run.
        compiles: True if one compilation serves all calls.
    """

    promise: ClassVar[str] = "On the CPU, its kernels return the reference's results."
    manner: ClassVar[str] = "run on the CPU"
    given_up: ClassVar[str] = "given up"
    in_bfloat16: ClassVar[str] = ""
    launches_ran: ClassVar[str] = ""
    parts: ClassVar[Literal["threads", "programs"]] = "threads"
    trials: ClassVar[int] = 1
    together: ClassVar[int] = 1
    compiles: ClassVar[bool] = False

    def __init__(self, kernel: Any, *, exhaustive: bool, seed: int) -> None:
        self.kernel, self.exhaustive, self.seed = kernel, exhaustive, seed

    @abstractmethod
    def build(self, calls: Sequence[CpuCall]) -> None:
        """Build the code that the calls need, if it is not built yet.

        Raises:
            ToolchainError, CacheError, NotEmulatedError: If nothing can run here.
            OpsmithError: If the kernel is wrong.
        """

    @abstractmethod
    def prepare(self, call: CpuCall) -> int | str:
        """Prepare a call, and return the number of its parts, or the reason why the kernel refuses it."""

    @abstractmethod
    def launch(self, calls: Sequence[CpuCall]) -> list[list[CpuRun]]:
        """Run each call, in each order of its threads."""

    def notes(self) -> Iterator[str]:
        """Yield texts for the report about anything that the runs did not try."""
        yield from ()

    def unseen(self) -> str | None:
        """Return the faults that no run can show, so the kernel is unverified; None if there are none."""
        return None

    @classmethod
    def launches(cls, record: Callable[[str], None]) -> AbstractContextManager[None] | None:
        """Return a context in which launches by any code run on CPU tensors; None if the language has none.

        Args:
            record: Function to call with the name of each kernel that runs.
        """
        return None
