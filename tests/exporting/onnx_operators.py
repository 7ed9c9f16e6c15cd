"""Operators of every form that a node can have, for exports."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

import opsmith


@opsmith.operator("nodes::affine")
def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    y = x @ weight.mT
    y = y if bias is None else y + bias
    return y if scale is None else y * scale


@opsmith.operator("nodes::moments", results=("mean", "spread"))
def moments(x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return x.mean(-1) * scale, x.amax(-1) - x.amin(-1)


@opsmith.operator("nodes::normalised", hidden=("size",), results=("y", "size"))
def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    size = (x * x).mean(-1, keepdim=True).sqrt() + 1
    return x / size, size


normalised.gradients(x=lambda grad, size: grad / size)


@opsmith.operator("nodes::weighted")
def weighted(xs: list[Tensor], weights: list[float]) -> Tensor:
    total = torch.zeros_like(xs[0])
    for x, weight in zip(xs, weights, strict=True):
        total = total + weight * x
    return total


@opsmith.operator("nodes::halves")
def halves(x: Tensor, parts: int = 2) -> list[Tensor]:
    return [part.clone() * (at + 1) for at, part in enumerate(x.chunk(parts, -1))]


@opsmith.operator("nodes::maybe", results=("y", "extra"))
def maybe(x: Tensor, both: bool = False) -> tuple[Tensor, Tensor | None]:
    return x + 1, x * 2 if both else None


class Mode(Enum):
    UP = 1
    DOWN = 2


@opsmith.operator("nodes::described")
def described(
    x: Tensor,
    count: int = 2,
    rate: float = 0.5,
    flag: bool = True,
    word: str = "sum",
    mode: Mode = Mode.UP,
    choice: Literal["a", "b"] = "a",
    kind: torch.dtype = torch.float32,
    number: int | float = 3,
    imaginary: complex = 2j,
    steps: list[int] | None = None,
    rates: tuple[float, ...] = (0.25, 0.5),
    flags: list[bool] | None = None,
    pair: int | tuple[int, int] = 1,
    missing: float | None = None,
) -> Tensor:
    y = x * count * rate + (1.0 if flag else 2.0) + imaginary.imag + number
    y = y + (1 if mode is Mode.UP else -1) + (0 if choice == "a" else 5)
    y = y.sum(0, keepdim=True) if word == "sum" else y.mean(0, keepdim=True)
    y = y + sum(steps or []) + sum(rates) + sum(flags or [])
    return (y * (pair[0] if isinstance(pair, tuple) else pair)).to(kind)


@opsmith.operator("nodes::outer")
def outer(x: Tensor) -> Tensor:
    """A reference that calls operators itself."""
    return opsmith.ops.exp(-x) * moments(x)[0].unsqueeze(-1)


@opsmith.operator("nodes::constant")
def constant(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)


@opsmith.operator("nodes::only_four")
def only_four(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 4 else x - 1


@opsmith.operator("nodes::opaque", opaque=True, shapes="x: ... -> ...")
def opaque(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


@opsmith.operator("nodes::opaque_and_strict", opaque=True, shapes="x: n -> n")
def opaque_and_strict(x: Tensor) -> Tensor:
    if x.shape[0] > 6:
        raise ValueError("it takes no more than 6 numbers")
    return x.clone()


@opsmith.operator("nodes::off")
def off(x: Tensor) -> Tensor:
    return x.sin()


off.kernel("cpu", lambda x: x.sin() * 1.01)


@opsmith.operator("nodes::drawn", random=True)
def drawn(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


class Calls(torch.nn.Module):
    """A function as a module, in evaluation mode."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@opsmith.operator("nodes::fixes_inside")
def fixes_inside(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 4 else x * 3


fixes_inside.fake(lambda x: torch.empty_like(x))


@opsmith.operator("nodes::reads_values")
def reads_values(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


reads_values.fake(lambda x: torch.empty_like(x))


@opsmith.operator("nodes::mixed_results")
def mixed_results(x: Tensor, count: int = 2) -> tuple[Tensor, Tensor, list[Tensor]]:
    return x + 1, x * 2, [x + at for at in range(2, 2 + count)]


@opsmith.operator("nodes::list_first")
def list_first(x: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x + 2, x + 3], x + 1


@opsmith.operator("nodes::widened")
def widened(x: Tensor, size: int) -> Tensor:
    return x.sum(0, keepdim=True).expand(size, -1).clone()


@opsmith.operator("nodes::framed")
def framed(x: Tensor, size: tuple[int, int], value: float = 0.5) -> Tensor:
    rows, columns = size
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]), value=value)


@opsmith.operator("nodes::fixes_a_number")
def fixes_a_number(x: Tensor, size: int) -> Tensor:
    return x * 2 if size == 4 else x * 3


fixes_a_number.fake(lambda x, size: torch.empty_like(x))


@opsmith.operator("nodes::scaled_by")
def scaled_by(x: Tensor, factor: int | float) -> Tensor:
    return x * factor


@opsmith.operator("nodes::scaled_by_float")
def scaled_by_float(x: Tensor, factor: float) -> Tensor:
    return x * factor


def _write(x: Tensor) -> None:
    x.add_(1)


LIBRARY = torch.library.Library("foreign_nodes", "DEF")  # keeps what it registers
LIBRARY.define("writes(Tensor(a!) x) -> ()")
LIBRARY.impl("writes", _write, "CPU")
LIBRARY.define("unknown(Tensor x) -> Tensor")
LIBRARY.impl("unknown", lambda x: x + 1, "CPU")
torch.library.register_fake("foreign_nodes::writes", lambda x: None)
torch.library.register_fake("foreign_nodes::unknown", lambda x: torch.empty_like(x))


@opsmith.operator("nodes::as_complex")
def as_complex(x: Tensor) -> Tensor:
    return torch.complex(x, x)
