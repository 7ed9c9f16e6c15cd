"""An entry of the corpus: a Function, its calls, and what its own code allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Samples = Callable[[], list[Arguments]]


class Numbers:
    """Seeded numbers: a maker of samples that is called twice gives equal ones."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=self.generator)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)


def samples(of: Callable[[Numbers], list[Arguments]]) -> Samples:
    return lambda: of(Numbers())


@dataclass(frozen=True, eq=False)
class Entry:
    """One Function of the corpus.

    `second` says what a second derivative is: "own" (its code is right), "truth" (its code alone is silently
    wrong; the operator's must be right), "refused", "never-wrong" (right, or an error) or "untold" (it has no
    meaning).
    """

    name: str
    cls: type[torch.autograd.Function]
    make: Samples
    expected: Any  # dtypes, nested as what forward returns is
    covers: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_samples: bool = False  # its types cannot be told from the class or the signature
    truth: Callable[..., Any] | None = None  # plain torch, every derivative of which is right
    in_place: bool = False
    compiles: bool = True
    exports: bool = True
    vmaps: bool = True
    jvp: bool = True
    second: str = "own"
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # use -> error class, words

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = self.options.get("kind", "true")
        return (kind,) if isinstance(kind, str) else tuple(kind)

    def apply(self, *arguments: Any) -> Any:
        """Call the class as torch does; one that writes into its inputs gets copies."""
        if self.in_place:
            arguments = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
        return self.cls.apply(*arguments)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a result, from the left."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def structure(value: Any) -> Any:
    """The dtypes of a result, nested as the result is."""
    if isinstance(value, tuple):
        return tuple(map(structure, value))
    if isinstance(value, list):
        return list(map(structure, value))
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else value


F64 = "float64"
DRAWS = ("TransformError", "draws random numbers")
ONCE = ("TransformError|GradientNotImplementedError", "once_differentiable")
