"""What torch loads when its transforms and its compiler are first used: once in a process, and told apart."""

from __future__ import annotations

import gc
import sys
import time

import torch
from torch.autograd import forward_ad

from opsmith.checking.quiet import quiet


def load_compiler() -> float:
    """Have torch load what the properties need of it, and return how many seconds that took.

    Fake tensors, modes and `torch.func.vjp` load torch's compiler, a backward of given gradients what it
    computes sizes with, and forward mode its rules: a second or two for the first operator of a process that
    are no property's, and nothing for those that follow.

    Example:
        >>> _ = load_compiler()
        >>> load_compiler() < 1
        True
    """
    start, before = time.perf_counter(), len(sys.modules)
    with quiet(), forward_ad.dual_level():
        torch.compiler.disable(_nothing)
        forward_ad.make_dual(torch.zeros(1), torch.ones(1))
    if len(sys.modules) > before:
        gc.collect()  # else the first property would have to look through all that was loaded
    return time.perf_counter() - start


def _nothing() -> None:
    """What is never compiled."""
