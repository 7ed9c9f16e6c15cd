"""Several threads at once: each has its own modes, its own graph, and its own answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.func as F
from context_cases import values_and_gradients
from torch import Tensor
from transform_cases import SUBJECTS
from transform_subjects import Subject

import opsmith

THREADS = 8
ROUNDS = 3


def at_once(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run work in threads that begin together; their answers, in order."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(count)]]


def _scaled(subject: Subject, number: int) -> tuple[Tensor, ...]:
    return tuple(tensor / (number + 1) for tensor in subject.inputs())


@pytest.mark.every(5)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_each_thread_has_its_own_answer(subject: Subject) -> None:
    expected = [values_and_gradients(subject.plain, _scaled(subject, i)) for i in range(THREADS)]

    def work(number: int) -> Any:
        for _ in range(ROUNDS):
            answer = values_and_gradients(subject.operator, _scaled(subject, number))
        return answer

    for found, true in zip(at_once(work), expected, strict=True):
        torch.testing.assert_close(found, true)


def _cubed(x: Tensor, weight: Tensor) -> Tensor:
    return x**3 * weight


def _declared(name: str, way: str) -> opsmith.Operator[..., Any]:
    operator = opsmith.operator(f"transforms::{name}_{way}")(_cubed)
    if way != "derived":
        operator.gradients(
            x=lambda grad, x, weight: 3 * grad * x**2 * weight, weight=lambda grad, x: grad * x**3
        )
    if way == "kernel":
        operator.kernel("cpu", lambda x, weight: x * x * x * weight)
    return operator


@pytest.mark.parametrize("way", ["formulas", "derived", "kernel"])
def test_first_calls_at_once(way: str) -> None:
    """the first call installs the fast path, the first backward shows that formulas write into nothing."""
    x, weight = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.5, 1.0])
    for attempt in range(5):
        operator = _declared(f"first_{attempt}", way)
        expected = [values_and_gradients(_cubed, (x * (i + 1), weight)) for i in range(THREADS)]
        found = at_once(lambda i, op=operator: values_and_gradients(op, (x * (i + 1), weight)))
        for answer, true in zip(found, expected, strict=True):
            torch.testing.assert_close(answer, true)


@pytest.mark.parametrize("way", ["formulas", "derived", "kernel"])
def test_modes_belong_to_a_thread(way: str) -> None:
    """Half of the threads record no gradient, a quarter is under autocast; nobody sees the others' modes."""
    operator = _declared("modes", way)
    x, weight = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.5, 1.0])

    def work(number: int) -> tuple[bool, torch.dtype]:
        leaf = x.to(torch.bfloat16).requires_grad_()
        for _ in range(50):
            with (
                torch.set_grad_enabled(number % 2 == 0),
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 4 == 1),
            ):
                result = operator(leaf, weight.to(torch.bfloat16 if number % 4 == 2 else torch.float32))
        return result.requires_grad, result.dtype

    for number, (recorded, dtype) in enumerate(at_once(work)):
        assert recorded == (number % 2 == 0)
        assert dtype is (torch.bfloat16 if number % 4 == 2 else torch.float32)


def test_transforms_belong_to_a_thread() -> None:
    """One thread alone is in forward mode: torch keeps its levels for all threads together (plain functions
    fail in two), and the others must not notice.
    """
    operator = _declared("transforms", "formulas")
    x, weight = torch.rand(THREADS, 4, 3), torch.rand(3)
    steps: list[Callable[..., Any]] = [
        lambda f, x: f(x, weight),
        lambda f, x: F.vmap(f, (0, None))(x, weight),
        lambda f, x: F.grad(lambda x: f(x, weight).sum())(x),
    ]

    def step_of(number: int) -> Callable[..., Any]:
        return (
            steps[number % len(steps)] if number else lambda f, x: F.jvp(lambda x: f(x, weight), (x,), (x,))
        )

    def work(number: int) -> Any:
        for _ in range(20):
            answer = step_of(number)(operator, x[number])
        return answer

    for number, found in enumerate(at_once(work)):
        torch.testing.assert_close(found, step_of(number)(_cubed, x[number]))


def test_a_graph_is_differentiated_by_another_thread() -> None:
    operator = _declared("elsewhere", "formulas")
    x, weight = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([2.0, 0.5])
    for _ in range(2):
        result = operator(x, weight)
        gradients = at_once(lambda _, y=result: torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 4)
        for gradient in gradients:
            torch.testing.assert_close(gradient, 3 * x.detach() ** 2 * weight)


def test_declaring_and_calling_at_once() -> None:
    """While one thread attaches formulas again and again, the others never see half of a specification."""
    operator = _declared("attached", "formulas")
    x, weight = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.5, 1.0])
    expected = values_and_gradients(_cubed, (x, weight))

    def work(number: int) -> Any:
        if number == 0:
            for _ in range(20):
                operator.gradients(x=lambda grad, x, weight: 3 * grad * x**2 * weight)
            return expected
        for _ in range(50):
            answer = values_and_gradients(operator, (x, weight))
        return answer

    for found in at_once(work):
        torch.testing.assert_close(found, expected)
