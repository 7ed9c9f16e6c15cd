"""An extension of Griffe: a section `Example:` of a docstring is one of examples."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """The extension that zensical.toml names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in a docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
