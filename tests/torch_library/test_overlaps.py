"""Written tensors that overlap others are refused before anything is computed; interleaved ones are not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.torch_library.writes import owns_its_elements, shares_elements


@opsmith.operator("overlaps::add_into", mutates=["dst"])
def by_reference(dst: Tensor, src: Tensor) -> None:
    dst.add_(src)


@opsmith.operator("overlaps::add_by_kernel", mutates=["dst"])
def by_kernel(dst: Tensor, src: Tensor) -> None:
    dst.add_(src)


@by_kernel.kernel("cpu")
def _(dst: Tensor, src: Tensor) -> None:
    for at in itertools.product(*map(range, dst.shape)):
        dst[at] += src[at]


@opsmith.operator("overlaps::add_in_cpp", mutates=["dst"])
def in_cpp(dst: Tensor, src: Tensor) -> None:
    dst.add_(src)


in_cpp.kernel(
    "cpu",
    entry="add",
    cpp="""
template <class T>
void add(View<T, 2> dst, View<const T, 2> src) {
  for (int64_t i = 0; i < dst.size(0); i++)
    for (int64_t j = 0; j < dst.size(1); j++) dst(i, j) += src(i, j);
}
""",
)

OPERATORS = {"reference": by_reference, "kernel": by_kernel, "C++": in_cpp}
OVERLAPPING: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "columns": lambda x: (x[:, :-1], x[:, 1:]),
    "columns backwards": lambda x: (x[:, 1:], x[:, :-1]),
    "rows": lambda x: (x[1:], x[:-1]),
    "every second column": lambda x: (x[:, ::2], x[:, 2:5]),
    "transposed": lambda x: (x[:4, :4].t(), x[:4, :4]),
    "a diagonal and a row": lambda x: (x.as_strided((1, 4), (6, 7)), x[2:3, :4]),
}
INTERLEAVED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "halves of rows": lambda x: (x[:, :3], x[:, 3:]),
    "columns in turns": lambda x: (x[:, ::2], x[:, 1::2]),
    "rows in turns": lambda x: (x[::2], x[1::2]),
    "two diagonals": lambda x: (x.as_strided((1, 3), (6, 7)), x.as_strided((1, 3), (6, 7), 6)),
    "keys and values": lambda x: x.view(4, 2, 3).unbind(1),
}


def numbers() -> Tensor:
    return torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", OVERLAPPING)
def test_overlapping_tensors_are_refused_before_a_write(case: str, operator: str) -> None:
    call, x, expected = OPERATORS[operator], numbers(), numbers()
    for context in (torch.enable_grad, torch.inference_mode, torch.inference_mode):
        apart = OVERLAPPING[case](torch.zeros(4, 6))[0], OVERLAPPING[case](torch.zeros(4, 6))[1]
        with context():
            call(*apart)  # a known call is refused, too
            with pytest.raises(errors.MutationError) as caught:
                call(*OVERLAPPING[case](x))
        assert "the written `dst` shares elements with `src`" in str(caught.value)
        assert caught.value.hint == "call it with `src.clone()`"
        assert torch.equal(x, expected)
    dst, src = OVERLAPPING[case](x)
    call(dst, src.clone())
    dst, src = OVERLAPPING[case](expected)
    dst.add_(src.clone())
    assert torch.equal(x, expected)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", INTERLEAVED)
def test_interleaved_tensors_are_written(case: str, operator: str) -> None:
    x, expected = numbers(), numbers()
    for context in (torch.enable_grad, torch.inference_mode, torch.inference_mode):
        with context():
            OPERATORS[operator](*INTERLEAVED[case](x))
        dst, src = INTERLEAVED[case](expected)
        dst.add_(src)
        assert torch.equal(x, expected)


def test_two_that_are_written() -> None:
    @opsmith.operator("overlaps::shift_both", mutates=["a", "b"])
    def shift_both(a: Tensor, b: Tensor) -> None:
        a.add_(1)
        b.add_(2)

    x = numbers()
    with pytest.raises(errors.MutationError) as caught:
        shift_both(x[:, :-1], x[:, 1:])
    assert caught.value.hint == "call it with `b.clone()`, and copy the result back"
    assert torch.equal(x, numbers())
    b = x[:, 1:].clone()
    shift_both(x[:, :-1], b)
    x[:, 1:].copy_(b)
    expected = numbers() + torch.tensor([1.0, 2, 2, 2, 2, 2])
    assert torch.equal(x, expected)


@pytest.mark.parametrize(("size", "stride"), [((4, 2), (1, 1)), ((4, 3), (2, 3)), ((2, 3, 2), (3, 2, 1))])
@pytest.mark.parametrize("operator", ["reference", "kernel"])
def test_one_that_overlaps_itself(operator: str, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    x = numbers()
    for _ in range(2):
        OPERATORS[operator](torch.ones(size), torch.ones(size))  # a known call is refused, too
    with pytest.raises(
        errors.MutationError, match="several elements of `dst` share the same memory"
    ) as caught:
        OPERATORS[operator](x.as_strided(size, stride), torch.ones(size))
    assert caught.value.hint == "call it on `dst.clone()`"
    assert torch.equal(x, numbers())
    clone = x.as_strided(size, stride).clone()
    OPERATORS[operator](clone, torch.ones(size))
    assert torch.equal(clone, x.as_strided(size, stride) + 1)


def addresses(tensor: Tensor) -> list[int]:
    """The byte of each element, and those behind it that belong to it."""
    item, begin = tensor.element_size(), tensor.storage_offset()
    steps = [[at * stride for at in range(size)] for size, stride in zip(tensor.shape, tensor.stride())]  # noqa: B905
    return [(begin + sum(at)) * item + byte for at in itertools.product(*steps) for byte in range(item)]


def test_layouts_are_compared_element_by_element() -> None:
    """Random layouts of one memory, in several dtypes, beside a list of all their bytes."""
    draw, memory = random.Random(0), torch.zeros(300)
    seen = set()
    for _ in range(1500):
        views, bytes_of = [], []
        for _ in range(2):
            dims = draw.randint(0, 3)
            size = [draw.randint(1, 4) for _ in range(dims)]
            stride = [draw.choice([0, 1, 2, 3, 5, 7, 12, 20]) for _ in range(dims)]
            dtype = draw.choice([torch.float32, torch.uint8, torch.float64])
            views.append(memory.view(dtype).as_strided(size, stride, draw.randint(0, 30)))
            bytes_of.append(addresses(views[-1]))
        shares = not set(bytes_of[0]).isdisjoint(bytes_of[1])
        owns = len(set(bytes_of[0])) == len(bytes_of[0])
        assert (shares_elements(*views), owns_its_elements(views[0])) == (shares, owns), views
        seen.add((shares, owns))
    assert len(seen) == 4
