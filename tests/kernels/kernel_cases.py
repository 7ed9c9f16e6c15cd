"""References, samples and layouts for the tests of kernels in C++, CUDA and Triton."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import opsmith

WIDE = [torch.float32, torch.float64]
EVERY = [*WIDE, torch.float16, torch.bfloat16]
SHAPES = [(3, 5), (1, 1), (0, 3), (3, 0), (17, 129)]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1, *x.shape[1:]), x])[1:],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def _negative(x: Tensor) -> Tensor:
    """The same numbers with the negative bit set, where torch has that: what is imaginary of a conjugate."""
    if x.dtype not in WIDE:
        return x
    negative = torch.complex(x, -x).conj().imag
    assert negative.is_neg()
    return negative


WITH_NEGATIVE = {**LAYOUTS, "negative": _negative}


def scaled(x: Tensor, by: float, shift: Tensor | None = None) -> Tensor:
    """Scale, and shift by the first number of another tensor."""
    y = x * by
    return y if shift is None else y + shift[0]


def row_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of rows, and how many of each row's numbers are positive."""
    return x.sum(1), (x > 0).sum(1)


def channel_sums(x: Tensor) -> Tensor:
    """Sum over channels."""
    return x.sum(1, keepdim=True).contiguous()


def samples_of_scaled(make: opsmith.Make) -> Iterator[Any]:
    yield make(3, 5), 2.0
    yield make(7), -0.5, make(2)
    yield make(), 1.5
    yield make(0, 3), 2.0
    yield make(4, 6).mT[1:], 0.25


def samples_of_row_sums(make: opsmith.Make) -> Iterator[Any]:
    yield (make(3, 5),)
    yield (make(4, 6).mT[1:],)
    yield (make(2, 0),)


def samples_of_channel_sums(make: opsmith.Make) -> Iterator[Any]:
    yield (make(2, 3, 4, 5),)
    yield (make(1, 1, 3, 2),)


SAMPLES = {
    scaled: samples_of_scaled,
    row_sums: samples_of_row_sums,
    channel_sums: samples_of_channel_sums,
}


def declared(reference: Callable[..., Any], namespace: str) -> Any:
    """An operator of one of the references, with its samples."""
    operator = opsmith.operator(f"{namespace}::{reference.__name__}")(reference)
    operator.samples(SAMPLES[reference])
    return operator


def frames_in(call: Callable[[], Any]) -> list[str]:
    """The functions in Python that a call runs."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    around = ("frames_in", "<lambda>", "OpOverload.__call__")
    return [name for name in seen if not any(part in name for part in around)]
