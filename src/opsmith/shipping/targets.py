"""Targets that kernels are built for: levels of processors, and architectures of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opsmith import errors
from opsmith.build.processor import levels, machine
from opsmith.display import short_repr

NONE = "none"
"""Text for no target."""
DEFAULT_CUDA = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True, slots=True)
class BuildTargets:
    """Targets of a build.

    Attributes:
        cpu: Levels of processors, such as `x86-64-v3`.
        cuda: Architectures of GPUs, such as `sm_90`.
    """

    __repr__ = short_repr

    cpu: tuple[str, ...]
    cuda: tuple[str, ...]

    @classmethod
    def of(cls, cpu: str | None = None, cuda: str | None = None) -> BuildTargets:
        """Parse targets.

        Args:
            cpu: Levels, separated by commas, or `none`; None for all levels of this machine.
            cuda: Architectures, separated by commas, or `none`; None for `sm_80`, `sm_90` and `sm_100`.

        Raises:
            UsageError: If a text names no target, or an unknown target.

        Example:
            >>> BuildTargets.of(cpu="none", cuda="sm_90,sm_80").cuda
            ('sm_80', 'sm_90')
        """
        known = tuple(levels())
        wanted = known if cpu is None else _parts(cpu, "cpu", f"levels such as {', '.join(known) or 'none'}")
        unknown = [each for each in wanted if each not in known]
        if unknown:
            raise errors.UsageError(
                f"there is no level `{unknown[0]}` of {machine()} processors",
                argument="cpu",
                expected=", ".join(known) or f"`{NONE}`: libraries for this machine cannot be built ahead",
                got=", ".join(wanted),
                hint="name some of these levels, or build on a machine of a different kind",
            )
        gpus = DEFAULT_CUDA if cuda is None else _parts(cuda, "cuda", "architectures such as sm_80,sm_90")
        wrong = [each for each in gpus if re.fullmatch(r"sm_\d+[af]?", each) is None]
        if wrong:
            raise errors.UsageError(
                f"`{wrong[0]}` is not an architecture of GPUs",
                argument="cuda",
                expected="`sm_` and the compute capability, such as sm_80, sm_90 or sm_100",
                got=", ".join(gpus),
                hint="PTX for later GPUs is built for the newest architecture in the list",
            )
        return cls(tuple(each for each in known if each in wanted), tuple(sorted(gpus, key=capability_of)))

    def of_device(self, device: str) -> tuple[str, ...]:
        """Return the targets of a type of device, in the order in which they are built.

        Targets of processors begin with the highest level. Targets of GPUs end with code for later GPUs.

        Example:
            >>> BuildTargets.of(cpu="none", cuda="sm_90,sm_80").of_device("cuda")
            ('sm_80', 'sm_90', 'compute_90')
        """
        if device != "cuda":
            return self.cpu[::-1] if device == "cpu" else ()
        return (*self.cuda, *(() if self.ptx is None else (self.ptx.replace("sm_", "compute_"),)))

    @property
    def ptx(self) -> str | None:
        """The newest architecture whose PTX later GPUs can run; None if there is no such architecture."""
        return next((each for each in reversed(self.cuda) if each[-1] not in "af"), None)


def capability_of(architecture: str) -> int:
    """Return the compute capability of an architecture as a number.

    Example:
        >>> capability_of("sm_90a")
        90
    """
    return int(re.sub(r"\D", "", architecture))


def _parts(text: str, option: str, expected: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not parts:
        raise errors.UsageError(
            f"`{option}` names no target",
            argument=option,
            expected=f"{expected}, separated by commas; or `{NONE}`",
            got=repr(text),
            hint="leave it out for the default targets",
        )
    return () if parts == (NONE,) else parts
