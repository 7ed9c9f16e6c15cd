"""Modes and hooks that watch a call see the operator once, by its name, also on the fast path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_cases import Function, Inputs, LetThrough, values_and_gradients
from matrices import diagonal
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transform_cases import SUBJECTS
from transform_subjects import Subject

import opsmith

NAMESPACES = {"transforms", "opsmith", "examples"}


class Log(TorchDispatchMode):
    """Every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class FunctionLog(TorchFunctionMode):
    """Every function of torch that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@opsmith.operator("transforms::times_conjugate")
def times_conjugate(x: Tensor, y: Tensor) -> Tensor:
    return (x * y.conj()).imag.neg() * y.conj().imag


@pytest.mark.parametrize("before", [0, 3], ids=["first calls", "known calls"])
@pytest.mark.parametrize("region", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_reference_resolves_conjugate_views_under_a_mode(region: Any, before: int) -> None:
    """Torch excludes the keys of such views in the handler of a mode, in which the reference runs."""
    draw = torch.Generator().manual_seed(before)
    x, y = (torch.randn(size, dtype=torch.complex128, generator=draw) for size in ((3, 4), (4,)))
    right = times_conjugate.reference(x, y)
    with region():
        for _ in range(before):
            times_conjugate(x, y)
        for call in (times_conjugate, torch.ops.transforms.times_conjugate):
            for given in ((x, y), (x.clone().requires_grad_(), y.conj().resolve_conj().conj())):
                with Log():
                    found = call(*given)
                assert torch.equal(found, right)


def _by_mode(kind: type[Any], function: Function, inputs: Inputs) -> list[str]:
    with kind() as log:
        function(*inputs)
    return [str(each) for each in log.seen if getattr(each, "namespace", "") in NAMESPACES]


def _by_trace(tracing: str, function: Function, inputs: Inputs) -> list[str]:
    nodes = make_fx(lambda *given: function(*given), tracing_mode=tracing)(*inputs).graph.nodes
    return [str(node.target) for node in nodes if getattr(node.target, "namespace", "") in NAMESPACES]


def _by_profile(function: Function, inputs: Inputs) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*inputs)
    return [
        f"{event.name.replace('::', '.')}.default"
        for event in profile.events()
        if event.name.partition("::")[0] in NAMESPACES
    ]


WATCHERS: dict[str, Callable[[Function, Inputs], list[str]]] = {
    "dispatch-mode": lambda f, x: _by_mode(Log, f, x),
    "function-mode": lambda f, x: _by_mode(FunctionLog, f, x),
    "make_fx": lambda f, x: _by_trace("real", f, x),
    "make_fx-fake": lambda f, x: _by_trace("fake", f, x),
    "make_fx-symbolic": lambda f, x: _by_trace("symbolic", f, x),
    "profiler": _by_profile,
}


@pytest.mark.every(4)
@pytest.mark.parametrize(("subject", "watcher"), diagonal(SUBJECTS, WATCHERS, every=3))
def test_operator_is_seen_by_its_name(subject: Subject, watcher: str) -> None:
    inputs = subject.inputs()
    for _ in range(2):
        subject.operator(*inputs)
    seen = WATCHERS[watcher](subject.operator, inputs)
    # One that returns what it writes is a composition of one that returns nothing.
    (name,) = {each.replace("_void", "") for each in seen}
    assert len(seen) == 1 or subject.name == "in-place-kernel"
    assert name == WATCHERS["dispatch-mode"](subject.operator, inputs)[0].replace("_void", "")


@opsmith.operator("transforms::counted", opaque=True)
def counted(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() ** 2)


counted.fake(torch.empty_like)
counted.gradients(x=lambda grad, x: 2 * grad * x)


@pytest.mark.parametrize(
    ("policy", "times"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)]
)
def test_selective_checkpoint_saves_or_recomputes_as_it_says(policy: CheckpointPolicy, times: int) -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(
            lambda _context, operator, *_args, **_kwargs: (
                policy if operator is counted.torch_operator else CheckpointPolicy.PREFER_RECOMPUTE
            )
        )

    with Log() as log:
        result = checkpoint(lambda x: counted(x).sin(), x, use_reentrant=False, context_fn=contexts)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    assert log.seen.count(counted.torch_operator) == times
    torch.testing.assert_close(gradient, 2 * x.detach() * x.detach().square().cos())


@opsmith.operator("transforms::breaking")
def breaking(x: Tensor) -> Tensor:
    return x * 2


def _break(grad: Tensor) -> Tensor:
    raise ArithmeticError("no gradient today")


breaking.gradients(x=_break)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_an_error_in_a_backward_names_the_operator_and_its_call() -> None:
    """The note names the formula; anomaly detection warns of the node, with the traceback of the call."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        breaking(x)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(ArithmeticError) as caught,
        pytest.warns(UserWarning, match=r"(?s)Error detected in breakingBackward.*test_visibility"),
    ):
        breaking(x).sum().backward()
    assert any("transforms::breaking" in note for note in caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_detection_finds_the_nan_of_a_formula() -> None:
    operator = opsmith.operator("transforms::not_a_number")(_doubled)
    operator.gradients(x=lambda grad: grad * float("nan"))
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        operator(x)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="not_a_numberBackward' returned nan"),
        pytest.warns(UserWarning, match="Error detected in not_a_numberBackward"),
    ):
        operator(x).sum().backward()


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_mode_that_is_entered_later_is_seen_by_the_backward() -> None:
    """The formula's operations are those of torch: a mode around the backward alone sees them."""
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    for _ in range(2):
        result = opsmith.ops.mul(x, x.detach())
    with Log() as log:
        torch.autograd.grad(result.sum(), x)
    assert torch.ops.aten.mul.Tensor in log.seen


def test_nothing_is_left_behind() -> None:
    """After every watcher the next call is plain again."""
    inputs = SUBJECTS[0].inputs()
    expected = values_and_gradients(SUBJECTS[0].plain, inputs)
    for watcher in WATCHERS.values():
        watcher(SUBJECTS[0].operator, inputs)
        with LetThrough():
            values_and_gradients(SUBJECTS[0].operator, inputs)
        torch.testing.assert_close(values_and_gradients(SUBJECTS[0].operator, inputs), expected)
