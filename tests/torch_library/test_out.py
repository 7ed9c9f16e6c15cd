"""`op.out` writes the results of an operator into tensors of the caller."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.profiler import profile
from torch.testing import assert_close

import opsmith
from opsmith import errors


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    """x by.  x [...]."""
    return x * by


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / 2 and x^2.  x [...]."""
    return x / 2, x * x


def norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / |x| by rows, and 1 / |x|, which callers do not see.  x [N, M]."""
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True))
    return x * inverse, inverse


SCALE = """
template <class T> void {name}(Contiguous<const T> x, double by, {result} result) {{
  for (int64_t i = 0; i < x.numel(); i++) result{at} = T(by) * x[i];
}}
"""
HALVES = """
template <class T> void {name}(Contiguous<const T> x, Contiguous<T> half, Contiguous<T> square) {{
  for (int64_t i = 0; i < x.numel(); i++) half[i] = x[i] / 2, square[i] = x[i] * x[i];
}}
"""
NORM = """
#include <cmath>
template <class T> void {name}(View<const T, 2> x, View<T, 2> y, View<T, 2> inverse) {{
  for (int64_t i = 0; i < x.size(0); i++) {{
    T sum = 0;
    for (int64_t j = 0; j < x.size(1); j++) sum += x(i, j) * x(i, j);
    inverse(i, 0) = 1 / std::sqrt(sum);
    for (int64_t j = 0; j < x.size(1); j++) y(i, j) = x(i, j) * inverse(i, 0);
  }}
}}
"""


def made(kind: str) -> Any:
    base, _, kernel = kind.partition("-")
    name = kind.replace("-", "_")
    if base == "scale":
        operator = opsmith.operator(f"outs::{name}")(scale)
    elif base == "halves":
        operator = opsmith.operator(f"outs::{name}", results=("half", "square"))(halves)
    else:
        operator = opsmith.operator(f"outs::{name}", results=("y", "inverse"), hidden=["inverse"])(norm)
    if kernel == "python":
        operator.kernel("cpu", operator.reference)
    if kernel == "cpp":
        source = {"scale": SCALE, "halves": HALVES, "norm": NORM}[base]
        operator.kernel("cpu", cpp=source.format(name=name, result="Contiguous<T>", at="[i]"), entry=name)
    return operator


KINDS = ["scale", "scale-python", "scale-cpp", "halves", "halves-cpp", "norm", "norm-cpp"]


@pytest.fixture(params=KINDS)
def operator(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


def buffers(operator: Any, x: Tensor, made: Callable[[Tensor], Tensor] = torch.empty_like) -> Any:
    found = operator.reference(x)
    if operator.specification.schema.hidden:
        found = found[0]
    return tuple(map(made, found)) if isinstance(found, tuple) else made(found)


def strided(like: Tensor) -> Tensor:
    return torch.zeros(*like.shape[:-1], 2 * like.shape[-1], dtype=like.dtype)[..., ::2]


def at_an_offset(like: Tensor) -> Tensor:
    return torch.zeros(like.numel() + 3, dtype=like.dtype)[3:].view(like.shape)


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.empty_like, strided, at_an_offset])
def test_values(operator: Any, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]) -> None:
    for shape in ((3, 5), (1, 1), (2, 0), (0, 3)):
        for x in (torch.randn(shape, dtype=dtype), torch.randn(shape[::-1], dtype=dtype).T):
            for _ in range(2):
                out = buffers(operator, x, layout)
                assert operator.out(x, out=out) is out
                assert_close(out, operator(x), equal_nan=True)


def test_through_torch_s_library(operator: Any) -> None:
    """`torch.ops.namespace.name.out` takes and returns what torch's own overloads of this name do."""
    x = torch.randn(2, 3)
    out = buffers(operator, x)
    operator.out(x, out=out)
    overload = getattr(torch.ops.outs, operator.specification.short_name).out
    if operator.specification.schema.visible == (0, 1):
        assert str(overload._schema).endswith(
            "*, Tensor(a!) out0, Tensor(b!) out1) -> (Tensor(a!), Tensor(b!))"
        )
        found = overload(x, out0=out[0], out1=out[1])
        assert found[0] is out[0]
        assert found[1] is out[1]
    else:
        assert str(overload._schema).endswith("*, Tensor(a!) out) -> Tensor(a!)")
        assert overload(x, out=out) is out
    assert_close(out, operator(x))
    if hasattr(torch.Tag, "out"):
        assert (torch.Tag.out in overload.tags) == (operator.reference is not scale)


@pytest.mark.parametrize(
    ("out", "kind", "said"),
    [
        (torch.empty(4), errors.ShapeError, "`out` has another shape than the result"),
        (torch.empty(1, 3), errors.ShapeError, "`out` has another shape than the result"),
        (torch.empty(3, dtype=torch.float64), errors.ResultTypeError, "`out` has another dtype"),
        (torch.empty(3, device="meta"), errors.PlacementError, "`out` has another device"),
        (torch.empty(1).expand(3), errors.MutationError, "several elements of `out` share the same memory"),
        ([torch.empty(3)], errors.UsageError, "`out` is not a tensor for each result"),
        ((torch.empty(3), torch.empty(3)), errors.UsageError, "`out` is not a tensor for each result"),
        (None, errors.UsageError, "`out` is not a tensor for each result"),
        (torch.empty(3, requires_grad=True), errors.MutationError, "no gradient flows through `out=`"),
    ],
    ids=["longer", "of-more-dimensions", "dtype", "device", "expanded", "list", "tuple", "none", "gradient"],
)
@pytest.mark.parametrize("kind_of_operator", ["scale", "scale-cpp"])
def test_what_is_refused(kind_of_operator: str, out: Any, kind: type[Exception], said: str) -> None:
    operator = made(kind_of_operator)
    operator.out(torch.ones(3), out=torch.empty(3))
    for _ in range(2):
        with pytest.raises(kind, match=re.escape(said)):
            operator.out(torch.ones(3), out=out)


@pytest.mark.parametrize("kind", ["scale", "scale-cpp"])
def test_what_shares_elements_with_an_argument(kind: str) -> None:
    operator, x = made(kind), torch.ones(4)
    operator.out(torch.ones(3), out=torch.empty(3))
    for out in (x, x[:]):
        with pytest.raises(errors.MutationError, match="the written `out` shares elements with `x`"):
            operator.out(x, out=out)
    with pytest.raises(errors.MutationError, match="shares elements"):
        operator.out(x[1:], out=x[:3])
    assert_close(x, torch.ones(4))


@pytest.mark.every(8)
def test_two_results_that_are_one(operator: Any) -> None:
    if operator.specification.schema.visible == (0, 1):
        out = torch.empty(3)
        with pytest.raises(errors.MutationError, match="the written `out0` shares elements with `out1`"):
            operator.out(torch.ones(3), out=(out, out))


def test_gradients_are_refused(operator: Any) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    out = buffers(operator, x.detach())
    for _ in range(2):
        with pytest.raises(errors.MutationError, match="no gradient flows through `out=`"):
            operator.out(x, out=out)
        with torch.no_grad():
            operator.out(x, out=out)
        assert_close(out, operator(x.detach()))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones(2, 3))
        with pytest.raises(errors.MutationError, match="no gradient flows through `out=`"):
            operator.out(dual, out=out)


def test_vmap(operator: Any) -> None:
    x = torch.randn(4, 2, 3)
    out = buffers(operator, x)
    mapped = torch.func.vmap(operator)(x)
    torch.func.vmap(lambda x, out: _nothing(operator.out(x, out=out)))(x, out)
    assert_close(out, mapped)


def _nothing(_: Any) -> Tensor:
    return torch.zeros(())


@pytest.mark.compile
@pytest.mark.every(9)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(operator: Any, backend: str) -> None:
    x = torch.randn(2, 3)
    out = buffers(operator, x)

    def total(x: Tensor, out: Any) -> Tensor:
        found = operator.out(x, out=out)
        return found[0].sum() if isinstance(found, tuple) else found.sum()

    torch.compiler.reset()
    found = torch.compile(total, backend=backend, fullgraph=True)(x, out)
    right = operator(x)
    assert_close(out, right)
    assert_close(found, (right[0] if isinstance(right, tuple) else right).sum())


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_code_that_calls_the_operator_with_numbers() -> None:
    """Inductor would give numbers twice to an overload that has torch's tag."""
    operator, x = made("scale-python"), torch.randn(3)
    operator.out(x, out=torch.empty(3))
    torch.compiler.reset()
    compiled = torch.compile(lambda x: operator(x, by=3.0) + operator(x), fullgraph=True)
    assert_close(compiled(x), 5 * x)


@pytest.mark.every(5)
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["scale", "scale-cpp"])
def test_compiled_code_copies_nothing(kind: str) -> None:
    operator = made(kind)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, out: operator.out(x, out=out), fullgraph=True)
    x, out = torch.randn(64), torch.empty(64)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, x, out)
    assert_close(out, scale(x))
    body = code.partition("def call(")[2]
    assert "empty_strided" not in body
    assert ".copy_(" not in body


@pytest.mark.parametrize("kind", ["scale-cpp", "halves-cpp"])
def test_a_steady_state_allocates_nothing(kind: str) -> None:
    operator, x = made(kind), torch.randn(64)
    out = buffers(operator, x)
    for _ in range(2):
        operator.out(x, out=out)
    with profile(profile_memory=True) as run:
        for _ in range(5):
            operator.out(x, out=out)
    allocated = [event for event in run.events() if event.name == "[memory]" and event.cpu_memory_usage > 0]
    assert allocated == []
    assert sum(event.cpu_memory_usage for event in run.events()) == 0


@pytest.mark.slow
def test_it_follows_its_operator() -> None:
    operator = made("scale")
    out = torch.empty(3)
    operator.out(torch.ones(3), out=out)
    operator.kernel("cpu", lambda x, by=2.0: x * by + 1)
    operator.out(torch.ones(3), out=out)
    assert_close(out, torch.full((3,), 3.0))
    operator.kernel("cpu", cpp=SCALE.format(name="scale", result="View<T, 1>", at="(i)"))
    operator.out(torch.ones(3), out=out)
    assert_close(out, torch.full((3,), 2.0))
    again = opsmith.operator("outs::scale")(scale)
    assert again.out(torch.ones(3), out=out) is out


@pytest.mark.parametrize("returns", [list[Tensor], Tensor | None])
def test_results_that_are_no_tensors(returns: Any) -> None:
    def listed(x: Tensor) -> Any:
        return [x * 2]

    listed.__annotations__["return"] = returns
    operator = opsmith.operator(f"outs::listed_{returns is list[Tensor]}")(listed)
    with pytest.raises(errors.UsageError, match="`out=` needs results that are tensors in every call"):
        operator.out(torch.ones(3), out=torch.empty(3))


def test_an_operator_that_returns_nothing() -> None:
    @opsmith.operator("outs::put", mutates=["cache"])
    def put(cache: Tensor, x: Tensor) -> None:
        cache.add_(x)

    with pytest.raises(errors.UsageError, match="`out=` needs results that are tensors") as caught:
        put.out(torch.ones(2), torch.ones(2), out=torch.empty(2))
    assert caught.value.hint == "it writes into `cache` itself; `put.functional` takes `out=`"
    given = torch.empty(2)
    put.functional.out(torch.ones(2), torch.ones(2), out=given)
    assert given.tolist() == [2.0, 2.0]


def test_an_argument_of_that_name() -> None:
    @opsmith.operator("outs::taken")
    def taken(x: Tensor, out: int = 2) -> Tensor:
        return x * out

    with pytest.raises(errors.UsageError, match="`out=` needs the name `out`, which is already an argument"):
        taken.out(torch.ones(3), out=torch.empty(3))


def test_its_parts_belong_to_the_operator() -> None:
    operator = made("scale")
    operator.out(torch.ones(3), out=torch.empty(3))
    form = operator.out_operator
    with pytest.raises(
        errors.UsageError, match="it is derived from `outs::scale`, so nothing can be attached to it"
    ):
        form.kernel("cpu", lambda x, by=2.0, *, out: None)


def test_an_operator_in_place_with_results() -> None:
    @opsmith.operator("outs::also", mutates=["x"])
    def also(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    x, out = torch.ones(3), torch.empty(())
    assert also.out(x, out=out) is out
    assert math.isclose(out.item(), 6.0)
    assert_close(x, torch.full((3,), 2.0))
