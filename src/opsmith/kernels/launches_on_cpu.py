"""Kernel launches by any code, which run on the CPU if their language supports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from opsmith.kernels.languages import loaded_languages, own_languages

Launched = dict[str, dict[str, None]]
"""Names of the kernels that ran, by the words for the way they ran."""
_ENTERED: list[Launched] = []
"""Kernels that ran in each active `launches_on_cpu`, if a language can run them."""


@contextmanager
def launches_on_cpu() -> Iterator[None]:
    """Context manager in which languages run kernel launches on CPU tensors."""
    launched: Launched = {}
    with ExitStack() as stack:
        own_languages()
        for each in loaded_languages():
            words = each.on_cpu.launches_ran if each.on_cpu is not None else ""
            if each.on_cpu is not None and words:
                names: dict[str, None] = {}
                context = each.on_cpu.launches(names.setdefault)
                if context is not None:
                    stack.enter_context(context)
                    launched[words] = names
        if not launched:
            yield
            return
        _ENTERED.append(launched)
        try:
            yield
        finally:
            _ENTERED.pop()


def runs_launches() -> bool:
    """Return True inside of `launches_on_cpu` if a language, whose package is imported, runs launches."""
    return bool(_ENTERED)


def launched_kernels() -> dict[str, tuple[str, ...]]:
    """Return the names of the kernels that ran in the innermost `launches_on_cpu`, by the way they ran."""
    return {words: tuple(names) for words, names in _ENTERED[-1].items() if names} if _ENTERED else {}
