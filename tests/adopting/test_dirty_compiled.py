"""Classes that write in place in compiled code and in exported programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dirty_classes import ByHelper, Case, Clips, Doubles, WithTotal, every_case, numbers, observed, one
from torch import Tensor
from torch.testing import assert_close

import opsmith


@pytest.mark.every(4)
@pytest.mark.compile
@pytest.mark.xdist_group("dirty")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at that of each argument
@every_case
def test_compiled(case: Case) -> None:
    operator = case.operator
    expected = observed(case.cls.apply, case, "contiguous", "recorded")
    operator(*case.make())
    step = torch.compile(lambda *given: operator(*given), backend="aot_eager", fullgraph=True, dynamic=False)
    try:
        for mode in ("recorded", "plain"):
            found = observed(step, case, "contiguous", mode)
            assert_close(found.arguments, expected.arguments)
            assert_close(found.results, expected.results)
            assert found.same == expected.same
            if mode == "recorded":
                assert_close(found.gradients, expected.gradients)
    finally:
        torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.xdist_group("dirty")
def test_compiled_before_any_call() -> None:
    operator, flagged = opsmith.adopt(Doubles, "dirty::first"), opsmith.adopt(Clips, "dirty::first_flag")
    hidden = opsmith.adopt(ByHelper, "dirty::first_hidden")

    def compiled(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
        return result

    try:
        x = numbers(3)
        compiled(operator, x)
        assert_close(x, 2 * numbers(3))
        compiled(lambda x: flagged(x, True), x)
        assert_close(x, 2 * numbers(3).clamp(0))
        for call in (lambda x: flagged(x, False), lambda x: hidden(x, True)):
            with pytest.raises(Exception, match="marks different arguments as dirty than when"):
                compiled(call, numbers(3))
        flagged(numbers(3), False)
        x = numbers(3)
        compiled(lambda x: flagged(x, False), x)
        assert_close(x, numbers(3))
    finally:
        torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.xdist_group("dirty")
def test_exported() -> None:
    operator = opsmith.adopt(WithTotal, "dirty::exported")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            total, new = operator(x)
            return total + new

    program = torch.export.export(Model(), one())
    assert "dirty.exported.default" in {str(node.target) for node in program.graph.nodes}
    (given,) = one()
    program.module()(given)
    assert_close(given, 3 * one()[0])
