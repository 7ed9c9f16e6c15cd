"""What opsmith asks torch by public names, and had better be asked in one place."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "privateuseone")

_numbers = itertools.count()


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors lie in the same storage; the stand-ins of a transform have none to compare."""
    try:
        return first.untyped_storage() is second.untyped_storage()
    except NotImplementedError:
        return False


def schema_fault(text: str) -> str | None:
    """What torch's parser says against a schema; None where it takes it."""
    library = torch.library.Library(f"opsmith_parses_{next(_numbers)}", "FRAGMENT")
    try:
        library.define(text)
    except (RuntimeError, ValueError, IndexError) as error:  # the last two for numbers that are out of range
        return str(error)
    return None


def recording() -> bool:
    """Whether operations are being recorded into a graph, in which nothing but operations is remembered."""
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None
