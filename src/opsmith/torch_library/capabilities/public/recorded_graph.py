"""Autograd's nodes by what torch documents: names, and the attributes that begin with `_saved_`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

PREFIX = "_saved_"
"""What attributes for saved values begin with: torch's notes on autograd, "Saved tensors"."""


def forward_class(node: Any) -> type | None:
    """None: a node's class tells its name alone."""
    return None


def result_forms(node: Any) -> list[tuple[tuple[int, ...], torch.dtype, torch.device]]:
    """None of them."""
    return []


def saved_tensors(node: Any) -> dict[str, Any]:
    """What a node saved, by name; a list has a number behind the name, a Function's are `0`, `1`, ...

    What a hook has packed is unpacked, and what was written to since is left out.

    Raises:
        RuntimeError: If it was freed.
    """
    found: dict[str, Any] = {}
    for label, value in _documented(node):
        if isinstance(value, Tensor):
            found[label] = value
        elif isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            found |= {f"{label}[{at}]" if label else str(at): each for at, each in enumerate(value)}
    return found


def overwritten(node: Any) -> bool:
    """Whether something that a node saved was written to since, so that a backward raises."""
    return any(isinstance(value, _Overwritten) for _, value in _documented(node))


class _Overwritten:
    """Stands for what can no longer be read."""


def _documented(node: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(node):
        if not name.startswith(PREFIX) and name != "saved_tensors":
            continue
        try:
            yield "" if name == "saved_tensors" else name.removeprefix(PREFIX), getattr(node, name)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            yield name.removeprefix(PREFIX), _Overwritten()


def view_base(tensor: Tensor) -> Tensor | None:
    """None: what a tensor is a view of is not told."""
    return None


def after_modules(told: Callable[..., None]) -> Callable[[], None]:
    """Have a function told of every call of a module: it, its arguments but those by keyword, its output.

    Returns:
        What ends that.
    """
    return register_module_forward_hook(told, always_call=True).remove
