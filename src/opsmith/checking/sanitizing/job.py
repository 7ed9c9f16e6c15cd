"""What a process under sanitizers is given to do: a kernel, and the calls to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opsmith.build.form import Form
from opsmith.checking.layouts import Layout


@dataclass(frozen=True)
class Values:
    """The arguments of a sample.

    Args:
        flat: Their values, lists of tensors spread out.
        labels: How messages call each.
        packing: For each argument the place of its value, or the places of its list's.
    """

    flat: tuple[Any, ...]
    labels: tuple[str, ...]
    packing: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """One call.

    Args:
        sample: Which of the job's samples.
        dtype: dtype of floating tensors; None leaves them as they are.
        layouts: The tensors that lie otherwise than contiguous: the place of each, and how it lies.
        forms: Those of the results.
        told: What it is, in words.
        odd: What lies otherwise, in words; empty for nothing.
    """

    sample: int
    dtype: torch.dtype | None
    layouts: tuple[tuple[int, Layout], ...]
    forms: tuple[Form, ...]
    told: str
    odd: str = ""


@dataclass(frozen=True)
class Job:
    """A kernel, and the calls to run it on.

    Args:
        operator: The operator's name.
        arguments: Name and type hint of each argument.
        results: Names of the results, hidden ones too.
        text: The kernel.
        entry: Name of the function in it.
        folder: Where its own headers are; None where that is not known.
        dtypes: Those that a template is made for; None for the usual ones.
        samples: Arguments.
        trials: The calls.
        threads: How many threads it may use.
    """

    operator: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    text: str
    entry: str
    folder: str | None
    dtypes: tuple[torch.dtype, ...] | None
    samples: tuple[Values, ...]
    trials: tuple[Trial, ...]
    threads: int = 2
