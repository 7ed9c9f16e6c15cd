"""`opsmith.testing.emulated_cuda`: kernels in CUDA C++ compute CPU tensors in every kind of call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.core.aspects import KERNEL_OBSERVERS
from opsmith.ops.decoder import Decoder, DecoderSizes, PagedCache, generate
from opsmith.testing import emulated_cuda, emulation

OWN = "emulated_cuda::"
LAUNCH: dict[str, Any] = {"grid": "ceil(result.numel / 32)", "block": 32}


@opsmith.operator(OWN + "cubed", batching="elementwise")
def cubed(x: Tensor) -> Tensor:
    return x**3


@opsmith.operator(OWN + "slope")
def slope(x: Tensor, by: Tensor) -> Tensor:
    return 3 * x * x * by


CUBED = """
template <class T>
__global__ void cubed(Contiguous<const T> x, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = x[i] * x[i] * x[i];
}
"""
SLOPE = """
template <class T>
__global__ void slope(Contiguous<const T> x, Contiguous<const T> by, Contiguous<T> y) {
  OPSMITH_EACH(i, y.numel()) y[i] = 3 * x[i] * x[i] * by[i];
}
"""
CPP = """
template <class T>
void cubed(View<const T> x, Contiguous<T> y) {
  for (int64_t i = 0; i < y.numel(); i++) y[i] = 5;
}
"""
"""A wrong kernel for the CPU: its results show where it ran."""
cubed.kernel("cpu", cpp=CPP)
cubed.kernel("cuda", cuda=CUBED, dtypes=[torch.float32], **LAUNCH)
slope.kernel("cuda", cuda=SLOPE, dtypes=[torch.float32], **LAUNCH)
cubed.gradients(x=lambda grad, x: slope(x, grad))


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cubed(cubed(x) + 1)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def runs_outside(x: Tensor) -> bool:
    """True if the kernel for the CPU computes, as before."""
    return bool((cubed(x) == 5).all())


def test_a_model_runs_forward_and_backward() -> None:
    x = numbers(40).requires_grad_()
    expected = ((x**3) + 1) ** 3
    assert runs_outside(x)
    with emulated_cuda() as emulated:
        for _ in range(3):  # the third call would take the fast path
            y = Model()(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert_close(y, expected)
            assert_close(gradient, torch.autograd.grad(expected.sum(), x, retain_graph=True)[0])
    assert emulated.calls == {cubed.name: 6, slope.name: 6}
    assert emulated.refused == {}
    assert str(emulated) == f"{cubed.name}: 6 calls\n{slope.name}: 6 calls"
    assert runs_outside(x)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "no_grad": torch.no_grad()(cubed),
    "inference": torch.inference_mode()(cubed),
    "torch.ops": lambda x: torch.ops.emulated_cuda.cubed(x),
    "vmap": lambda x: torch.func.vmap(cubed)(x[None])[0],
    "out": lambda x: cubed.out(x, out=torch.empty_like(x)),
    "functional": lambda x: cubed.functional(x),
}
MORE_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "jvp": lambda x: torch.func.jvp(cubed, (x,), (torch.ones_like(x),))[0],
    "compile": lambda x: torch.compile(cubed, backend="eager")(x),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(cubed, x, use_reentrant=False),
}


@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(call, id=name) for name, call in CALLS.items()),
        *(pytest.param(call, id=name, marks=pytest.mark.slow) for name, call in MORE_CALLS.items()),
    ],
)
def test_every_kind_of_call_is_computed(call: Callable[[Tensor], Tensor]) -> None:
    x = numbers(7)
    assert not torch.equal(call(x), x**3)
    with emulated_cuda() as emulated:
        assert_close(call(x), x**3)
    assert emulated.calls[cubed.name] >= 1
    assert not torch.equal(call(x), x**3)


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_code_calls_the_kernels() -> None:
    x, model = numbers(40).requires_grad_(), torch.compile(Model(), fullgraph=True)
    assert bool((model(x) == 5).all())
    with emulated_cuda() as emulated:
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = (x**3 + 1) ** 3
    assert_close(y, expected)
    assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])
    assert emulated.calls == {cubed.name: 2, slope.name: 2}
    assert bool((model(x) == 5).all())


def test_what_the_kernel_does_not_take_is_computed_by_what_comes_next() -> None:
    x = numbers(6).double()
    with emulated_cuda() as emulated:
        cubed(numbers(6))
        assert bool((cubed(x) == 5).all())
        (first, *_) = cubed.explain(x).rejected
        accepted = cubed.explain(numbers(6)).forward
    reason = "`x` is float64, but the kernel takes float32"
    assert accepted.startswith(f"kernel for cpu (in CUDA C++, emulated), {__file__}:")
    assert first == f"{accepted}: {reason}"
    assert emulated.refused == {cubed.name: [reason]}
    assert str(emulated) == f"{cubed.name}: 1 call\n{cubed.name}: not taken: {reason}"


def test_a_copy_is_explained() -> None:
    with emulated_cuda() as emulated:
        copied = "`x`, which is not contiguous", "`result`, which the reference does not return as contiguous"
        assert cubed.explain(numbers(4, 6).mT).copies == copied
        assert_close(cubed(numbers(4, 6).mT), numbers(4, 6).mT ** 3)
    assert emulated.calls == {cubed.name: 1}


@opsmith.operator(OWN + "faulty")
def faulty(x: Tensor) -> Tensor:
    return x * 2


faulty.kernel(
    "cuda",
    cuda="""
__global__ void faulty(Contiguous<const float> x, Contiguous<float> y) {
  y[threadIdx.x] = x[threadIdx.x] * 2;
}
""",
    **LAUNCH,
)


@pytest.mark.slow
def test_a_fault_is_an_error_in_forward_and_in_backward() -> None:
    x = numbers(20).requires_grad_()

    @opsmith.operator(OWN + "faulty_backward")
    def faulty_backward(x: Tensor) -> Tensor:
        return x * 2

    faulty_backward.gradients(x=lambda grad: faulty(grad))
    with emulated_cuda(), pytest.raises(errors.KernelFaultError, match="out-of-bounds"):
        faulty(x)
    y = faulty_backward(x).sum()
    with emulated_cuda(), pytest.raises(errors.KernelFaultError, match="out-of-bounds"):
        y.backward()
    assert_close(faulty(x), x * 2)


@pytest.mark.slow
def test_contexts_are_nested() -> None:
    x = numbers(5)
    with emulated_cuda() as outer:
        cubed(x)
        with emulated_cuda(order="backward") as inner:
            assert_close(cubed(x), x**3)
        assert_close(cubed(x), x**3)
    assert (outer.calls, inner.calls) == ({cubed.name: 3}, {cubed.name: 1})
    assert (outer.order.name, inner.order.name) == ("forward", "backward")
    assert runs_outside(x)


@pytest.mark.slow
def test_other_threads_are_not_in_the_context() -> None:
    x = numbers(5)
    outside: list[Any] = []

    def other() -> None:
        outside.append(runs_outside(x))
        outside.append(cubed.explain(x).rejected[0].rpartition(": ")[2])

    with emulated_cuda() as emulated:
        for _ in range(2):
            cubed(x)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert outside == [True, "`emulated_cuda` is active in another thread"] * 2
    assert emulated.calls == {cubed.name: 2}


def _raise_if_emulated(kernels: int) -> None:
    assert len(cubed.specification.kernels) == kernels
    raise ZeroDivisionError


def test_an_exception_ends_the_context() -> None:
    before = cubed.specification.kernels
    with pytest.raises(ZeroDivisionError), emulated_cuda():
        _raise_if_emulated(len(before) + 1)
    assert cubed.specification.kernels == before
    assert runs_outside(numbers(5))


@pytest.mark.slow
def test_operators_and_kernels_that_are_declared_inside_are_in_it() -> None:
    with emulated_cuda() as emulated:

        @opsmith.operator(OWN + "inside")
        def cubed_inside(x: Tensor) -> Tensor:
            return x**3

        for _ in range(2):  # as a cell of a notebook that is run again
            cubed_inside.kernel("cuda", cuda=CUBED, entry="cubed", dtypes=[torch.float32], **LAUNCH)
            cubed_inside.kernel("cpu", cpp=CPP, entry="cubed")
            assert_close(cubed_inside(numbers(5)), numbers(5) ** 3)
    assert emulated.calls == {OWN + "inside": 2}
    assert [each.device for each in cubed_inside.specification.kernels] == ["cpu", "cuda"]


@pytest.mark.slow
def test_a_source_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "cubed.cu"
    file.write_text(CUBED)

    @opsmith.operator(OWN + "changing")
    def changing(x: Tensor) -> Tensor:
        return x**3

    changing.kernel("cuda", cuda_file=file, entry="cubed", dtypes=[torch.float32], **LAUNCH)
    x = numbers(5)
    with emulated_cuda():
        assert_close(changing(x), x**3)
        file.write_text(CUBED.replace("x[i] * x[i] * x[i]", "x[i] + 1"))
        assert_close(changing(x), x**3)
        changing.reload()
        assert_close(changing(x), x + 1)


@pytest.mark.slow
def test_what_the_cpu_cannot_run_is_computed_by_what_comes_next() -> None:
    @opsmith.operator(OWN + "in_ptx")
    def in_ptx(x: Tensor) -> Tensor:
        return x * 2

    in_ptx.kernel(
        "cuda",
        cuda='__global__ void in_ptx(View<const float> x, View<float> y) { asm("membar.gl;"); }',
        **LAUNCH,
    )
    x = numbers(5)
    with emulated_cuda() as emulated:
        cubed(x)
        assert_close(in_ptx(x), x * 2)
        assert "inline PTX is not emulated" in in_ptx.explain(x).rejected[0]
    assert emulated.calls == {cubed.name: 1}
    assert "inline PTX is not emulated" in emulated.refused[in_ptx.name][0]


@pytest.mark.slow
def test_a_launch_that_the_cpu_gives_up_is_computed_by_what_comes_next() -> None:
    @opsmith.operator(OWN + "together")
    def together(x: Tensor) -> Tensor:
        return x * 2

    text = """
__device__ int arrived;
__global__ void together(Contiguous<const float> x, Contiguous<float> y) {
  atomicAdd(&arrived, 1);
  while (atomicAdd(&arrived, 0) < 64) {}
}
"""
    together.kernel("cuda", cuda=text, grid=2, block=32)
    x = numbers(64)
    with emulated_cuda() as emulated:
        cubed(x)
        assert_close(together(x), x * 2)
        (first, *_) = together.explain(x).rejected
    assert "waits for another block" in first
    assert "waits for another block" in emulated.refused[together.name][0]


@pytest.mark.parametrize("name", ["_attach", "_detach"])
def test_a_fault_of_one_operator_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    observers, attach_or_detach = list(KERNEL_OBSERVERS), getattr(emulation, name)

    def fail(operator: Any) -> None:
        attach_or_detach(operator)
        if operator is slope:
            raise RuntimeError("one operator fails")

    monkeypatch.setattr(emulation, name, fail)
    with pytest.raises(RuntimeError, match="one operator fails"), emulated_cuda():
        cubed(numbers(3))
    assert observers == KERNEL_OBSERVERS
    assert emulation._contexts == 0
    left = [
        each for operator in (cubed, slope) for each in emulation._emulated(operator.specification.kernels)
    ]
    assert left == []
    assert runs_outside(numbers(3))


@pytest.mark.slow
def test_operators_in_place_write_into_their_arguments() -> None:
    @opsmith.operator(OWN + "raise_", mutates=["x"])
    def raise_(x: Tensor, by: float = 1.0) -> None:
        x.add_(by)

    raise_.kernel(
        "cuda",
        cuda="""
__global__ void raise_(View<float, 1> x, double by) {
  OPSMITH_EACH(i, x.numel()) x(i) += float(by);
}
""",
        grid=1,
    )
    base = torch.zeros(10)
    x = numbers(4).requires_grad_()
    with emulated_cuda() as emulated:
        raise_(base[::2])
        assert_close(raise_.functional(x, 2.0), x + 2)
        y = x * 1
        raise_(y, 3.0)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0] * 4
    assert base.tolist() == [1.0, 0.0] * 5
    assert sum(emulated.calls.values()) == 3


def test_it_warns_if_no_kernel_ran() -> None:
    with (
        pytest.warns(UserWarning, match="no CUDA C\\+\\+ kernel ran in `emulated_cuda`: no call of an"),
        emulated_cuda(),
    ):
        pass


def test_an_order_that_there_is_not() -> None:
    with pytest.raises(errors.UsageError) as caught, emulated_cuda(order="sideways"):
        pass
    assert caught.value.hint == 'call `opsmith.testing.emulated_cuda(order="backward")`'
    assert (caught.value.argument, caught.value.got) == ("order", "'sideways'")


@pytest.mark.slow
def test_a_decoder_trains_and_generates() -> None:
    torch.manual_seed(0)
    sizes = DecoderSizes(vocabulary=32, width=16, layers=1, heads=2, hidden=16, positions=16)
    network, tokens = Decoder(sizes), torch.randint(0, 32, (2, 6))

    def results() -> list[Tensor]:
        network.zero_grad()
        logits = network(tokens)
        logits.square().mean().backward()
        generated = generate(network, PagedCache(sizes, 2), [[1, 2, 3], [4]], 4)
        return [
            logits.detach(),
            torch.stack([*generated]),
            *(each.grad.clone() for each in network.parameters()),
        ]

    expected = results()
    with emulated_cuda() as emulated:
        assert_close(results(), expected, rtol=1e-4, atol=1e-5)
    names = ("rms_norm", "rms_norm_backward", "add_rms_norm_", "rope_", "write_kv_cache")
    assert {*emulated.calls} == {f"opsmith::{name}" for name in names}


@pytest.mark.slow
def test_bundled_operators_run_with_their_gradients() -> None:
    x, weight = numbers(1, 2, 3, 3).requires_grad_(), numbers(1, 1, 3, 3, 3, 3).requires_grad_()
    expected = opsmith.ops.involution.reference(x, weight, 1, 1)
    wanted = torch.autograd.grad(expected.sum(), (x, weight))
    with emulated_cuda(in_process=True) as emulated:
        y = opsmith.ops.involution(x, weight, padding=1)
        found = torch.autograd.grad(y.sum(), (x, weight))
    assert_close(y, expected)
    assert_close(found, wanted)
    assert set(emulated.calls) == {
        "opsmith::involution",
        "opsmith::involution_input_gradient",
        "opsmith::involution_weight_gradient",
    }
