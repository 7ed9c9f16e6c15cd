"""Kernels that `op.kernel(...)` declares with source code: the arguments that all languages share."""

from __future__ import annotations

import difflib
import linecache
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from opsmith import errors
from opsmith.build.source_text import file_of
from opsmith.core.guarded_part import GROUP, unusable
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.kernels.languages import (
    FILE,
    OWN,
    Declaration,
    Language,
    installed_keys,
    language,
    own_languages,
)


def build_kernel(
    operator: Operator[..., Any],
    device: str,
    *,
    frame: FrameType | None,
    function: Callable[..., Any] | None,
    dtypes: Collection[torch.dtype] | None,
    strict: bool,
    options: Mapping[str, Any],
) -> BuiltKernel[Any]:
    """Make a kernel from source code; it is compiled when it is first needed.

    Args:
        operator: The operator that the kernel computes.
        device: Type of device.
        frame: Frame that declares the kernel.
        function: A function in Python; refused, since it is not source code.
        dtypes: The value of `dtypes=`.
        strict: True to raise an error if the kernel cannot be built here.
        options: A source, under the key of its language, and the options of the language.

    Raises:
        UsageError: If the arguments contradict one another, or no installed package has the language.
        ModuleImportError: If the package with the language cannot be imported.
        KernelSourceError, KernelDtypeError, KernelSignatureError, LaunchError: If the source, a dtype, a
            parameter or the launch is not valid.
    """
    declared = None if frame is None else _file_of(frame)
    given, chosen = _source_of(options, function, strict)
    common = {"copies", *({"deterministic"} & {*chosen.options})}
    rest = {name: value for name, value in options.items() if name not in {given, *common}}
    _check_options(chosen, rest)
    if device not in chosen.devices:
        first = next(iter(chosen.devices))
        raise errors.UsageError(
            f"a kernel in {chosen.name} is declared for `{device}`",
            argument=given,
            expected=f"{' or '.join(f'`{each}`' for each in chosen.devices)}, on which its kernels run",
            got=repr(device),
            hint=f"write `op.kernel({first!r}, {given}=...)`",
        )
    in_file = given != chosen.key
    kernel = chosen.kernel(
        Declaration(
            operator,
            device,
            source=None if in_file else options[given],
            file=file_of(options[given], declared) if in_file else None,
            dtypes=dtypes,
            strict=strict,
            copies_back=_allows_copies(operator, options.get("copies")),
            deterministic=_is_deterministic(options.get("deterministic", True)),
            options=rest,
            declared=declared,
            line=0 if frame is None else frame.f_lineno,
            language=chosen,
        )
    )
    _refuse_unfit(kernel, chosen, operator)
    kernel.declared = declared
    return kernel


def _refuse_unfit(kernel: BuiltKernel[Any], chosen: Language, operator: Operator[..., Any]) -> None:
    """Refuse a kernel of a language without the attributes that opsmith reads.

    Raises:
        LanguageError: If its class did not call `super().__init__`, or its names differ from the language's.
    """
    source = getattr(kernel, "source", None)
    for name, fits, expected in (
        ("key", kernel.key == chosen.key, f"{chosen.key!r}, the key of its language,"),
        (
            "language",
            isinstance(getattr(kernel, "language", None), str),
            f"{chosen.name!r}, the name of its language,",
        ),
        (
            "operator",
            getattr(kernel, "operator", None) is operator,
            "the operator of `super().__init__(declaration.operator, read, strict=declaration.strict)`",
        ),
        (
            "source",
            all(isinstance(getattr(source, each, None), str) for each in ("entry", "where")),
            "an object with the texts `entry`, `text` and `where`",
        ),
    ):
        if not fits:
            raise unusable(kernel, name, expected, getattr(kernel, name, None), (chosen,))


def _source_of(
    options: Mapping[str, Any], function: Callable[..., Any] | None, strict: bool
) -> tuple[str, Language]:
    """Return the option with the source code, and its language.

    Raises:
        UsageError: If there is no such option, or there are several.
        ModuleImportError: See `language`.
    """
    given = [name for name in options if name.removesuffix(FILE) in OWN]
    unread = [name for name in options if name not in given]
    if not given:  # an installed package may have the language
        given = [name for name in unread if language(name.removesuffix(FILE)) is not None]
    if len(given) == 1 and function is None:
        found = language(given[0].removesuffix(FILE))
        if found is not None and given[0] in (found.key, *found.options):
            return given[0], found
        given, unread = [], given
    sources = [f"`{name}=`" for name in _sources()]
    known = {name for each in own_languages() for name in each.options}
    new = [name for name in unread if name not in known]
    if not given and function is None and new:
        close = difflib.get_close_matches(new[0], _sources(), n=1)
        raise errors.UsageError(
            f"no installed package has a kernel language for `{new[0]}=`",
            argument=new[0],
            expected=f"one of {', '.join(sources)}",
            got=", ".join(f"`{name}=`" for name in new),
            hint=f"did you mean `{close[0]}=`?"
            if close
            else f"install the package with the language: it has an entry point "
            f"`{new[0].removesuffix(FILE)}` in the group `{GROUP}`",
        )
    shown = [*(["a function"] if function is not None else []), *(f"`{name}=`" for name in given)]
    others = [f"`{name}=`" for name in (*options, *(["strict"] if strict else []))]
    raise errors.UsageError(
        "a kernel must have exactly one source",
        expected=f"one of a function in Python, {', '.join(sources)}",
        got=" and ".join(shown) or f"only {' and '.join(others)}",
        hint="declare each kernel by a separate call of `op.kernel(...)`",
    )


def _sources() -> list[str]:
    """Return the options for source code, including options for languages of installed packages."""
    files = [key + FILE for key, each in zip(OWN, own_languages(), strict=True) if key + FILE in each.options]
    return [*installed_keys(), *files]


def _check_options(chosen: Language, options: Mapping[str, Any]) -> None:
    """Refuse unknown options of a language; the error names the languages that have the first one."""
    unknown = [name for name in options if name not in chosen.options]
    if not unknown:
        return
    if language(unknown[0]) is not None:
        raise errors.UsageError(
            "a kernel must have exactly one source",
            argument=unknown[0],
            expected="a source in one language",
            got=f"`{chosen.key}=` and `{unknown[0]}=`",
            hint="declare each kernel by a separate call of `op.kernel(...)`",
        )
    names = [name for name in chosen.options if name != chosen.key + FILE]
    close = difflib.get_close_matches(unknown[0], chosen.options, n=1)
    others = [f"`{each.key}=`" for each in own_languages() if unknown[0] in each.options]
    if close:
        hint = f"did you mean `{close[0]}=`?"
    else:
        hint = f"leave `{unknown[0]}=` out{f'; it is for {_listed(others)}' if others else ''}"
    raise errors.UsageError(
        f"a kernel in {chosen.name} is given unknown options",
        argument=unknown[0],
        expected=", ".join(f"`{name}=`" for name in (*names, "dtypes", "strict", "copies")),
        got=", ".join(f"`{name}=`" for name in unknown),
        hint=hint,
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _file_of(frame: FrameType) -> str:
    """Return the file of the code that a frame runs, or the module's file if this file has no text."""
    named = frame.f_code.co_filename
    has_text = os.path.exists(named) or bool(linecache.getlines(named))  # for example a notebook's cell
    return named if has_text else str(frame.f_globals.get("__file__") or named)


def _is_deterministic(value: Any) -> bool:
    if not isinstance(value, bool):
        raise errors.UsageError(
            "`deterministic=` of a kernel must be True or False",
            argument="deterministic",
            expected="True, or False if the kernel's rounding differs from run to run",
            got=repr(value),
            hint="leave `deterministic=` out for a kernel that adds in a fixed order",
        )
    return value


def _allows_copies(operator: Operator[..., Any], copies: Any) -> bool:
    if copies is None:
        return False
    if copies != "allowed":
        raise errors.UsageError(
            "`copies=` of a kernel has only one possible value",
            argument="copies",
            expected='`copies="allowed"`',
            got=repr(copies),
            hint="leave `copies=` out if the kernel must refuse arguments that it would have to copy back",
        )
    if not operator.specification.schema.written:
        raise errors.UsageError(
            "`copies=` is given for an operator that writes into no argument",
            argument="copies",
            expected="an operator with `mutates=`",
            got=repr(copies),
            hint="leave `copies=` out: opsmith copies arguments that a kernel only reads, if the kernel "
            "needs copies",
        )
    return True
