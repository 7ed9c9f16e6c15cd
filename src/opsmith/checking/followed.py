"""A call that autograd follows, of an operator that may write into its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opsmith.checking.derivative import IN_PLACE
from opsmith.checking.sample import replica


def called(
    call: Callable[[list[Any]], Any], flat: Sequence[Any], places: Sequence[int]
) -> tuple[list[Any], Any]:
    """Call a function on copies of some arguments, of which some require a gradient.

    Args:
        call: Takes flat arguments.
        flat: Flat arguments, which stay as they are.
        places: The arguments that require a gradient.

    Returns:
        The arguments that gradients can be asked for, and what the call returns. What writes into an argument
        takes no leaves, and gets what autograd has computed from them.
    """
    with torch.enable_grad():
        leaves = _leaves(flat, places)
        try:
            return leaves, call(leaves)
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
        leaves = _leaves(flat, places)
        return leaves, call([leaf.clone() if place in places else leaf for place, leaf in enumerate(leaves)])


def _leaves(flat: Sequence[Any], places: Sequence[int]) -> list[Any]:
    copies = [replica(value) for value in flat]
    return [copy.requires_grad_() if place in places else copy for place, copy in enumerate(copies)]
