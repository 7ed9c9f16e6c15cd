"""Kernel languages: their base class and their registry. No other code of opsmith names a language.

A language is one object in one folder, in opsmith or in another package. Another package names the object in
its entry points, under its key in the group `opsmith.languages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from opsmith import errors
from opsmith.core.guarded_part import GROUP, GuardedPart
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import Operator

if TYPE_CHECKING:  # a declaration does not need them
    from opsmith.kernels.common.ahead import Ahead
    from opsmith.kernels.common.gpu_usage import GpuUsage
    from opsmith.kernels.on_cpu import OnCpu

OWN: Mapping[str, str] = {
    "cpp": "opsmith.kernels.cpp.language",
    "cuda": "opsmith.kernels.cuda.language",
    "triton": "opsmith.kernels.triton.language",
    "derived": "opsmith.kernels.derived.language",
}
"""Modules of opsmith's own languages, by key; each is imported when its language is first named."""
FILE = "_file"
"""Suffix of the option for a source file, after the key of a language."""


@dataclass(frozen=True, slots=True)
class Part:
    """Package that kernels of a language need.

    Attributes:
        name: Name for messages.
        package: Name of the distribution.
        serves: Features that need it.
        hint: Command that installs it.
        library: Library of the system that can replace the package; empty if there is none.
    """

    name: str
    package: str
    serves: str
    hint: str
    library: str = ""


@dataclass(frozen=True, slots=True)
class Declaration:
    """Arguments of one call of `op.kernel(...)`.

    Attributes:
        operator: The operator that the kernel computes.
        device: Type of device.
        source: Value of the option that has the key of the language; None if a file is given.
        file: Absolute path of the source file; None if no file is given.
        dtypes: Value of `dtypes=`; None for the default dtypes.
        strict: True to raise an error if the kernel cannot be built here.
        copies_back: True for `copies="allowed"`.
        deterministic: False for `deterministic=False`.
        options: The other options, which the language has.
        declared: File that calls `op.kernel`; None if it is unknown.
        line: Line of the call.
        language: The language.
    """

    operator: Operator[..., Any]
    device: str
    source: Any
    file: str | PathLike[str] | None
    dtypes: Collection[torch.dtype] | None
    strict: bool
    copies_back: bool
    deterministic: bool
    options: Mapping[str, Any]
    declared: str | None
    line: int
    language: Language

    @property
    def place(self) -> str | None:
        """`file:line` of the call."""
        return None if self.declared is None else f"{self.declared}:{self.line}"

    def ordered_dtypes(self, known: Collection[torch.dtype]) -> tuple[torch.dtype, ...] | None:
        """Return the dtypes in the order of `known`; None for the default dtypes.

        Raises:
            KernelDtypeError: If a dtype is not in `known`.
        """
        if self.dtypes is None:
            return None
        unknown = [dtype for dtype in self.dtypes if dtype not in known]
        if unknown:
            raise errors.KernelDtypeError(
                f"a kernel in {self.language.name} is declared for a dtype that it does not support",
                argument="dtypes",
                expected=", ".join(map(str, known)),
                got=", ".join(sorted(map(str, unknown))),
                hint="leave the dtype out: the reference computes it",
            )
        return tuple(dtype for dtype in known if dtype in set(self.dtypes))

    def require_grid(self, hint: str, *others: str) -> None:
        """Refuse a kernel without a grid and without an option that replaces the grid."""
        if all(self.options.get(name) is None for name in ("grid", *others)):
            raise errors.UsageError(
                f"a kernel in {self.language.name} has no grid",
                argument="grid",
                expected=" or ".join(f"`{name}=`" for name in ("grid", *others)),
                got=", ".join(f"`{name}=`" for name in self.options) or "only the source",
                hint=hint,
            )


class Language(GuardedPart, ABC):
    """Language of kernels.

    Attributes:
        key: Option of `op.kernel` for the source; also the name of the entry point, and of the property of
            `check` that runs its kernels on the CPU.
        name: Name in messages.
        devices: Types of devices on which its kernels run.
        options: Options of a kernel, in addition to the key and to the options of all languages: `dtypes`,
            `strict` and `copies`. They include `deterministic` if the rounding of kernels may differ from run
            to run, and the key with `_file` if the source may be in a file.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    devices: ClassVar[Sequence[str]]
    options: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def kernel(self, declaration: Declaration) -> BuiltKernel[Any]:
        """Make a kernel; it is compiled when it is first needed."""

    @property
    def on_cpu(self) -> type[OnCpu] | None:
        """Class that runs its kernels on the CPU, for `check`.

        None if its kernels run on the CPU unchanged, or cannot run there. A kernel that cannot run on the CPU
        is unverified if its device is missing.
        """
        return None

    @property
    def gpu_usage(self) -> GpuUsage | None:
        """Compiler for GPUs, which may be absent; None if the language has no such compiler."""
        return None

    @property
    def ahead(self) -> Ahead | None:
        """Object that builds its kernels into packages; None if they ship as source."""
        return None

    def parts(self) -> Iterator[Part]:
        """Yield the packages that its kernels need, for `opsmith doctor`."""
        yield from ()

    @classmethod
    def named_types(cls) -> Mapping[str, Any]:
        """Return the types of the language's parts."""
        from opsmith.kernels.common.ahead import Ahead
        from opsmith.kernels.common.gpu_usage import GpuUsage
        from opsmith.kernels.on_cpu import OnCpu

        return {"Ahead": Ahead, "GpuUsage": GpuUsage, "OnCpu": OnCpu}


_loaded: dict[str, Language] = {}
_observers: list[Callable[[Language], None]] = []


def language(key: str) -> Language | None:
    """Return a language by its key; None if no installed package has it.

    Raises:
        UsageError: If two packages have it, or the object of an entry point is not a language.
        ModuleImportError: If the module of an entry point cannot be imported.
    """
    if key not in _loaded:
        found = import_module(OWN[key]).LANGUAGE if key in OWN else _of_a_package(key)
        if found is None:
            return None
        _load(found)
    return _loaded[key]


def _load(found: Language) -> None:
    for observe in _observers:
        observe(found)
    _loaded[found.key] = found


def add_language(found: Language) -> None:
    """Add a language in this process, for example in a notebook; packages use entry points instead.

    It replaces a language that was added earlier with the same key.

    Raises:
        UsageError: If it is not a language, or opsmith has a language with this key.
    """
    if not isinstance(found, Language):
        raise errors.UsageError(
            "only a kernel language can be added",
            argument="found",
            expected="an object of a class that is derived from `opsmith.kernels.languages.Language`",
            got=repr(found),
            hint="make an object of the class: `add_language(Helion())`",
        )
    if getattr(found, "key", None) in OWN:
        raise errors.UsageError(
            f"opsmith already has a kernel language `{found.key}`",
            argument="key",
            expected=f"a key that differs from {', '.join(f'`{key}`' for key in OWN)}",
            got=repr(found.key),
            hint="give the language a different key",
        )
    _refuse_unfit(found)
    _load(found)


SHARED = ("device", "function", "dtypes", "strict", "copies", "deterministic")
"""Arguments of `op.kernel` that all languages have."""


def _refuse_unfit(found: Language) -> None:
    """Refuse a language without a required attribute.

    Raises:
        UsageError: If an attribute is missing, or its key cannot be the name of an option.
    """
    key = getattr(found, "key", None)
    fits = isinstance(key, str) and key.isidentifier() and key not in SHARED and not key.endswith(FILE)
    parts: dict[str, tuple[Any, bool, str]] = {
        "key": (key, fits, "a valid name of an argument, which no other argument of `op.kernel` has"),
        "name": (getattr(found, "name", None), isinstance(getattr(found, "name", None), str), "a text"),
        "devices": (getattr(found, "devices", None), bool(getattr(found, "devices", ())), "a type of device"),
    }
    for name, (value, right, expected) in parts.items():
        if not right:
            raise errors.UsageError(
                f"the kernel language {type(found).__name__} has no valid `{name}`",
                argument=name,
                expected=expected,
                got=repr(value),
                hint=f"define `{name}` in its class",
            )


def own_languages() -> list[Language]:
    """Return opsmith's own languages."""
    return [found for found in map(language, OWN) if found is not None]


def loaded_languages() -> list[Language]:
    """Return the languages that have been named in this process."""
    return [*_loaded.values()]


def installed_keys() -> tuple[str, ...]:
    """Return the keys of opsmith's languages, of installed packages' languages, and of added languages."""
    from importlib.metadata import entry_points

    installed = sorted(point.name for point in entry_points(group=GROUP))
    return tuple(dict.fromkeys((*OWN, *installed, *_loaded)))


def observe_languages(observe: Callable[[Language], None]) -> None:
    """Call a function with each language that is loaded, now and later."""
    for found in [*_loaded.values()]:
        observe(found)
    _observers.append(observe)


def language_of(kernel: Any) -> Language | None:
    """Return the language of a kernel; None for a function in Python."""
    return language(kernel.key) if isinstance(kernel, BuiltKernel) and kernel.key else None


def with_gpu_usage(kernels: Iterable[Kernel]) -> list[tuple[BuiltKernel[Any], GpuUsage]]:
    """Return the kernels that can be compiled for absent GPUs, each with its compiler."""
    found = []
    for kernel in dict.fromkeys(each.given for each in kernels):
        known = language_of(kernel)
        usage = None if known is None else known.gpu_usage
        if isinstance(kernel, BuiltKernel) and usage is not None:
            found.append((kernel, usage))
    return found


def _of_a_package(key: str) -> Language | None:
    from importlib.metadata import entry_points  # declarations in opsmith's languages do not need it

    points = [*entry_points(group=GROUP, name=key)]
    if not points:
        return None
    packages = [f"{point.dist.name if point.dist else 'a package'} (`{point.value}`)" for point in points]
    if len(points) > 1:
        raise errors.UsageError(
            f"{len(points)} installed packages have the kernel language `{key}`",
            argument=key,
            expected=f"one entry point `{key}` in the group `{GROUP}`",
            got=" and ".join(packages),
            hint="keep one of these packages, and uninstall the others",
        )
    try:
        found = points[0].load()
    except Exception as error:
        raise errors.ModuleImportError(
            f"the package of the kernel language `{key}` cannot be imported",
            argument=key,
            expected=f"`{points[0].value}`, by its entry point in the group `{GROUP}`",
            got=f"{type(error).__name__}: {errors.message_of(error)}",
            hint=f"import `{points[0].module}` in Python for the whole traceback; reinstall or update "
            f"{packages[0].partition(' (')[0]}",
        ) from error
    if not isinstance(found, Language) or found.key != key:
        raise errors.UsageError(
            f"the entry point of the kernel language `{key}` does not name this language",
            argument=key,
            expected=f"an `opsmith.kernels.languages.Language` with the key `{key}`",
            got=f"{packages[0]}, which is {found!r}"
            if not isinstance(found, Language)
            else f"{packages[0]}, which has the key `{found.key}`",
            hint="name the object in the entry point, for example `opsmith_helion:LANGUAGE`, or update "
            "the package",
        )
    _refuse_unfit(found)
    return found
