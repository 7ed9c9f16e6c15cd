"""Processes in which CUDA kernels run on the CPU: they end, whatever happens, and run one after the other."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from kernel_corpus import CASES
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.kernels.cuda.emulation import launch

CASE = CASES["added"]


@pytest.fixture(scope="module")
def operator() -> Any:
    declared = CASE.operator()
    opsmith.emulate(declared, *CASE.arguments)
    return declared


def refuse(*given: Any) -> int:
    raise OSError(11, "Resource temporarily unavailable")


def test_a_child_ends_with_an_interrupted_call(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    wait = os.waitpid

    def interrupted(child: int, options: int) -> tuple[int, int]:
        children.append(child)
        if len(children) == 1:
            raise KeyboardInterrupt
        return wait(child, options)

    monkeypatch.setattr(launch.os, "waitpid", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opsmith.emulate(operator, *CASE.arguments)
    assert len(set(children)) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_a_system_that_forks_no_process(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "fork", refuse)
    with pytest.raises(errors.ToolchainError) as caught:
        opsmith.emulate(operator, *CASE.arguments)
    assert caught.value.message().splitlines() == [
        f"{operator.name}: no process can be forked for a CUDA kernel on the CPU",
        "  got: Resource temporarily unavailable",
        f"  where: {caught.value.where}",
        "  hint: free memory, or raise the limit of the number of processes",
    ]


def test_a_check_is_skipped_where_no_process_is_forked(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.os, "fork", refuse)
    report = opsmith.check(operator, samples=[CASE.arguments], only=["cuda"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "cuda")
    assert (outcome.status, [each.cause for each in outcome.failures]) == ("skipped", ["not-exercised"])
    (unverified,) = report.unverified
    assert "no process can be forked for a CUDA kernel on the CPU: Resource" in unverified
    assert outcome.reason.startswith("no process can be forked for a CUDA kernel on the CPU: Resource")


def test_a_library_runs_one_launch_at_a_time(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch._PreparedLaunch.run
    running, most = 0, 0

    def followed(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        run(self, *args, **kwargs)
        running -= 1

    monkeypatch.setattr(launch._PreparedLaunch, "run", followed)
    results: list[Any] = []

    def call() -> None:
        results.append(opsmith.emulate(operator, *CASE.arguments, in_process=True))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    for result in results:
        assert_close(result, operator.reference(*CASE.arguments))
    assert len(results) == 4


def test_a_system_that_is_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from opsmith.kernels.cuda.emulation import compiler

    monkeypatch.setattr(compiler, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.delattr(os, "sched_getaffinity")
    twice = opsmith.operator("emulated_processes::twice")(double)
    text = "__global__ void twice(View<const float> x, View<float> y) {}"
    twice.kernel("cuda", cuda=text, entry="twice", grid=1)
    with pytest.raises(errors.ToolchainError) as caught:
        opsmith.emulate(twice, torch.ones(3))
    assert caught.value.problem == "CUDA kernels run on the CPU only under Linux"
    assert caught.value.got == "the platform darwin"
    report = opsmith.check(twice, samples=[(torch.ones(3),)], only=["cuda"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "cuda")
    assert outcome.status == "skipped", str(report)
    assert outcome.reason.startswith("CUDA kernels run on the CPU only under Linux: the platform darwin")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
