"""Whether a call sets torch's random state, for everybody, instead of drawing from it."""

from __future__ import annotations

import torch

from opsmith.checking.mistakes import Overlooking
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

SEEDS = (11, 12)


def seeds(subject: Subject, sample: Sample) -> bool:
    """Whether torch's random state after a call is the same, whatever it was before.

    Args:
        subject: What is under check.
        sample: What it is called on.
    """
    after = []
    with torch.random.fork_rng():
        for seed in SEEDS:
            torch.manual_seed(seed)
            args, kwargs = sample.arguments(sample.at())
            with Overlooking():  # the properties tell what it raises
                subject.called(args, kwargs)
            after.append(torch.get_rng_state())
    return torch.equal(*after)
