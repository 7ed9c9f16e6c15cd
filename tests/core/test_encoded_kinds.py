"""Values that torch's dispatcher carries in another form: how a schema shows them, and every way to call."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import opsmith
from opsmith import errors


class Mode(Enum):
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True)
class Range:
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Settings:
    range: Range
    mode: Mode = Mode.SUM
    size: int = 2


Operator = opsmith.Operator[..., Any]


def scaled(
    x: Tensor,
    settings: Settings = Settings(Range(), Mode.MEAN),
    pair: tuple[int, str] = (1, "a"),
    *,
    mode: Mode = Mode.SUM,
    word: Literal["one", "two"] = "one",
) -> Tensor:
    """Scale by (high - low) size pair[0], twice that for the mean, thrice for the word two."""
    width = (settings.range.high - settings.range.low) * settings.size * pair[0]
    return x * width * (2 if mode is Mode.MEAN else 1) * (3 if word == "two" else 1)


def of_x(grad: Tensor, settings: Settings, pair: tuple[int, str], mode: Mode, word: str) -> Tensor:
    return scaled(grad, settings, pair, mode=mode, word=word)  # type: ignore[arg-type]


WIDE = Settings(Range(-1.0, 2.0), Mode.SUM, 3)


@pytest.fixture(params=["ordinary", "derived", "formulas"])
def operator(request: pytest.FixtureRequest, name: str) -> Operator:
    made = opsmith.operator(name)(scaled)
    if request.param == "derived":
        made.kernel("cpu", scaled)
    if request.param == "formulas":
        made.gradients(x=of_x)
    return made


def test_schema(operator: Operator, name: str) -> None:
    assert str(operator.torch_operator._schema) == (
        f"{name}(Tensor x, float settings_range_low=0., float settings_range_high=1., "
        'str settings_mode="MEAN", SymInt settings_size=2, SymInt pair_0=1, str pair_1="a", *, '
        'str mode="SUM", str word="one") -> Tensor'
    )


def test_all_ways_to_call(operator: Operator, name: str) -> None:
    x = torch.tensor([1.0, -2.0])
    namespace, short = name.split("::")
    by_torch = getattr(getattr(torch.ops, namespace), short)
    for _ in range(3):  # the later ones by the fast path, where there is one
        assert_close(operator(x), x * 2)
        assert_close(operator(x, WIDE), x * 9)
        assert_close(operator(x, WIDE, (2, "b"), mode=Mode.MEAN, word="two"), x * 108)
        assert_close(operator(x=x, pair=(3, ""), settings=WIDE), x * 27)
        assert_close(by_torch(x), x * 2)
        assert_close(by_torch(x, -1.0, 2.0, "SUM", 3, 2, "b", mode="MEAN", word="two"), x * 108)
        assert_close(by_torch(x, settings_size=5, mode="MEAN"), x * 10)


def test_derivatives_and_transforms(operator: Operator) -> None:
    x = opsmith.Make()(3, 2).requires_grad_()

    def call(x: Tensor) -> Tensor:
        return operator(x, WIDE, (2, "b"), mode=Mode.MEAN)

    assert gradcheck(call, (x,), check_forward_ad=True, check_batched_grad=True)
    assert_close(torch.vmap(call)(x), x * 36)
    assert_close(torch.func.grad(lambda x: call(x).sum())(x.detach()), torch.full((3, 2), 36.0).double())
    assert_close(torch.func.jvp(call, (x.detach(),), (torch.ones(3, 2).double(),))[1], 0 * x + 36)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(call(x.float()), x.float() * 36)


@pytest.mark.slow
@pytest.mark.compile
def test_compiled(name: str) -> None:
    operator = opsmith.operator(name)(scaled).gradients(x=of_x)

    def call(x: Tensor, size: int, mode: Mode) -> Tensor:
        # Not `Mode.SUM`: torch guards no member that the code names itself, be it an argument too.
        return operator(x, Settings(Range(-1.0, 2.0), Mode.MAX, size), mode=mode)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    for size, mode in ((3, Mode.SUM), (4, Mode.SUM), (5, Mode.SUM), (5, Mode.MEAN)):
        expected = torch.full((2,), 3.0 * size * (2 if mode is Mode.MEAN else 1))
        result = compiled(x, size, mode)
        assert_close(result.detach(), expected)
        assert_close(torch.autograd.grad(result.sum(), x)[0], expected)


@pytest.mark.slow
@pytest.mark.every(4)
def test_explain_and_check(operator: Operator) -> None:
    operator.samples(lambda make: [make.call(make(3), WIDE, mode=Mode.MEAN), (make(2), WIDE)])
    assert "reference" in str(operator.explain(torch.ones(2), WIDE)) or operator.specification.kernels
    report = opsmith.check(operator, effort="quick")
    assert report.passed, report


class Other(Enum):
    SUM = "sum"


class Wider(Range):
    pass


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("arguments", "argument", "expected", "got"),
    [
        pytest.param({"mode": "SUM"}, "mode", "Mode: SUM, MEAN, MAX", "str 'SUM'", id="name-of-a-member"),
        pytest.param(
            {"mode": Other.SUM}, "mode", "Mode: SUM, MEAN, MAX", "Other <Other.SUM: 'sum'>", id="enum"
        ),
        pytest.param({"word": "six"}, "word", "Literal['one', 'two']", "str 'six'", id="literal"),
        pytest.param({"pair": (1, 2)}, "pair[1]", "str", "int 2", id="tuple"),
        pytest.param({"pair": (1, "a", 2)}, "pair", "tuple[int, str]", "tuple (1, 'a', 2)", id="length"),
        pytest.param({"settings": None}, "settings", "Settings", "None", id="none"),
        pytest.param({"settings": 1}, "settings", "Settings", "int 1", id="no-dataclass"),
        pytest.param(
            {"settings": Settings(Range("a"))},  # type: ignore[arg-type]
            "settings.range.low",
            "float",
            "str 'a'",
            id="field",
        ),
        pytest.param(
            {"settings": Settings(Wider())},
            "settings.range",
            "Range",
            "Wider Wider(low=0.0, high=1.0)",
            id="class",
        ),
    ],
)
def test_wrong_values(arguments: Any, argument: str, expected: str, got: str, operator: Operator) -> None:
    for _ in range(2):
        with pytest.raises(errors.ArgumentError) as caught:
            operator(torch.ones(2), **arguments)
        assert (caught.value.argument, caught.value.expected, caught.value.got) == (argument, expected, got)
        operator(torch.ones(2))


def test_a_message_shows_the_call_as_the_handle_takes_it(operator: Operator) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        operator(torch.ones(2), mode="SUM")
    hint = "call it as `operator(x, pair=(1, 'a'), word='one')`"
    assert caught.value.hint == hint
    x = torch.ones(2)
    eval(hint.split("`")[1], {"operator": operator, "x": x})


def test_wrong_values_by_torch(operator: Operator) -> None:
    for arguments, expected in (
        ({"mode": "MIN"}, "Mode: SUM, MEAN, MAX"),
        ({"settings_mode": "MIN"}, "Mode: SUM, MEAN, MAX"),
        ({"word": "six"}, "Literal['one', 'two']"),
    ):
        with pytest.raises(errors.ArgumentError) as caught:
            operator.torch_operator(torch.ones(2), **arguments)
        assert caught.value.expected == expected


def test_an_argument_of_the_schema_is_none_of_the_handle(operator: Operator) -> None:
    with pytest.raises(errors.ArgumentError, match="it has no argument `settings_size`"):
        operator(torch.ones(2), settings_size=3)
    with pytest.raises(errors.ArgumentError, match="it takes 3 positional arguments, but 4 were given"):
        operator(torch.ones(2), WIDE, (1, "a"), Mode.SUM)


def test_names_that_clash(name: str) -> None:
    def clashing(x: Tensor, pair: tuple[int, str], pair_1: int) -> Tensor:
        return x.clone()

    with pytest.raises(errors.ReservedNameError) as caught:
        opsmith.operator(name)(clashing)
    assert "`pair_1` and `pair` both become `pair_1` in the operator's schema" in str(caught.value)
    assert "hint: rename `pair_1` or `pair`" in str(caught.value)


def test_a_default_that_no_schema_can_hold(name: str) -> None:
    def named(x: Tensor, names: tuple[int, list[str]] = (1, ["a"])) -> Tensor:
        return x.clone()

    with pytest.raises(
        errors.DefaultError, match="leave the default out, or use a default without a list of strings"
    ):
        opsmith.operator(name)(named)


@dataclass(frozen=True)
class Restless:
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size + 1)


def test_a_dataclass_that_changes_what_it_is_made_of(name: str) -> None:
    def restless(x: Tensor, size: Restless) -> Tensor:
        return x * size.size

    operator = opsmith.operator(name)(restless)
    with pytest.raises(errors.ArgumentError) as caught:
        operator(torch.ones(2), Restless(1))
    first = inspect.getsourcelines(Restless.__post_init__)[1]
    assert caught.value.message().splitlines() == [
        f"{name}: `Restless.__post_init__` changes fields that it has already computed",
        "  expected: size=2",
        "  got: Restless(size=3)",
        f"  where: {inspect.getsourcefile(Restless)}:{first}",
        "  hint: let it keep a computed value unchanged, or compute the value in a property",
    ]
