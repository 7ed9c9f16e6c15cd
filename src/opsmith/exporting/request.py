"""What `export_onnx` was asked for, read and held to what there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from opsmith import errors
from opsmith.exporting.files import unwritable

Body = Literal["function", "inline", "node"]
OPSETS = range(18, 24)
"""Versions of ONNX's operators that torch's exporter writes."""
DEFAULT_OPSET = 20


@dataclass(frozen=True)
class Request:
    """How a file is to be made.

    Args:
        path: Where it goes.
        body: What becomes of an operator: a node with its reference as a function, the reference's nodes in
            its place, or a node that only a runtime with a kernel for it can compute.
        opset: Version of ONNX's operators.
        verify: Whether the file is compared with PyTorch before it is handed over.
        library: Where a library of the operators' kernels goes; None where there is to be none.
    """

    path: Path
    body: Body
    opset: int
    verify: bool
    library: Path | None = None


def read_request(path: Any, body: Any, opset: Any, verify: Any, library: Any = None) -> Request:
    """Read the options, and see that a file can be written there, before anything takes long.

    Raises:
        UsageError: Saying which does not fit.
    """
    if body not in get_args(Body):
        raise errors.UsageError(
            "unknown form of an operator's body",
            argument="body",
            expected=", ".join(f"`{each}`" for each in get_args(Body)),
            got=repr(body),
            hint='leave it out, or write `body="inline"`',
        )
    number = DEFAULT_OPSET if opset is None else opset
    if not isinstance(number, int) or isinstance(number, bool) or number not in OPSETS:
        raise errors.UsageError(
            "torch's exporter does not write this version of ONNX's operators",
            argument="opset",
            expected=f"{OPSETS[0]} to {OPSETS[-1]}",
            got=repr(opset),
            hint=f"leave it out, and it is {DEFAULT_OPSET}; `onnx.version_converter` may make an older file "
            "of it",
        )
    if not isinstance(verify, bool):
        raise errors.UsageError(
            "`verify` has a value that means nothing",
            argument="verify",
            expected="True or False",
            got=repr(verify),
            hint="leave it out, and the file is compared with PyTorch",
        )
    file = _writable(path, "path", "model.onnx")
    return Request(file, body, number, verify, _read_library(library, file, body))


def _read_library(library: Any, file: Path, body: str) -> Path | None:
    if library is None:
        return None
    if body == "inline":
        raise errors.UsageError(
            "an inlined file has no nodes that a library could compute",
            argument="library",
            expected="`body='function'` or `body='node'`",
            got="`body='inline'`",
            hint="leave `body=` out, or leave `library=` out",
        )
    path = _writable(library, "library", "ops.so")
    if path.absolute() == file.absolute():
        raise unwritable(path, "library", "the file that is exported goes there", "name another one")
    return path


def _writable(path: Any, argument: str, example: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        got = type(path).__name__
        raise unwritable(repr(path), argument, got, f"give the name of a file, `{example}`")
    file = Path(path)
    if file.is_dir():
        raise unwritable(file, argument, "a folder", f"name a file in it, `{example}`")
    if not file.parent.is_dir():
        raise unwritable(file, argument, f"there is no folder `{file.parent}`", "make the folder first")
    if not os.access(file.parent, os.W_OK):
        raise unwritable(file, argument, "the folder is read-only", "name another one")
    return file


def read_names(given: Any, default: Sequence[str], argument: str, taken: Sequence[str] = ()) -> list[str]:
    """Names of inputs or outputs: those that are given, or the default, of which no two are alike.

    Args:
        given: What was given, or None.
        default: One for each tensor.
        argument: What they were given as, for messages.
        taken: Names that other values of the file have.

    Raises:
        UsageError: If there are too few or too many, two are alike, or one is taken.
    """
    if given is None:
        found: list[str] = []
        for name in default:
            found.append(name if name not in found else f"{name}_{len(found)}")
        return found
    names = [given] if isinstance(given, str) else list(given)
    if len(names) != len(default) or len(set(names)) != len(names) or not all(map(_is_name, names)):
        raise errors.UsageError(
            f"`{argument}` does not fit the model",
            argument=argument,
            expected=f"{len(default)} different names: {', '.join(default)}",
            got=", ".join(map(str, names)) or "none",
            hint="give each tensor a name, in this order, or leave it out",
        )
    both = [name for name in names if name in taken]
    if both:
        raise errors.UsageError(
            f"`{both[0]}` is the name of an input and of an output",
            argument=argument,
            expected="names that no input has",
            got=", ".join(names),
            hint="name one of the two otherwise; `input_names=` names inputs",
        )
    return names


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)
