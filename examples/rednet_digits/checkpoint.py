"""Checkpoints: all that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from files import replacing
from options import Configuration

if TYPE_CHECKING:
    from training import Training

FORMAT = "rednet_digits 1"

LONGEST = 300
"""Letters of torch's own message that are shown: it names every parameter."""


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
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is another one; {HINT}")
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; start without --resume") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {HINT}") from error
    except pickle.UnpicklingError:  # whole, by its checksums, but of classes that no checkpoint here has
        loaded = None
    except Exception as error:  # of zipfile, decompressors, pickle and torch each has errors of its own
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged: {why}; {HINT}") from error
    if not _is_checkpoint(loaded):
        raise CheckpointError(f"{path} is no checkpoint of this example ({FORMAT!r}); {HINT}")
    return loaded["configuration"], loaded["state"]


def _is_checkpoint(loaded: Any) -> bool:
    parts = ("configuration", "state")
    marked = isinstance(loaded, dict) and loaded.get("format") == FORMAT
    return (
        marked and all(isinstance(loaded.get(part), dict) for part in parts) and "history" in loaded["state"]
    )


HINT = "move it away and start without --resume, or name another folder with --out"


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


def restore(path: Path, training: Training, state: dict[str, Any]) -> None:
    """Put the state of a checkpoint into a training.

    Raises:
        CheckpointError: If it is that of another network or optimizer: the example's code was changed since.
    """
    try:
        training.load_state_dict(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} does not fit what this code trains: {type(error).__name__}: {why[:LONGEST]}; {HINT}"
        ) from error
