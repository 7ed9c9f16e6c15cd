"""`shapes=`: letters are bound over a call's tensors, and calls that do not fit are refused, by any road."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.core.schema import schema_of
from opsmith.core.shapes import NO_SIZE, read_shapes


def window(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """x [..., L], weight [K, 3], bias [K]."""
    found = x.unfold(-1, 3, stride) @ weight.mT
    return found if bias is None else found + bias


SCHEMA = schema_of(window, "shapes::window")
SHAPES = read_shapes("x: ... L, weight: K 3, bias: K -> ... (L-3)//stride+1 K", SCHEMA)


def test_results_follow_from_arguments() -> None:
    values = [torch.ones(2, 5, 9), torch.ones(4, 3), None, 2]
    sizes, fault = SHAPES.bind(SCHEMA, values)
    assert fault is None
    assert SHAPES.results[0].evaluate(sizes) == window(*values).shape


@pytest.mark.parametrize(
    ("shapes", "argument", "expected"),
    [
        (((), (4, 3)), "x", "`... L`: 1 or more dimensions"),
        (((9,), (4, 2)), "weight", "`K 3` with 3 = 3"),
        (((9,), (4, 3, 1)), "weight", "`K 3`: 2 dimensions"),
        (((9,), (4, 3), (5,)), "bias", "`K` with K = 4"),
    ],
    ids=["leading", "number", "count", "letter"],
)
def test_what_does_not_fit(shapes: tuple[tuple[int, ...], ...], argument: str, expected: str) -> None:
    x, weight, *bias = [torch.ones(shape) for shape in shapes]
    _, fault = SHAPES.bind(SCHEMA, [x, weight, *(bias or [None]), 1])
    assert fault is not None
    assert fault[:2] == (argument, expected)


def test_leading_dimensions_are_the_same_everywhere() -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        return x * y.sum(-1, keepdim=True)

    schema = schema_of(both, "shapes::both")
    shapes = read_shapes("x: ... M, y: ... _ -> ... M", schema)
    assert shapes.bind(schema, [torch.ones(2, 3), torch.ones(2, 5)])[1] is None
    fault = shapes.bind(schema, [torch.ones(2, 3), torch.ones(4, 5)])[1]
    assert fault == ("y", "`... _` with ... = [2]", "[4, 5]")


def test_leading_dimensions_of_a_tensor_that_is_none() -> None:
    @opsmith.operator("shapes::shifted", shapes="x: ... N, by: M -> ... M")
    def shifted(x: Tensor | None, by: Tensor) -> Tensor:
        return by * 2 if x is None else x.sum(-1, keepdim=True) + by

    assert shifted(torch.ones(2, 3), torch.ones(4)).shape == (2, 4)
    assert shifted(None, torch.ones(4)).shape == (4,)


def test_expressions_and_lists() -> None:
    def halves(xs: list[Tensor], y: Tensor) -> Tensor:
        return torch.cat(xs) + y

    schema = schema_of(halves, "shapes::halves")
    shapes = read_shapes("xs: M, y: 2*M -> 2*M", schema)
    assert shapes.bind(schema, [[torch.ones(3), torch.ones(3)], torch.ones(6)])[1] is None
    assert shapes.bind(schema, [[torch.ones(3), torch.ones(4)], torch.ones(6)])[1] == (
        "xs[1]",
        "`M` with M = 3",
        "[4]",
    )
    fault = shapes.bind(schema, [[torch.ones(3)], torch.ones(5)])[1]
    assert fault == ("y", "`2*M` with 2*M = 6", "[5]")


def test_a_remainder_is_a_size() -> None:
    def rest(x: Tensor, chunk: int) -> Tensor:
        return x[: x.shape[0] % chunk]

    schema = schema_of(rest, "shapes::rest")
    shapes = read_shapes("x: N -> N%chunk", schema)
    for chunk, size in ((3, 1), (7, 0)):
        sizes, fault = shapes.bind(schema, [torch.ones(7), chunk])
        assert (shapes.results[0].evaluate(sizes), fault) == ((size,), None)
    sizes, _ = shapes.bind(schema, [torch.ones(7), 0])
    assert shapes.results[0].evaluate(sizes) == (NO_SIZE,)


@opsmith.operator("shapes::scaled", shapes="x: B M, by: M -> B M")
def scaled(x: Tensor, by: Tensor) -> Tensor:
    return x * by


@opsmith.operator("shapes::numpy_outer", opaque=True, shapes="x: N, y: M -> N M")
def numpy_outer(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy()[:, None] * y.numpy()[None])


WRONG = (torch.ones(2, 3), torch.ones(1))


def test_calls_are_held_to_them_by_every_road() -> None:
    scaled(torch.ones(2, 3), torch.ones(3))  # installs the fast path
    roads: list[Any] = [
        scaled,
        scaled.torch_operator,
        lambda x, by: torch.vmap(scaled, (0, None))(x.expand(5, 2, 3), by),
        lambda *args: scaled(*(each.to("meta") for each in args)),
        lambda x, by: scaled(x.clone().requires_grad_(), by),
    ]
    for road in roads:
        with pytest.raises(opsmith.errors.ShapeError):
            road(*WRONG)


@pytest.mark.compile
def test_they_hold_for_sizes_not_known_when_compiled() -> None:
    compiled = torch.compile(scaled, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows, columns in ((2, 3), (4, 5)):
        torch.testing.assert_close(
            compiled(torch.ones(rows, columns), torch.ones(columns)), torch.ones(rows, columns)
        )


@pytest.mark.slow
def test_an_opaque_operator_needs_no_fake_kernel() -> None:
    made = numpy_outer(torch.ones(2, device="meta"), torch.ones(3, device="meta", dtype=torch.float64))
    assert (made.shape, made.dtype) == ((2, 3), torch.float64)
    samples = [(torch.ones(2), torch.ones(3))]
    report = opsmith.check(numpy_outer, samples=samples, only=["forward", "integration"])
    assert report.passed_as_asked, str(report)


def test_an_opaque_operator_with_an_unknown_size_does() -> None:
    @opsmith.operator("shapes::unique", opaque=True, shapes="x: N -> _")
    def unique(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()[:1].copy())

    with pytest.raises(opsmith.errors.MissingFakeError):
        unique(torch.ones(2, device="meta"))


def test_a_number_that_is_not_given_is_no_size() -> None:
    @opsmith.operator("shapes::perhaps", shapes="x: n -> n")
    def perhaps(x: Tensor, n: int | None = None) -> Tensor:
        return x * 2

    for _ in range(3):
        assert perhaps(torch.ones(3)).shape == (3,)
        assert perhaps(torch.ones(3), 3).shape == (3,)
        with pytest.raises(opsmith.errors.ShapeError):
            perhaps(torch.ones(3), 4)


def test_a_fake_promotes_as_torch_does() -> None:
    @opsmith.operator("shapes::scaled_by_a_number", opaque=True, shapes="x: N, s: -> N")
    def by_number(x: Tensor, s: Tensor) -> Tensor:
        return x * s

    x, s = torch.ones(3), torch.tensor(3.0, dtype=torch.float64)
    assert by_number(x, s).dtype == by_number(x.to("meta"), s.to("meta")).dtype == torch.float32
