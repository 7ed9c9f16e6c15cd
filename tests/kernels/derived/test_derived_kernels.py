"""Kernels that are derived from the reference: values, gradients, kinds of calls, refusals and messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.build.cache import Cache
from opsmith.core import missing_kernels
from opsmith.kernels.derived.conditions import exact_sizes, read_conditions
from opsmith.kernels.derived.kernel import DerivedKernel
from opsmith.torch_library import capabilities


@opsmith.operator("derived_kernels::normalised")
def normalised(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd if weight is None else x * rstd * weight


normalised.kernel("cpu", derived=True)


def kernel_of(operator: Any) -> DerivedKernel:
    """The derived kernel of an operator."""
    found = operator.specification.kernels[0].function
    assert isinstance(found, DerivedKernel)
    return found


def agrees(operator: Any, *args: Any, gradients: bool = True, **tolerances: float) -> None:
    """Compare results and gradients with the reference's."""
    found, wanted = operator(*args), operator.reference(*args)
    assert_close(found, wanted, **tolerances)
    inputs = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
    if not (gradients and inputs):
        return
    pairs = [
        each
        for each in zip(as_tuple(found), as_tuple(wanted), strict=True)
        if isinstance(each[1], Tensor) and each[1].requires_grad
    ]
    grads = [torch.randn_like(each) for _, each in pairs]
    assert_close(
        torch.autograd.grad([each for each, _ in pairs], inputs, grads),
        torch.autograd.grad([each for _, each in pairs], inputs, grads),
        **tolerances,
    )


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def test_one_compiled_kernel_serves_every_size() -> None:
    agrees(normalised, leaf(16, 64), leaf(64))
    count = kernel_of(normalised)._count
    for rows, columns in ((2, 3), (33, 7), (64, 512)):
        agrees(normalised, leaf(rows, columns), leaf(columns))
    agrees(normalised, leaf(0, 5), leaf(5))
    agrees(normalised, leaf(64, 16).t(), leaf(64))
    assert kernel_of(normalised)._count == count


def test_an_explanation_names_the_saved_values() -> None:
    explained = normalised.explain(leaf(16, 64), leaf(64))
    assert explained.forward.startswith("kernel for cpu (derived from the reference), ")
    assert explained.gradients["x"].startswith("backward of the kernel, ")
    assert explained.saved == ("x", "weight", "a hidden result [16, 1] in float32 (64 bytes)")
    assert (explained.recomputes, explained.ordinary) == (False, False)
    assert explained.copies == ()
    strided = normalised.explain(leaf(64, 16).t(), leaf(64))
    assert strided.saved == explained.saved
    assert strided.copies == ("`x`: it is not contiguous",)


def test_the_reference_computes_where_no_kernel_is_derived() -> None:
    x = torch.randn(4, 8)
    assert "no elements" in normalised.explain(torch.empty(0, 8)).rejected[0]
    assert "it does not take complex64" in normalised.explain(x.to(torch.complex64)).rejected[0]
    rows: list[str] = []

    def of_row(row: Tensor) -> Tensor:
        rows.extend(normalised.explain(row).rejected)
        return row

    torch.func.vmap(of_row)(x)
    assert "the reference computes under transforms of `torch.func`" in rows[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    epsilon = torch.finfo(dtype).eps  # the reference rounds after each operation
    tolerances = {} if dtype == torch.float64 else {"rtol": 8 * epsilon, "atol": 8 * epsilon}
    agrees(normalised, leaf(16, 64, dtype=dtype), leaf(64, dtype=dtype), **tolerances)


@pytest.mark.slow
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(6, 4).t(),
        torch.randn(8, 12)[::2, ::3],
        torch.randn(4, 1).expand(4, 6),
        torch.randn(1, 6).expand(4, 6),
        torch.randn(4, 0),
        torch.randn(1, 1),
        torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_layouts_and_ranks(x: Tensor) -> None:
    agrees(normalised, x.detach().requires_grad_(), leaf(x.shape[-1]))
    agrees(normalised, x)


@opsmith.operator("derived_kernels::pieces")
def pieces(
    xs: list[Tensor], scale: Tensor | None, at: int, mode: str = "sum"
) -> tuple[Tensor, list[Tensor], Tensor]:
    total = torch.stack([each.exp() for each in xs]).sum(0)
    if scale is not None:
        total = total * scale
    if mode == "mean":
        total = total / len(xs)
    return total, [each * at for each in xs], total.argmax(-1)


pieces.kernel("cpu", derived=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_lists_several_results_and_other_values(scale: float | None, mode: str) -> None:
    xs = [leaf(3, 5) for _ in range(3)]
    given = None if scale is None else torch.tensor(scale)
    total, scaled, index = pieces(xs, given, 3, mode)
    wanted = pieces.reference(xs, given, 3, mode)
    assert_close((total, scaled, index), wanted)
    assert not index.requires_grad
    loss = total.sum() + sum(each.square().sum() for each in scaled)
    wanted_loss = wanted[0].sum() + sum(each.square().sum() for each in wanted[1])
    assert_close(torch.autograd.grad(loss, xs), torch.autograd.grad(wanted_loss, xs))


@pytest.mark.slow
def test_a_gradient_is_derived_for_the_inputs_that_need_one() -> None:
    agrees(normalised, leaf(16, 64), torch.randn(64))
    agrees(normalised, torch.randn(16, 64), leaf(64))
    with torch.no_grad():
        agrees(normalised, leaf(16, 64), leaf(64), gradients=False)
    assert normalised.explain(torch.randn(16, 64), leaf(64)).saved[0] == "x"


@pytest.mark.slow
def test_second_order_and_transforms() -> None:
    x, weight = leaf(2, 3, dtype=torch.float64), leaf(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(normalised, (x, weight))
    assert torch.autograd.gradgradcheck(normalised, (x, weight))
    by_func = torch.func.grad(lambda x: normalised(x, weight).sum())(x)
    assert_close(by_func, torch.autograd.grad(normalised.reference(x, weight).sum(), x)[0])
    assert_close(torch.func.vmap(normalised)(x), normalised.reference(x))
    found = torch.func.jvp(normalised, (x,), (torch.ones_like(x),))
    assert_close(found, torch.func.jvp(normalised.reference, (x,), (torch.ones_like(x),)))


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_code_contains_the_reference() -> None:
    x, weight = leaf(16, 64), leaf(64)
    with capabilities.fake_mode() as mode:
        assert normalised(mode.from_tensor(x), mode.from_tensor(weight)).shape == (16, 64)
    compiled = torch.compile(normalised, fullgraph=True)
    assert_close(compiled(x, weight), normalised.reference(x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["quick"])
def test_check_finds_nothing(effort: Any) -> None:
    normalised.samples(lambda make: [(make(3, 8), make(8))])
    report = opsmith.check(
        normalised, only=["forward", "gradient", "layouts", "second_order", "effects"], effort=effort
    )
    assert not report.errors, report


FORMULAS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "softmax": (lambda x: x.softmax(-1), [(7, 33)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), [(5, 9), (9,), (9,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5, 5), (4,), (4,)]),
    "gelu": (lambda x: F.gelu(x), [(5, 9)]),
    "swiglu": (lambda x, y: F.silu(x) * y, [(5, 9), (5, 9)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 8, 4), (2, 3, 6, 4), (2, 3, 6, 4)]),
    "huber": (lambda x, y: F.huber_loss(x, y), [(5, 9), (5, 9)]),
    "fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]), [(5, 12)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(3, 4, 5), (3, 5, 6)]),
    "cumsum": (lambda x: x.cumsum(-1), [(5, 9)]),
    "top k": (lambda x: x * (x >= x.topk(3, -1).values[..., -1:]), [(5, 9)]),
    "index add": (lambda x, y: x.index_add(0, torch.arange(y.shape[0]) % x.shape[0], y), [(3, 4), (7, 4)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_references(name: str) -> None:
    function, shapes = FORMULAS[name]
    names = [f"x{at}" for at in range(len(shapes))]

    def reference(*given: Tensor) -> Tensor:
        return function(*given)

    declared: Any = reference
    declared.__signature__ = inspect.Signature(
        [
            inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
            for each in names
        ],
        return_annotation=Tensor,
    )
    declared.__annotations__ = {**dict.fromkeys(names, Tensor), "return": Tensor}
    operator = opsmith.operator(f"derived_kernels::{name.replace(' ', '_')}")(reference)
    operator.kernel("cpu", derived=True)
    given = [leaf(*shape) for shape in shapes]
    assert operator.explain(*given).gradients["x0"].startswith("backward of the kernel")
    agrees(operator, *given, rtol=1e-4, atol=1e-5)
    larger = [torch.cat([each, each], 0).detach().requires_grad_() for each in given]
    if name in ("softmax", "gelu", "swiglu", "cumsum", "top k"):
        agrees(operator, *larger, rtol=1e-4, atol=1e-5)
        assert kernel_of(operator)._count == 1


def declared(name: str, **options: Any) -> Any:
    @opsmith.operator(f"derived_kernels::{name}", **options)
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    return twice


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"opaque": True}, "it is opaque"),
        ({"random": True}, "it draws random numbers"),
    ],
)
def test_operators_without_derived_kernels(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        declared(f"without_{'_'.join(options)}", **options).kernel("cpu", derived=True)
    assert caught.value.problem == f"no kernel can be derived: {reason}"
    assert caught.value.argument == "derived"


def test_an_operator_that_writes_has_none() -> None:
    @opsmith.operator("derived_kernels::increase_", mutates=["x"])
    def increase_(x: Tensor) -> None:
        x.add_(1)

    with pytest.raises(errors.UsageError, match="it writes into its arguments"):
        increase_.kernel("cpu", derived=True)


def test_only_true_is_a_value() -> None:
    with pytest.raises(errors.UsageError, match="`derived=` of a kernel has only one possible value"):
        declared("only_true").kernel("cpu", derived="yes")


def test_a_reference_that_depends_on_data_is_refused_with_its_line() -> None:
    @opsmith.operator("derived_kernels::branch")
    def branch(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return -x

    branch.kernel("cpu", derived=True)
    with pytest.raises(errors.KernelSourceError) as caught:
        branch(torch.ones(3))
    error = caught.value
    assert error.problem == "no kernel can be derived from its reference"
    line = inspect.getsourcelines(branch.reference)[1] + 2
    assert error.where == f"{__file__}:{line}"
    assert error.operator == "derived_kernels::branch"
    assert "torch.where" in str(error.hint)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr("opsmith.build.cache.cache_on_disk", lambda: cache)
    return cache


def test_what_the_compiler_refuses_becomes_an_error_and_leaves_nothing(
    own_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CppCompileError(RuntimeError):
        pass

    def refuse(*args: Any) -> None:
        raise CppCompileError("error: no such intrinsic")

    operator = declared("refused_by_the_compiler").kernel("cpu", derived=True)
    monkeypatch.setattr(capabilities, "compile_graph", refuse)
    with pytest.raises(
        errors.CompileError, match="the compiler refuses the code that Inductor has written"
    ) as caught:
        operator(torch.ones(3))
    assert caught.value.got == "error: no such intrinsic"
    assert own_cache.entries() == []


def test_without_a_compiler_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setattr(missing_kernels, "_warned", False)
    operator = declared("without_a_compiler").kernel("cpu", derived=True)
    with pytest.warns(RuntimeWarning, match="the reference runs in place of its kernel in Inductor"):
        assert operator(torch.ones(3)).tolist() == [2, 2, 2]
    assert "there is no C++ compiler" in operator.explain(torch.ones(3)).rejected[0]
    strict = declared("strictly_without").kernel("cpu", derived=True, strict=True)
    with pytest.raises(errors.ToolchainError, match="there is no C\\+\\+ compiler"):
        strict(torch.ones(3))


def test_more_kinds_than_the_maximum_are_computed_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = declared("many_kinds").kernel("cpu", derived=True)
    monkeypatch.setattr("opsmith.kernels.derived.kernel.MOST_VARIANTS", 0)
    assert operator(torch.ones(3)).tolist() == [2, 2, 2]
    assert "which is the maximum" in operator.explain(torch.ones(3)).rejected[0]


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("True", []),
        ("0 <= L['t0'].size()[0] and 0 <= L['t0'].storage_offset()", []),
        (
            "L['t1'].size()[0] == L['t0'].size()[1] and L['t0'].stride()[0] == L['t0'].size()[1]",
            ["t1.shape[0] == t0.shape[1]"],
        ),
        (
            "(L['t0'].size()[1] % 2) == 0 and 2 <= L['t0'].size()[1]",
            ["t0.shape[1] % 2 == 0", "2 <= t0.shape[1]"],
        ),
        (
            "(L['t0'].size()[0] == 2 or L['t0'].size()[0] == 3)",
            ["True if t0.shape[0] == 2 else t0.shape[0] == 3"],
        ),
    ],
)
def test_conditions_of_inductor(text: str, conditions: list[str]) -> None:
    assert read_conditions(text) == conditions


def test_exact_sizes() -> None:
    assert exact_sizes([torch.ones(2, 3), torch.ones(())]) == ["t0.shape == (2, 3)", "t1.shape == ()"]
