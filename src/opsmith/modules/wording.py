"""What one declaration is about, and how a word of it that does not fit is refused."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from opsmith import errors
from opsmith.core.calls import shown
from opsmith.core.specification import Specification


@dataclass(frozen=True)
class Words:
    """The words of one call of `op.module(...)`.

    Args:
        specification: The operator.
        where: `file:line` of the call.
    """

    specification: Specification
    where: str

    def refuse(
        self, problem: str, argument: str, hint: str, *, expected: str | None = None, got: str | None = None
    ) -> errors.ModuleDeclarationError:
        """The error for a word that does not fit."""
        return errors.ModuleDeclarationError(
            problem,
            operator=self.specification.name,
            argument=argument,
            expected=expected,
            got=got,
            where=self.where,
            hint=hint,
        )

    @cached_property
    def tensors(self) -> list[str]:
        """Arguments that a module may own: single tensors."""
        return [
            each.name
            for each in self.specification.schema.arguments
            if each.kind.is_tensor and not each.kind.sequence
        ]

    @cached_property
    def pattern_letters(self) -> list[str]:
        """Letters of `shapes=` that stand for a size."""
        shapes = self.specification.shapes
        if shapes is None:
            return []
        found = {letter for dims in shapes.arguments.values() for letter in dims.letters}
        return sorted(found - shapes.integers)

    def names(self, word: str, given: Any) -> list[str]:
        """The items of a word that is a list of names."""
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise self.refuse(
                f"`{word}` is a list of names",
                word,
                f'write `{word}=("{given}",)`, with a comma'
                if isinstance(given, str)
                else f"give {word} names",
                got=shown(given),
            )
        names = list(given)
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong:
            raise self.refuse(
                f"`{word}` is a list of names", word, "write names as text", got=shown(wrong[0])
            )
        return names

    def class_name(self, name: Any) -> str:
        """Name of the class: the one given, or the operator's in CamelCase."""
        if name is None:
            words = re.split("_+", self.specification.short_name)
            return "".join(word[:1].upper() + word[1:] for word in words) or "Module"
        if not is_name(name):
            raise self.refuse(
                "the class needs a name that Python can bind",
                "name",
                'write `name="Linear"`',
                expected="an identifier",
                got=shown(name),
            )
        return str(name)


def is_name(name: Any) -> bool:
    """Whether Python can bind this name."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
