"""Text that comes with Python, as bytes: its own documentation of the language, one topic in ten held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EVERY = 10
"""One topic in so many is held out: 3 % of the bytes of Python 3.11."""


@dataclass(frozen=True)
class Text:
    """Bytes of the topics to train on, and of those held out; both uint8."""

    training: Tensor
    held_out: Tensor


def python_documentation() -> Text:
    """The topics of `help()` in alphabetical order; a paragraph that stands in several is kept once."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    parts: dict[bool, list[str]] = {True: [], False: []}
    for number, name in enumerate(sorted(topics)):
        paragraphs = [each for each in topics[name].strip().split("\n\n") if each not in seen]
        seen.update(paragraphs)
        parts[number % EVERY == EVERY - 1].append("\n\n".join(paragraphs) + "\n\n\n")
    return Text(*(tensor_of("".join(parts[held_out])) for held_out in (False, True)))


def tensor_of(text: str) -> Tensor:
    """The bytes of a text, as [N] of uint8."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batch(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Pieces from random places of a text, [count, length + 1] of int64: the inputs, and each one's next."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()


def pieces(text: Tensor, length: int) -> Tensor:
    """The text cut into pieces [N, length + 1]; each begins with the last byte of the one before."""
    return text.long().unfold(0, length + 1, length)
