"""Compiled code that holds an operator: it must not outlive the sources it was compiled from."""

from __future__ import annotations

import torch
from torch import Tensor

from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities

_EAGER = (Tensor, torch.nn.Parameter)


class CompiledCode:
    """What is known about compiled code that holds one operator."""

    def __init__(self) -> None:
        self._traced = False
        self._marked = False

    def notice(self, specification: Specification, tensors: list[Tensor]) -> None:
        """Take note of a call: one with stand-ins for tensors is being traced.

        A trace comes before the look into the disk caches, so this is the moment to put the hash of the
        operator's sources into their keys. Before Inductor is imported there is no key, and importing it
        would take longer than everything else.
        """
        if self._marked or all(type(tensor) in _EAGER for tensor in tensors):
            return
        self._traced = True
        if capabilities.compiler_imported():
            from opsmith.core.source_hash import operator_hash  # only who compiles waits for this import

            capabilities.mark_compiled_code(specification.name, operator_hash(specification))
            self._marked = True

    def drop(self) -> None:
        """Forget compiled code, since the operator has changed; nothing is lost where it was never traced."""
        if self._traced:
            torch.compiler.reset()
        self._traced = self._marked = False
