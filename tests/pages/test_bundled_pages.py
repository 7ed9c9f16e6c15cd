"""Pages of the bundled operators, with everything really looked at."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy
import pytest
import torch
from html_reader import Reader

import opsmith
from opsmith import ops
from opsmith.exporting.export import Body
from opsmith.kernels.cuda.nvrtc import find_nvrtc
from opsmith.pages.content import AbsentSection, collect_content
from opsmith.pages.kernels import kernels_of
from opsmith.pages.sections import BODIES, exports_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated")]

EVERY = (ops.exp, ops.mul, ops.add, ops.linear, ops.involution)


@pytest.mark.parametrize("operator", EVERY, ids=lambda each: each.name)
def test_nothing_is_absent_that_there_is(operator: opsmith.Operator[..., object]) -> None:
    content = collect_content(
        operator,
        lambda what: None,
        report=None,
        benchmark=True,
        effort="quick",
        seed=0,
        architectures=("sm_90",),
    )
    absent = {name for name, value in vars(content).items() if isinstance(value, AbsentSection)}
    assert absent == ({"kernels"} if not operator.specification.kernels else set())
    assert not isinstance(content.report, AbsentSection)
    assert content.report.passed
    assert not isinstance(content.exports, AbsentSection)
    assert [each.refused for each in content.exports] == ["", "", ""]


def test_every_kind_of_body_is_exported() -> None:
    assert set(BODIES) == {*get_args(Body)}


def test_an_export_is_compared_with_pytorch() -> None:
    function, inline, node = exports_of(ops.linear)
    assert function.nodes == {"opsmith::linear": 1}
    assert 0 <= function.difference <= function.allowed
    assert (function.opset, inline.body, node.refused) == (20, "inline", "")
    assert [each.state for each in (function, inline, node)] == ["passed", "passed", "skipped"]
    assert (inline.nodes, node.nodes) == ({}, {"opsmith::linear": 1})
    assert "opsmith:linear(-1) is not a registered function/op" in node.unverified


def test_an_operator_that_cannot_be_exported_says_why_in_each_kind_of_body() -> None:
    @opsmith.operator("bundled_pages::opaque", opaque=True)
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.sort(x.numpy()))

    opaque.fake(torch.empty_like)
    opaque.samples(lambda make: [(make(3),)])
    found = exports_of(opaque)
    assert [each.body for each in found] == ["function", "inline", "node"]
    assert all("bundled_pages::opaque" in each.refused for each in found[:2])


def test_kernels_for_cuda_tell_what_they_take() -> None:
    find_nvrtc()
    found = kernels_of(ops.involution, ("sm_90",))
    assert [(each.device, each.language) for each in found.listed] == [("cuda", "CUDA C++"), ("cpu", "C++")]
    assert found.refused == ()
    assert {each.architecture for each in found.usage} == {"sm_90"}
    assert all(each.registers > 0 for each in found.usage)
    assert found.summary().startswith(f"{len(found.usage)} forms compiled for sm_90: ")


def test_the_pages_of_a_module(tmp_path: Path) -> None:
    files = opsmith.page([ops.exp, ops.add], tmp_path, effort="quick", benchmarks=True)
    assert len(files) == 3
    for file in files:
        assert Reader(file.read_text(encoding="utf-8")).open == []
