"""Any object as an argument, by a number that stands for it in torch's dispatcher."""

from __future__ import annotations

import enum
import functools
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.core import schema as schemas
from opsmith.core.annotations import kind_of
from opsmith.core.argument_types import OBJECT, ArgumentType
from opsmith.core.lowering import TRACED, Tokens, UnknownObject, object_of, token_of

Operator = opsmith.Operator[..., Any]


class Anything:
    """The hint that this file lets stand for any object; adopting reads signatures in its own way."""


class Times(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Any) -> Any:
        return x * self.by


STANDS_FOR = "a number represents an object only in the process that made it"
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _objects(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = ArgumentType(OBJECT, optional=True)
    monkeypatch.setattr(schemas, "kind_of", lambda hint: optional if hint is Anything else kind_of(hint))
    SEEN.clear()


@pytest.fixture
def operator(name: str) -> Operator:
    def applied(x: Tensor, function: Anything, extra: Anything = None) -> Tensor:  # type: ignore[assignment]
        SEEN.append(extra)
        return x * function(2)  # type: ignore[operator]

    def of_x(grad: Tensor, function: Any, extra: Any) -> Tensor:
        SEEN.append(extra)
        return grad * function(2)

    return opsmith.operator(name)(applied).gradients(x=of_x)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda x: x * 3,
    "module": Times(3),
    "method": Times(3).forward,
    "partial": functools.partial(lambda a, b: a * b, 3),
    "builtin": (3).__mul__,
    "class": type("Tripled", (int,), {"__new__": lambda cls, x: 3 * x}),
}


def test_schema(operator: Operator, name: str) -> None:
    assert (
        str(operator.torch_operator._schema) == f"{name}(Tensor x, int? function, int? extra=None) -> Tensor"
    )
    assert operator.specification.schema.by_name["function"].kind.annotation() == "object | None"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_an_object_arrives(kind: str, operator: Operator) -> None:
    function = FUNCTIONS[kind]
    x = opsmith.Make()(3).requires_grad_()
    assert gradcheck(lambda x: operator(x, function), (x,), check_forward_ad=True, check_batched_grad=True)
    assert_close(torch.vmap(lambda x: operator(x, function))(x), 6 * x)
    assert_close(torch.func.grad(lambda x: operator(x, function=function).sum())(x.detach()), 0 * x + 6)
    assert {*SEEN} == {None}


EXTRAS = [
    (1, (2, "a")),
    {"a": [1]},
    slice(1, None),
    (None, 1.5),
    ...,
    [torch.float32],
    frozenset({1}),
    "text",
]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_containers_arrive(extra: Any, operator: Operator) -> None:
    x = torch.ones(2, requires_grad=True)
    operator(x, abs, extra).sum().backward()
    assert [value == extra and type(value) is type(extra) for value in SEEN] == [True, True]


def test_tensors_are_no_objects(operator: Operator) -> None:
    x = torch.ones(2)
    for extra in (x, (1, [x]), {"a": x}):
        with pytest.raises(errors.ArgumentError) as caught:
            operator(x, abs, extra)
        assert caught.value.argument == "extra"


def test_a_number_that_stands_for_nothing(operator: Operator) -> None:
    with pytest.raises(errors.ArgumentError, match=STANDS_FOR):
        operator.torch_operator(torch.ones(2), 3)


@pytest.mark.slow
def test_a_number_of_another_process(operator: Operator) -> None:
    code = "from opsmith.core.lowering import token_of; print(token_of(abs))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    token = int(done.stdout)
    assert object_of(token) == UnknownObject(token)
    assert object_of(pickle.loads(pickle.dumps(token_of(abs)))) is abs
    with pytest.raises(errors.ArgumentError, match=STANDS_FOR):
        operator.torch_operator(torch.ones(2), token)


def test_equal_values_share_a_number_and_types_do_not() -> None:
    assert token_of((1, ("a", None))) == token_of((1, ("a", None)))
    assert len({token_of((value,)) for value in (1, 1.0, True, "1", 1j, None)}) == 6
    assert token_of((0.0,)) != token_of((-0.0,))
    assert token_of(slice(1, 2)) == token_of(slice(1, 2)) != token_of(slice(1, 2, 1))
    module = Times(1)
    assert token_of(module.forward) == token_of(module.forward) != token_of(Times(1).forward)
    assert token_of([]) != token_of([])


class Marked(str):
    """A text that holds more than it shows."""

    def __init__(self, text: str) -> None:
        self.marks: list[str] = []


def test_instances_of_a_class_derived_from_text_are_told_apart() -> None:
    one, other = Marked("a"), Marked("a")
    assert token_of(one) == token_of(one) != token_of(other) != token_of("a")
    assert object_of(token_of(one)) is one
    assert object_of(token_of(other)) is other
    assert token_of((one,)) != token_of((other,))


def test_numbers_keep_nothing_alive_and_are_not_used_again() -> None:
    tokens = Tokens()
    known = set()
    for _ in range(10):
        function = Times(1)
        token = tokens.take(function, pin=False)
        assert tokens.find(token) is function
        known.add(token)
        del function
        assert tokens.find(token) == UnknownObject(token)
    assert len(known) == 10


def test_a_number_keeps_alive_what_has_no_weak_references() -> None:
    tokens = Tokens()
    pinned = int(tokens.take([1], pin=True))
    number, module = tokens.take([0], pin=False), Times(2)
    method = tokens.take(module.forward, pin=False)
    again, watched = tokens.take(module.forward, pin=False), weakref.ref(module)
    assert again == method
    token, of_method = int(number), int(method)
    del module, method
    assert (tokens.find(token), tokens.find(of_method)(3)) == ([0], 6)
    del number, again
    assert tokens.find(token) == UnknownObject(token)
    assert watched() is None
    assert tokens.find(pinned) == [1]


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, x: Any) -> Any:
        return self.model(x)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, x: Any) -> Any:
        return self.model(x)

    def __eq__(self, other: object) -> bool:
        raise TypeError("it cannot be compared")


HOLDING: dict[str, Callable[[Times], Any]] = {
    "method": lambda model: model.forward,
    "lambda": lambda model: lambda x: model(x),
    "partial": lambda model: functools.partial(Slotted(model)),
    "slots": Slotted,
    "method of slots": lambda model: Slotted(model).__call__,
    "unhashable": Unhashable,
    "method of unhashable": lambda model: Unhashable(model).__call__,
    "generator": lambda model: (each for each in [model]),
    "tuple": lambda model: (model.forward, [model, {"a": Slotted(model)}]),
    "dict": lambda model: {model: (each for each in [model])},
}


REGIONS: dict[str, Callable[[Operator, Tensor, Any], Any]] = {
    "eager": lambda op, x, extra: op(x, abs, extra),
    "backward": lambda op, x, extra: op(x.requires_grad_(), abs, extra).sum().backward(),
    "vmap": lambda op, x, extra: torch.vmap(lambda x: op(x, abs, extra))(x),
    "grad": lambda op, x, extra: torch.func.grad(lambda x: op(x, abs, extra).sum())(x),
    "jvp": lambda op, x, extra: torch.func.jvp(lambda x: op(x, abs, extra), (x,), (x,)),
}


def in_autocast(op: Operator, x: Tensor, extra: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return op(x, abs, extra)


def raising(op: Operator, x: Tensor, extra: Any) -> None:
    with pytest.raises(TypeError, match="not callable"):
        op(x, None, extra)


REGIONS |= {"autocast": in_autocast, "raising": raising}


@pytest.mark.every(8)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("holding", HOLDING)
def test_a_call_keeps_no_argument_alive(holding: str, region: str, operator: Operator) -> None:
    living: list[weakref.ref[Times]] = []
    for _ in range(3):
        model = Times(2)
        living.append(weakref.ref(model))
        REGIONS[region](operator, torch.ones(2), HOLDING[holding](model))
        SEEN.clear()
        del model
    gc.collect()
    assert [each() for each in living] == [None] * 3


def test_a_recorded_graph_keeps_its_objects(operator: Operator) -> None:
    graph = make_fx(lambda x: operator(x, lambda by: by * 2, [3]))(torch.ones(2))
    gc.collect()
    SEEN.clear()
    assert_close(graph(torch.ones(2)), torch.full((2,), 4.0))
    assert SEEN == [[3]]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.11, where a graph breaks
def test_compiled(operator: Operator) -> None:
    """Code that was compiled for one object is not used for another."""
    compiled = torch.compile(
        lambda x, function, extra: operator(x, function, extra), backend="aot_eager", fullgraph=TRACED
    )
    x = torch.ones(2, requires_grad=True)
    double, triple = Times(2), Times(3)
    for function, wanted in (
        (double, 4.0),
        (triple, 6.0),
        (abs, 2.0),
        (lambda x: x * 5, 10.0),
        (double, 4.0),
    ):
        result = compiled(x, function, None)
        assert_close(result.detach(), torch.full((2,), wanted))
        assert_close(torch.autograd.grad(result.sum(), x)[0], torch.full((2,), wanted))
    torch.compiler.reset()
    for extra in ((1, ("a",)), (2, ("a",)), (3, ("a",)), {"a": [None, 1]}, slice(1, 2)):
        SEEN.clear()
        torch.autograd.grad(compiled(x, abs, extra).sum(), x)
        assert SEEN
        assert all(value == extra for value in SEEN)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.11, where a graph breaks
def test_compiled_with_values_of_classes_derived_from_plain_ones(operator: Operator) -> None:
    """Each arrives as itself: neither as the number that it is, nor as an equal one that came before."""
    compiled = torch.compile(lambda x, extra: operator(x, abs, extra), backend="aot_eager", fullgraph=TRACED)
    x = torch.ones(2, requires_grad=True)
    torch.compiler.reset()
    for extra in (Level.LOW, Level.HIGH, 1, Marked("a"), Marked("a"), "a"):
        SEEN.clear()
        torch.autograd.grad(compiled(x, extra).sum(), x)
        assert SEEN
        assert all(value is extra for value in SEEN)
