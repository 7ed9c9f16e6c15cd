"""How a script finds what is under check, calls it, and calls its reference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.torch_library import capabilities

TEMPORARY = ("checked", "surveyed")
"""Namespaces of operators that a Function class is adopted as for a check alone."""


@dataclass(frozen=True)
class Calling:
    """The words in which a script calls it.

    Args:
        subject: What is under check.
        lines: Lines that bring it in.
        callee: What is called.
        checked: What `opsmith.check` would be given.
        reference: What is called in its place to see what is right; None where there is none.
        by_position: Whether arguments are given by position.
        bound: What the names in it stand for.
        temporary: Whether it was adopted for a check alone, and so has no samples of its own.
    """

    subject: Subject
    lines: tuple[str, ...]
    callee: str
    checked: str
    reference: str | None
    by_position: bool
    bound: Mapping[str, Any]
    temporary: bool = False

    def call(self, sample: Sample) -> str:
        """A call, with every argument by its own name."""
        given: list[str] = []
        adopted = self.subject.specification.adopted
        for argument in sample.flattening.schema.arguments:
            by_name = not self.by_position or argument.keyword_only
            given.append(f"{argument.name}={argument.name}" if by_name else argument.name)
        if self.by_position and adopted is not None and adopted.variadic:
            given[-1] = f"*{given[-1]}"
        return f"{self.callee}({', '.join(given)})"

    def parts(self, sample: Sample) -> list[tuple[str, str]] | None:
        """For each visible result the code behind a call that picks it: of the operator, of the reference.

        None where the results lie in another way than a script can tell.
        """
        subject, schema = self.subject, self.subject.specification.schema
        with subject.seeded(), torch.no_grad():
            args, kwargs = sample.arguments(sample.at())
            returned = subject.called(args, kwargs)
        bare = len(schema.visible) == 1 and subject.specification.adopted is None
        found: list[tuple[str, str]] = []
        for at, one in enumerate([returned] if bare or not isinstance(returned, tuple | list) else returned):
            mine = "" if bare or one is returned else f"[{at}]"
            whole = "" if schema.single else f"[{schema.visible[at] if at < len(schema.visible) else at}]"
            if isinstance(one, list | tuple):
                if not all(isinstance(each, Tensor) or each is None for each in one):
                    return None
                found += [(f"{mine}[{k}]", f"{whole}[{k}]") for k in range(len(one))]
            elif isinstance(one, Tensor) or one is None:
                found.append((mine, whole))
        return found if len(found) == len(subject.results(sample)) else None


def calling(subject: Subject) -> Calling | None:
    """How a script calls it; None for a class of the oldest kind, whose `apply` does not run."""
    specification = subject.specification
    if subject.foreign:
        name = f"torch.ops.{specification.name.replace('::', '.')}"
        module = _registering(subject)
        found = f"# {specification.name}: {specification.where}"
        brings = found if module is None else f"import {module}  {found}"
        return Calling(subject, ("import torch, opsmith", brings, ""), name, name, None, True, {})
    adopted = specification.adopted
    lines: tuple[str, ...]
    if adopted is not None and specification.namespace in TEMPORARY:
        if adopted.takes_self:
            return None
        kind = adopted.function_class
        place, _, inner = kind.__qualname__.rpartition(".")
        bound: dict[str, Any] = {kind.__name__: kind}
        if "<locals>" in place or not _importable(kind):
            lines = ("import torch, opsmith", f"# with {kind.__name__} as it is at {specification.where}", "")
        else:
            first = kind.__qualname__.partition(".")[0]
            lines = ("import torch, opsmith", f"from {kind.__module__} import {first}", "")
            if first != inner:
                lines = (*lines[:-1], f"{inner} = {kind.__qualname__}", "")
        return Calling(
            subject, lines, f"{kind.__name__}.apply", kind.__name__, None, True, bound, temporary=True
        )
    lines = ("import torch, opsmith", "", f"operator = {_finder(subject)}")
    reference = None if specification.opaque else "operator.reference"
    return Calling(subject, lines, "operator", "operator", reference, False, {"operator": subject.operator})


def _registering(subject: Subject) -> str | None:
    """The module whose import registers a `torch.library.custom_op`; None where nothing says it."""
    own = subject.specification.own
    parts = capabilities.custom_parts(own.overload) if own is not None else None
    if parts is None or "<locals>" in parts.function.__qualname__:
        return None
    module = parts.function.__module__
    return module if module in sys.modules and module != "__main__" else None


def _importable(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    found: Any = module
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return kind.__module__ != "__main__" and found is kind


def _finder(subject: Subject) -> str:
    specification = subject.specification
    if specification.module == "__main__" or "<locals>" in specification.qualname:
        return f'opsmith.find_operator("{specification.name}")  # declared at {specification.where}'
    return f'opsmith.find_operator("{specification.name}", "{specification.module}")'
