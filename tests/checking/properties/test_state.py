"""State: caches that do not see other numbers, kernels that look at who calls, and right ones beside them."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrong_state as corpus
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.side_effects.interleavings import MODULES, as_a_script, call_plainly

GENERATOR = torch.Generator().manual_seed(0)
X, WEIGHT = torch.randn(3, 4, generator=GENERATOR), torch.randn(4, generator=GENERATOR)

Compute = Callable[..., Tensor]


def remembering(key: Callable[[Tensor], Any], compute: Compute) -> Compute:
    """A function that is computed once for each key."""
    known: dict[Any, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        found = key(x)
        if found not in known:
            known[found] = compute(x.detach()).clone()
        return known[found].clone()

    return run


def failure_of(subject: Any, samples: Any) -> Any:
    report = opsmith.check(subject, samples=samples, only=["state"], effort="quick")
    (failure,) = report.failures
    return failure


def by_version() -> Compute:
    """Keyed by the object and its version: what most authors would call safe."""
    known: dict[int, Any] = {}

    def run(x: Tensor) -> Tensor:
        if x.is_inference():
            return x.exp()
        held = known.get(id(x))
        if held is None or held[0]() is not x or held[1] != x._version:
            held = known[id(x)] = weakref.ref(x), x._version, x.exp()
        return torch.clone(held[2])

    return run


STALE: dict[str, tuple[Callable[[], Compute], str]] = {
    "the version": (by_version, "of this call, made in the same tensors"),
    "the address": (
        lambda: remembering(lambda x: (x.data_ptr(), x.shape, x.dtype), torch.exp),
        "made in the same tensors, after other numbers were in them, differs",
    ),
    "the address and the version": (
        lambda: remembering(lambda x: (x.data_ptr(), x.shape, x.dtype, x._version), torch.exp),
        "after a write that their version counters do not count (`.data`, NumPy, DLPack), differs "
        "from the same call alone",
    ),
    "the shape and the first number": (
        lambda: remembering(lambda x: (x.shape, x.dtype, float(x.flatten()[0])), torch.exp),
        "of a call with two numbers of `x` exchanged, made in the same tensors",
    ),
    "the first and last rows": (
        lambda: remembering(lambda x: (x.dtype, str(x[0].tolist()), str(x[-1, -1].tolist())), torch.exp),
        "of a call with two numbers of `x` exchanged, made in the same tensors",
    ),
    "the sum": (
        lambda: remembering(lambda x: (x.shape, x.dtype, float(x.sum())), torch.exp),
        "of a call with two numbers of `x` exchanged, made in the same tensors",
    ),
}


@pytest.mark.parametrize("key", STALE)
def test_a_cache_that_does_not_see_other_numbers_is_stale(key: str) -> None:
    build, says = STALE[key]
    exp = opsmith.operator(f"stale::exp_{list(STALE).index(key)}")(_exp)
    exp.kernel("cpu", build())
    exp.gradients(x=lambda grad, result: grad * result)
    failure = failure_of(exp, [(X,)])
    assert (failure.severity, failure.cause, failure.input) == ("error", "stale-state", "result")
    assert says in failure.message


def _exp(x: Tensor) -> Tensor:
    return x.exp()


class WeightedByVersion(Function):
    """Keeps the exponential of a weight, as quantised and packed weights are kept."""

    kept: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        held = WeightedByVersion.kept
        if held is None or held[0]() is not weight or held[1] != weight._version:
            WeightedByVersion.kept = held = weakref.ref(weight), weight._version, weight.exp()
        scale: Tensor = held[2]
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x * scale).sum(0)


def test_a_weight_that_a_class_keeps_is_stale_after_a_write_by_numpy() -> None:
    failure = failure_of(WeightedByVersion, [(X, WEIGHT)])
    assert (failure.severity, failure.cause) == ("error", "stale-state")
    weight = WEIGHT.clone()
    before = WeightedByVersion.apply(X, weight)  # type: ignore[no-untyped-call]
    weight.numpy()[:] += 1
    assert torch.equal(WeightedByVersion.apply(X, weight), before)  # type: ignore[no-untyped-call]


def by_contents() -> Compute:
    """Keyed by the object, its version, and a copy of its numbers."""
    known: dict[int, Any] = {}

    def run(x: Tensor) -> Tensor:
        held = known.get(id(x))
        if held is None or held[0]() is not x or not torch.equal(held[1], x):
            held = known[id(x)] = weakref.ref(x), x.detach().clone(), x.exp()
        return torch.clone(held[2])

    return run


def with_workspace() -> Compute:
    """A workspace of each thread for each form, which each call writes before it reads."""
    own = threading.local()

    def run(x: Tensor) -> Tensor:
        known: dict[Any, Tensor] = own.__dict__
        key = x.shape, x.dtype, x.is_inference()
        if key not in known:
            known[key] = torch.empty_like(x, requires_grad=False)
        return torch.exp(x.detach(), out=known[key]).clone()

    return run


@pytest.mark.parametrize("build", [by_contents, with_workspace])
def test_a_cache_that_sees_other_numbers_passes(build: Callable[[], Compute]) -> None:
    exp = opsmith.operator(f"sound::exp_{build.__name__}")(_exp)
    exp.kernel("cpu", build())
    exp.gradients(x=lambda grad, result: grad * result)
    report = opsmith.check(exp, samples=[(X,)], only=["state"])
    assert not report.failures, str(report)


def frames() -> bool:
    return any("opsmith/checking" in each.filename for each in traceback.extract_stack())


def module() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("opsmith.checking"):
            return True
        frame = frame.f_back
    return False


LOOKS: dict[str, Callable[[], bool]] = {
    "frames": frames,
    "a caller's module": module,
    "sys.modules": lambda: "opsmith.checking.checker" in sys.modules,
    "sys.argv": lambda: "script" not in sys.argv[0],
    "the environment": lambda: "PYTEST_CURRENT_TEST" in os.environ,
}
SAYS = (
    "made by a script in a separate thread, where nothing shows that a check runs, differs from the "
    "same call in this check: at"
)


@pytest.mark.parametrize("looked_at", LOOKS)
def test_a_kernel_that_looks_at_who_calls_is_found(looked_at: str) -> None:
    looks = LOOKS[looked_at]
    sin = opsmith.operator(f"looking::sin_{list(LOOKS).index(looked_at)}")(_sin)
    sin.kernel("cpu", lambda x: x.sin() if looks() else x.clone())
    failure = failure_of(sin, [(X,)])
    assert (failure.severity, failure.cause, failure.input) == ("error", "looks-at-caller", "result")
    assert f"`result` of this call, {SAYS}" in failure.message
    assert failure.message.endswith(
        "The operator looks at its caller: at frames, `sys.modules`, `sys.argv` or the environment. "
        "Take the value as an argument"
    )


def _sin(x: Tensor) -> Tensor:
    return x.sin()


class LooksBehind(Function):
    """Right where a check is above it, in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() if module() or frames() else grad


class LooksAhead(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not module():
            raise ValueError("not in a check")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_backward_that_looks_at_who_calls_is_found() -> None:
    failure = failure_of(LooksBehind, [(X,)])
    assert (failure.severity, failure.cause, failure.input) == ("error", "looks-at-caller", "x")
    assert f"the gradient of `x` of this call, {SAYS}" in failure.message


def test_a_class_that_raises_without_a_check_is_found() -> None:
    failure = failure_of(LooksAhead, [(X,)])
    assert (failure.severity, failure.cause, failure.input) == ("error", "looks-at-caller", None)
    says = (
        "that a check runs, raises ValueError: not in a check; the same call in this check succeeds. "
        "The operator looks at its caller: at frames, `sys.modules`, `sys.argv` or the environment. "
        "Take the value as an argument"
    )
    assert says in failure.message


def test_an_operator_of_torch_library_that_looks_at_who_calls_is_found() -> None:
    @torch.library.custom_op("looking::clone", mutates_args=())
    def clone(x: Tensor) -> Tensor:
        return x.clone() if module() or frames() else x + 1

    failure = failure_of(clone, [(X,)])
    assert (failure.severity, failure.cause, failure.input) == ("error", "looks-at-caller", "result")


def in_slices(x: Tensor) -> Tensor:
    """As many slices as the environment allows threads, with the same numbers."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", len(os.environ.get("PYTEST_VERSION", ""))))
    return torch.cat([each.sin() for each in x.chunk(max(count, 1))])


def logged(x: Tensor) -> Tensor:
    """Keeps the line that called it, as a profiler does."""
    return x.sin() if traceback.extract_stack()[0].filename else x


@pytest.mark.parametrize("kernel", [in_slices, logged])
def test_a_kernel_that_looks_and_gives_the_same_passes(kernel: Compute) -> None:
    sin = opsmith.operator(f"sound::sin_{kernel.__name__}")(_sin)
    sin.kernel("cpu", kernel)
    report = opsmith.check(sin, samples=[(X,)], only=["state"])
    assert not report.failures, str(report)


def test_modules_arguments_and_variables_are_put_back() -> None:
    before = {*sys.modules}, sys.argv, {**os.environ}

    def fails() -> None:
        assert not any(name.startswith(MODULES) for name in sys.modules)
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"), as_a_script():
        call_plainly(fails, (), {})
    assert ({*sys.modules}, sys.argv, {**os.environ}) == before


def test_what_a_mode_alone_makes_raise_keeps_nothing() -> None:
    checked, samples = corpus.refuses_inference_mode()
    (failure,) = opsmith.check(checked, samples=samples, effort="quick", only=["state"]).errors
    assert (
        "the same call alone succeeds. No other call came before: the mode is the cause. A forward that "
        "computes gradients needs `torch.enable_grad()`, and clones that are made under "
        "`torch.inference_mode(False)`"
    ) in failure.message
    assert (
        "No other call came before: the mode is the cause. A forward that computes gradients needs "
        "`torch.enable_grad()`, and clones that are made under `torch.inference_mode(False)`"
    ) in failure.message
