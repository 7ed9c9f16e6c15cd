"""Kernels for a GPU, run on the CPU: what a language gives, so that `check` holds them to the reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from opsmith.core.guarded_part import GuardedPart

NOTE, SKIPPED = "note", "skipped"
"""Causes of findings that are no faults: legal and doubtful code; a launch that cannot be run here."""


@dataclass(frozen=True, slots=True)
class CpuFinding:
    """Finding about a run, beside its results.

    Attributes:
        cause: Cause of a failure, as `check` names it; `NOTE` or `SKIPPED`.
        message: The fault, in a sentence.
        where: `file:line` of the author's line.
        line: Text of that line; empty if it is unknown.
        other_where: `file:line` of the other access of a race, or of the other barrier; empty for none.
        other_line: Text of that line.
        label: Name of the tensor; None for none.
        count: Number of times.
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
    """Call of a kernel, with its argument values, and what it was prepared as."""

    values: list[Any]
    prepared: Any = None


@dataclass(frozen=True)
class CpuRun:
    """One run of a call.

    Args:
        what: The kernel and how it ran, in messages.
        compute: Function that gives the results of the run, with the reference's arguments.
        order: Order of its threads; empty where there is but one.
        found: Faults, limits of the CPU, and what is doubtful.
        launched: False if it has nothing to run.
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
        exhaustive: True if it shall run in every order of its threads.
        seed: Seed of random numbers.

    Attributes:
        promise: What `check` promises of such kernels, in a sentence.
        manner: Words for how calls ran.
        given_up: Words for calls that could not be run to their end.
        in_bfloat16: Words for how bfloat16 is computed, if otherwise than on a GPU.
        launches_ran: Words for how launches by any code ran; see `launches`.
        parts: What runs of a kernel, as many as the effort of a check allows.
        trials: Number of calls that may be given up before all are, if none has run.
        together: Number of calls that run together, once one has run.
        compiles: True if it compiles for all calls together.
    """

    promise: ClassVar[str] = "Its kernels give on the CPU what the reference gives."
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
        """Build what the calls need, if it is not there yet.

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
        """Yield what the runs did not try, for the report."""
        yield from ()

    def unseen(self) -> str | None:
        """Return the faults that no run can show, which leave the kernel unverified; None if it shows all."""
        return None

    @classmethod
    def launches(cls, record: Callable[[str], None]) -> AbstractContextManager[None] | None:
        """Return a context in which launches by any code run on tensors of the CPU; None if there is none.

        Args:
            record: Function to call with the name of each kernel that runs.
        """
        return None
