"""Checkpoints: all that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from files import replacing
from options import Configuration

FORMAT = "rednet_digits 1"


class CheckpointError(Exception):
    """A checkpoint that cannot be gone on from, and why."""


def write(path: Path, configuration: Configuration, state: dict[str, Any]) -> None:
    """Write a checkpoint, in place of an older one once it is whole."""
    with replacing(path) as temporary:
        torch.save({"format": FORMAT, "configuration": configuration.to_dict(), "state": state}, temporary)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint: its configuration, and the state of its training.

    Raises:
        CheckpointError: If the file is missing, damaged or no checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not compare the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is another one; {MEND}")
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; start without --resume") from None
    except CheckpointError:
        raise
    except Exception as error:  # of zipfile, decompressors, pickle and torch each has errors of its own
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged: {why}; {MEND}") from error
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this example ({FORMAT!r}); {MEND}")
    return loaded["configuration"], loaded["state"]


MEND = "move it away and start without --resume, or name another folder with --out"


def refuse_other(path: Path, written: dict[str, Any], configuration: Configuration) -> None:
    """Refuse to go on under another configuration than the checkpoint's, as the result would be of neither.

    Raises:
        CheckpointError: Naming each value that differs.
    """
    given = configuration.to_dict()
    differences = [
        f"{name} {written.get(name)} there, {given.get(name)} here"
        for name in sorted({*written, *given})
        if written.get(name) != given.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{path} is of another configuration: {'; '.join(differences)}; "
            "give the same options to go on from it, or name another folder with --out"
        )
