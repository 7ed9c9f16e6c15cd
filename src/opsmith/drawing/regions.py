"""The calls of modules as regions of a recording: a call that is inside another is a region inside it."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from opsmith.drawing.calls import Call, Recording, tensors_in
from opsmith.drawing.graph import Group
from opsmith.drawing.storages import form_of
from opsmith.torch_library import capabilities

_WRAPPERS = ("_orig_mod", "module")
"""What `torch.compile` and data-parallel wrappers call what they wrap; no part of a path that users know."""


@contextmanager
def following(recording: Recording, root: torch.nn.Module) -> Iterator[None]:
    """A region in which each call of a part of a module is one of the recording's regions."""
    paths = _paths(root)
    calls: Counter[str] = Counter()
    thread = threading.get_ident()

    def enter(module: torch.nn.Module, args: Any) -> None:
        path = paths.get(id(module))
        if path is None or threading.get_ident() != thread:
            return
        calls[path] += 1
        label = path if calls[path] == 1 else f"{path} #{calls[path]}"
        recording.open(
            Group(f"g{len(recording.groups)}", label, "module", type(module).__name__, recording.innermost)
        )

    def leave(module: torch.nn.Module, *given: Any) -> None:
        if id(module) in paths and threading.get_ident() == thread:
            # After an exception torch leaves out the keyword arguments, and there is no output.
            _claim_unseen(recording, module, given[:-1], given[-1])
            recording.close()

    # torch's hooks for all modules: those of TorchScript take none of their own.
    before, remove_after = register_module_forward_pre_hook(enter), capabilities.after_modules(leave)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield
    finally:
        before.remove()
        remove_after()


def _paths(root: torch.nn.Module) -> dict[int, str]:
    """What users call the parts of a module; what only wraps a part is none."""
    found = {}
    for name, part in root.named_modules():
        wraps = any(child == "_orig_mod" for child, _ in part.named_children())
        if part is not root and not wraps and _known(name):
            found[id(part)] = _known(name)
    return found


def _known(name: str) -> str:
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(part for part in parts if part != "_orig_mod")


def _claim_unseen(recording: Recording, module: torch.nn.Module, given: Any, output: Any) -> None:
    """Where a module has computed something unseen, in TorchScript or in C++, let it be a call itself."""
    passed = list(tensors_in(given))
    known = {id(each) for each in passed}
    unseen = [each for each in tensors_in(output) if id(each) not in known and not recording.has_made(each)]
    owned = {id(each) for each in (*module.parameters(), *module.buffers())}
    unseen = [each for each in unseen if id(each) not in owned]
    if not unseen:
        return
    recording.add(
        Call(
            type(module).__name__,
            None,
            recording.innermost,
            [(recording.source_of(each), "") for each in passed],
            tuple(form_of(each) for each in unseen),
            (("inside", "not seen: it does not run in Python"),),
            "",
            "",
        ),
        unseen,
    )
