"""Messages about samples that cannot be used: which of them, what it has, and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from functions import Doubled, Product
from torch.autograd import Function

import opsmith
from opsmith import errors

FAST = ["forward"]
HERE = Path(__file__)


class Joined(Function):
    @staticmethod
    def forward(ctx: Any, xs: Any, dim: Any = 0) -> Any:
        return torch.cat(xs, dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None


class Silent(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Greek(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, λ: Any) -> Any:
        return x * λ

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


class Größe(Doubled):
    """Its name has letters beyond ASCII."""


def vector() -> torch.Tensor:
    return torch.ones(3)


def failing() -> Any:
    raise LookupError("no data file")  # there is none


MISFITS: dict[str, tuple[Any, list[str]]] = {
    "too-few": ([(vector(),)], ["sample 0 has 1 argument, and `Product.forward` takes 2 (x, y)"]),
    "too-many": ([(vector(),) * 3], ["sample 0 has 3 arguments, and `Product.forward` takes 2 (x, y)"]),
    "ragged": ([(vector(), vector()), (vector(),)], ["sample 1 has 1 argument"]),
    "no-list": (
        (vector(), vector()),
        ["sample 0 has 1 argument", "these look like the arguments of one call: put them into a list"],
    ),
    "no-list-number": ((vector(), 2.0), ["these look like the arguments of one call"]),
    "text": ("abc", ["its samples are not a list of calls", "got: str 'abc'"]),
    "number": (3, ["its samples are not a list of calls", "got: int 3"]),
    "tensor": (torch.ones(2, 3), ["its samples are not a list of calls", "got: Tensor of torch.float32"]),
    "mapping": ({"x": vector()}, ["its samples are not a list of calls", "got: dict"]),
    "nothing": (lambda: None, ["its samples are not a list of calls", "got: None", f"where: {HERE}:"]),
    "mapping-inside": ([{"x": vector()}], ["sample 0 is neither a tuple of arguments nor"]),
    "call": (
        [opsmith.Make().call(vector(), z=1)],
        ["sample 0 does not fit", "missing a required argument: 'y'"],
    ),
    "raising": (
        failing,
        [
            "its samples cannot be made: LookupError: no data file",
            f"where: {HERE}:"
            + str(
                1
                + HERE.read_text(encoding="utf-8")
                .splitlines()
                .index('    raise LookupError("no data file")  # there is none')
            ),
        ],
    ),
    "meta": (
        [(torch.ones(3, device="meta"), vector())],
        ["`x` of sample 0 cannot be checked on", "a tensor on the device `meta`", "make `x` on the CPU"],
    ),
    "sparse": (
        [(vector(), vector()), (vector(), vector().to_sparse())],
        ["`y` of sample 1 cannot be checked on", "got: torch.sparse_coo", "hint: give `y.to_dense()`"],
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize(("samples", "says"), MISFITS.values(), ids=list(MISFITS))
def test_samples_of_a_class_that_do_not_fit(samples: Any, says: list[str], isolate: bool) -> None:
    with pytest.raises(errors.SampleError) as raised:
        opsmith.check(Product, samples=samples, only=FAST, isolate=isolate)
    told = str(raised.value)
    assert told.startswith("Product: ")
    for words in says:
        assert words in told
    assert "/opsmith/" not in str(raised.value.where)


@pytest.mark.parametrize(
    "samples",
    [
        lambda: [(vector(), vector())],
        lambda make: [(make(3), make(3))],
        [[vector(), vector()]],
        [opsmith.Make().call(vector(), y=vector())],
        iter([(vector(), vector())]),
    ],
    ids=["function", "function-of-make", "lists", "call", "iterator"],
)
def test_samples_of_a_class_that_fit(samples: Any) -> None:
    assert opsmith.check(Product, samples=samples, only=FAST).passed_as_asked


@pytest.mark.slow
def test_samples_of_make_are_of_the_seed_and_serve_adopt_as_well() -> None:
    first, same, other = (
        opsmith.check(Product, samples=lambda make: [(make(2), make.integers(2))], only=FAST, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first.passed_as_asked
    assert first.inputs == same.inputs
    assert other.passed_as_asked
    for samples in (lambda make: [(make(2), make(2))], [(vector(), vector())]):
        product = opsmith.adopt(Product, "sample_messages::product", samples=samples)
        assert opsmith.check(product, only=FAST, effort="quick").passed_as_asked


def test_samples_of_adopt_that_do_not_fit() -> None:
    with pytest.raises(errors.SampleError) as raised:
        opsmith.adopt(Product, "sample_messages::misfit", samples=[(vector(),)])
    assert raised.value.message().splitlines()[:2] == [
        "sample_messages::misfit: sample 0 has 1 argument, and `Product.forward` takes 2 (x, y)",
        "  where: the samples given to `adopt`",
    ]


def test_a_list_of_tensors_for_an_argument_without_a_type() -> None:
    report = opsmith.check(Joined, samples=[([vector(), vector()], 0)], only=FAST)
    assert report.outcomes[0].status == "passed", report  # the sample says the type
    name = "sample_messages::joined"
    joined = opsmith.adopt(Joined, name, signature="(xs: object, dim: int = 0) -> Tensor")
    with pytest.raises(errors.SampleError) as raised:
        opsmith.check(joined, samples=[([vector(), vector()], 0)], only=FAST)
    told = str(raised.value)
    assert told.startswith(f"{name}: sample 0 does not fit the signature: `xs` has the wrong type")
    assert "got: list of Tensor" in told
    assert "annotate the parameter, `xs: list[Tensor]`" in told
    with pytest.raises(errors.SampleError, match="write a single argument that is a list as"):
        opsmith.check(Silent, samples=[[vector(), vector()]], only=FAST)


def test_a_forward_that_returns_nothing() -> None:
    with pytest.raises(errors.ResultTypeError) as raised:
        opsmith.check(Silent, samples=[(vector(),)])
    told = str(raised.value)
    assert told.startswith("Silent: `Silent.forward` returned None on sample 0\n")
    assert "expected: a tensor, or a tuple of tensors" in told
    assert f"where: {HERE}:" in told
    assert "hint: end `forward` with `return result`" in told


def test_names_that_torch_cannot_write() -> None:
    with pytest.raises(errors.NameFormatError) as raised:
        opsmith.check(Greek, samples=[(vector(), 2.0)])
    assert str(raised.value).startswith("Greek: torch's schema language cannot write the name of `λ`\n")
    assert raised.value.argument == "λ"
    assert opsmith.check(Größe, samples=[(vector(),)], only=FAST).passed_as_asked


@pytest.mark.parametrize("given", [Product.apply, "instance"], ids=["apply", "instance"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_stands_for_a_class_is_answered_with_the_class(given: Any) -> None:
    with pytest.raises(errors.UsageError) as raised:
        opsmith.check(Product() if given == "instance" else given, samples=[(vector(), vector())])
    assert "hint: pass the class, `Product`" in str(raised.value)
    assert "`torch.ops.mylib.name`" in str(raised.value)


def test_an_operator_of_torch_library_without_samples_is_named() -> None:
    @torch.library.custom_op("sample_messages::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(errors.MissingSamplesError) as raised:
        opsmith.check(twice)
    assert "call `opsmith.check(torch.ops.sample_messages.twice, samples=[(x,)])`" in str(raised.value)


def test_nothing_is_left_to_check() -> None:
    for chosen in ({"only": ["gradient"], "skip": ["gradient"]}, {"only": []}):
        with pytest.raises(errors.UsageError, match="nothing is left to check"):
            opsmith.check(Product, samples=[(vector(), vector())], **chosen)  # type: ignore[arg-type]


class Picky(Product):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        if len(x) == 2:
            raise ValueError("not of two")
        return Product.forward(ctx, x, y)


def test_a_forward_that_raises_on_one_sample_is_looked_at_on_the_others() -> None:
    two = torch.ones(2)
    report = opsmith.check(Picky, samples=[(two, two), (vector(), vector())], only=["forward"])
    assert report.outcomes[0].status == "failed"
    (failure,) = report.failures
    assert (failure.cause, failure.evidence["sample"]) == ("raises", "sample 0 (x [2], y [2])")
    assert report.inputs[0] == "sample 0 (x [2], y [2])"
