"""FlopCounterMode counts an operator as it counts the plain function: no operator is silently nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from context_cases import Inputs, values_and_gradients
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from transform_cases import SUBJECTS
from transform_subjects import Subject

import opsmith
from opsmith.ops.involution import involution, involution_input_gradient, involution_weight_gradient

make = opsmith.Make(torch.float32)
OPAQUE = ("opaque", "bessel")
LINEAR = make(5, 3), make(2, 3), make(2)
IMAGE, KERNELS = make(1, 4, 5, 5), make(1, 2, 3, 3, 5, 5)
MATMUL = 2 * 5 * 3 * 2


def counted(function: Callable[..., Any], *inputs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: values_and_gradients(function, inputs)


@pytest.mark.every(5)
@pytest.mark.parametrize("step", [lambda f: f, with_gradients], ids=["forward", "with-gradients"])
@pytest.mark.parametrize(
    "subject",
    [s for s in SUBJECTS if s.name not in OPAQUE and "involution" not in s.name],
    ids=lambda subject: subject.name,
)
def test_counts_are_those_of_the_plain_function(subject: Subject, step: Callable[..., Any]) -> None:
    inputs = subject.inputs()
    expected = counted(step(subject.plain), *inputs)
    for _ in range(2):
        assert counted(step(subject.operator), *inputs) == expected


def test_a_product_is_counted() -> None:
    """So that equal counts above are not all zero."""
    assert counted(opsmith.ops.linear, *LINEAR) == MATMUL
    assert counted(with_gradients(opsmith.ops.linear), *LINEAR) == 3 * MATMUL


def test_involution_and_its_gradients() -> None:
    once = 2 * IMAGE.numel() * 9
    assert counted(involution, IMAGE, KERNELS, 1, 1) == once
    assert counted(involution_weight_gradient, IMAGE, IMAGE, 2, (3, 3), 1, 1) == once
    # The other gradient multiplies element by element and adds up by `fold`: torch counts neither, anywhere.
    assert counted(involution_input_gradient, IMAGE, KERNELS, (5, 5), 1, 1) == 0
    assert counted(with_gradients(lambda x, w: involution(x, w, 1, 1)), IMAGE, KERNELS) == 2 * once


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def _declared(name: str, way: str) -> opsmith.Operator[..., Any]:
    operator = opsmith.operator(f"flops::{name}_{way.replace('-', '_')}", opaque=way == "opaque")(_product)
    if way in ("formulas", "opaque"):
        operator.gradients(x=lambda grad, weight: grad @ weight.mT, weight=lambda grad, x: x.mT @ grad)
    if way == "kernel":
        operator.kernel("cpu", lambda x, weight: torch.from_numpy(x.numpy() @ weight.numpy()))
    return operator


@pytest.mark.parametrize(("way", "backward"), [("formulas", 2), ("derived", 2), ("kernel", 3)])
def test_each_way_to_the_gradient(way: str, backward: int) -> None:
    """A kernel without formulas runs the reference once more in the backward, and that counts."""
    operator, inputs = _declared("way", way), (make(5, 3), make(3, 2))
    for _ in range(2):
        assert counted(operator, *inputs) == MATMUL
        assert counted(with_gradients(operator), *inputs) == (1 + backward) * MATMUL


def test_hidden_results() -> None:
    operator = opsmith.operator("flops::hidden", hidden=("twice",))(_with_hidden)
    operator.gradients(x=lambda grad, twice: grad * twice)
    inputs = make(5, 3), make(3, 2)
    assert counted(operator, *inputs) == MATMUL
    x = inputs[0].clone().requires_grad_()
    assert counted(lambda: operator(x, inputs[1])) == MATMUL


def _with_hidden(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x @ weight, x * 2


def test_counts_belong_to_modules() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
            return opsmith.ops.linear(x, *weights)

    with FlopCounterMode(display=False) as counter:
        Layer()(*LINEAR)
    assert counter.get_flop_counts()["Layer"] == {torch.ops.opsmith.linear: MATMUL}


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_counts_while_tracing_and_of_the_trace(tracing: str) -> None:
    trace = make_fx(lambda *inputs: opsmith.ops.linear(*inputs), tracing_mode=tracing)
    assert counted(trace, *LINEAR) == MATMUL
    assert counted(trace(*LINEAR), *LINEAR) == MATMUL


def test_counts_under_vmap() -> None:
    x, weight = make(4, 5, 3), make(3, 2)
    operator = _declared("batched", "formulas")
    step = lambda f: torch.func.vmap(f, (0, None))
    assert counted(step(operator), x, weight) == counted(step(_product), x, weight) == 4 * MATMUL


def test_meta_and_fake_tensors() -> None:
    on_meta: Inputs = tuple(tensor.to("meta") for tensor in LINEAR)
    assert counted(opsmith.ops.linear, *on_meta) == MATMUL


def test_declaring_again_counts_anew() -> None:
    """With another signature torch knows another operator; with the same one, another reference."""

    def declare(twice: bool, *, more: bool) -> opsmith.Operator[..., Any]:
        def once_more(x: Tensor, weight: Tensor, times: int = 1) -> Tensor:
            return x @ weight * times

        def reference(x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight + x @ weight if twice else x @ weight

        function = once_more if more else reference
        function.__qualname__ = "reference"
        return opsmith.operator("flops::again")(function)

    inputs = make(5, 3), make(3, 2)
    assert counted(declare(False, more=False), *inputs) == MATMUL
    assert counted(declare(True, more=False), *inputs) == 2 * MATMUL
    assert counted(declare(False, more=True), *inputs) == MATMUL
    again = declare(True, more=False)
    packet = torch.ops.flops.again
    gc.collect()  # ends what torch kept of the one before
    assert torch.ops.flops.again is packet
    assert counted(again, *inputs) == 2 * MATMUL


def test_an_opaque_operator_is_no_silent_zero() -> None:
    operator = _declared("refused", "opaque")
    with pytest.raises(opsmith.errors.TransformError, match="opaque") as caught:
        counted(operator, make(5, 3), make(3, 2))
    assert "@op.flops" in str(caught.value)


def test_a_reference_that_reads_values_is_no_silent_zero() -> None:
    operator = opsmith.operator("flops::reads")(_reads)
    with pytest.raises(opsmith.errors.TransformError, match="its reference does not run"):
        counted(operator, make(5))


def _reads(x: Tensor) -> Tensor:
    return x * x.max().item()


LATER = """
import sys
import torch
import opsmith

@opsmith.operator("counted_later::matmul")
def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w

assert "torch.utils.flop_counter" not in sys.modules, "it imports Triton"
finders = len(sys.meta_path)
from importlib.util import find_spec
assert find_spec("torch.utils.flop_counter") is not None  # a look alone imports nothing
from torch.utils.flop_counter import FlopCounterMode
assert len(sys.meta_path) == finders - 1
with FlopCounterMode(display=False) as counter:
    matmul(torch.ones(2, 3), torch.ones(3, 4))
print(counter.get_total_flops())
"""


@pytest.mark.slow
def test_the_counter_is_not_imported_until_somebody_counts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATER],
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "48\n"), done.stderr
