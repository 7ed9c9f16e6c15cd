"""Checkpoints: the weights of a decoder, its sizes, and what they were made by."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from files import replacing

from opsmith.ops.decoder import Decoder, DecoderSizes

FORMAT = "opsmith decoder 1"


class CheckpointError(Exception):
    """A checkpoint that cannot be used, and why."""


def write(path: Path, network: Decoder, about: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Write the weights in a dtype, in place of an older checkpoint once it is whole."""
    with replacing(path) as temporary:
        torch.save(
            {
                "format": FORMAT,
                "sizes": network.sizes.to_dict(),
                "weights": {name: each.to(dtype) for name, each in network.state_dict().items()},
                "about": about,
            },
            temporary,
        )


def read(path: Path) -> tuple[Decoder, dict[str, Any]]:
    """Read a network in float32, and what it was made by.

    Raises:
        CheckpointError: If the file is missing, damaged, no checkpoint, or of another network.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; {HINT}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path} is damaged, or no checkpoint at all; {HINT}") from error
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this example ({FORMAT!r}); {HINT}")
    try:
        network = Decoder(DecoderSizes(**loaded["sizes"]))
        network.load_state_dict(loaded["weights"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path} does not fit what this code makes: {type(error).__name__}: {why}; {HINT}"
        ) from error
    return network, loaded["about"]


HINT = "train one: python examples/decoder/train.py"
