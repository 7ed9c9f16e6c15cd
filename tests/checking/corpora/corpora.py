"""All modules that enter operators in the corpus, and how a report on one of them is judged.

There are two corpora: one that was written beside the checker, in `planted_*` and `sound_*`, and one that was
held out, in `heldout_*`. Each is counted apart.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from entries import PLANTED, SOUND, Planted, Sound

from opsmith import Report

COMPILED = ["compile", "export", "opcheck"]
"""Properties left out of a run on a corpus: they compile, which takes seconds each."""

PREFIXES = {"planted": "beside", "sound": "beside", "heldout": "heldout"}


@dataclass(frozen=True)
class Corpus:
    """The names of one corpus's entries."""

    name: str
    planted: tuple[str, ...]
    sound: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def corpora() -> list[Corpus]:
    """Load every module of the corpora, and return what they entered."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem.partition("_")[0] in PREFIXES:
            importlib.import_module(file.stem)
    names = sorted(set(PREFIXES.values()), reverse=True)
    return [
        Corpus(
            name,
            tuple(entry.name for entry in PLANTED.values() if corpus_of(entry) == name),
            tuple(entry.name for entry in SOUND.values() if corpus_of(entry) == name),
        )
        for name in names
    ]


def corpus_of(entry: Planted | Sound) -> str:
    """Return the corpus that an entry belongs to."""
    return PREFIXES[entry.build.__module__.rpartition(".")[2].partition("_")[0]]


def rightly_named(fault: Planted, report: Report) -> bool:
    """Return whether the first failure of a report names the fault.

    A reader fixes what stands first; what follows from it comes last in a report, and does not count.
    """
    return bool(report.failures) and report.failures[0].cause in (fault.cause, *fault.also)


def message(fault: Planted, report: Report) -> str:
    """Return a line with the expected cause of a report, and its causes."""
    said = [f"{each.property}/{each.input}/{each.cause}" for each in report.failures if each.follows is None]
    return f"{fault.name}: expected {fault.cause} of {fault.input}, got {', '.join(said) or 'nothing'}"
