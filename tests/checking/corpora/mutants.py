"""The register of operators that are wrong on purpose, and two right ones to begin from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import opsmith


@dataclass(frozen=True)
class Wrong:
    operator: Any
    property: str
    cause: str
    input: str | None
    says: str


WRONG: dict[str, Wrong] = {}


def wrong(
    check: str, cause: str, input: str | None, says: str
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """An operator that `check` must find wrong by this property, for this cause, in these words."""

    def enter(declare: Callable[[], Any]) -> Callable[[], Any]:
        WRONG[declare.__name__] = Wrong(declare(), check, cause, input, says)
        return declare

    return enter


def linear(name: str) -> Any:
    @opsmith.operator(f"wrong::{name}")
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x @ weight.mT
        return y if bias is None else y + bias

    linear.gradients(
        x=lambda grad, weight: grad @ weight,
        weight=lambda grad, x: grad.mT @ x,
        bias=lambda grad: grad.sum(0),
    )

    @linear.samples
    def _(make: Any) -> Any:
        yield make(3, 3), make(3, 3), make(3)
        yield make(3, 3), make(3, 3)

    return linear


def square(name: str, shape: tuple[int, ...] = (3, 4), **options: Any) -> Any:
    @opsmith.operator(f"wrong::{name}", **options)
    def square(x: Tensor) -> Tensor:
        return x * x

    @square.samples
    def _(make: Any) -> Any:
        yield (make(*shape),)

    return square
