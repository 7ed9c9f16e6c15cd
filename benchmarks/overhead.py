"""Cost of one call beyond the work: multiply 8 floats, by each way to make an operator, in one run.

The ways take turns within each round, so that a machine that slows down slows all of them; a figure is the
median over rounds, a ratio the median of the ratios to aten within each round. Stated limits for opsmith:
2.0 without grad, 3.0 forward with grad, 1.4 forward and backward, and half of custom_op's in the first two.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import opsmith

SIZE = 8
CPP = """
#include <torch/library.h>
#include <torch/csrc/autograd/custom_function.h>
#include <ATen/ATen.h>

using torch::autograd::AutogradContext;
using torch::autograd::Variable;

at::Tensor mul_kernel(const at::Tensor& x, const at::Tensor& w) { return at::mul(x, w); }

at::Tensor call(const at::Tensor& x, const at::Tensor& w) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("overhead_cpp::mul", "")
                       .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, w);
}

struct Mul : public torch::autograd::Function<Mul> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, w});
    return call(x, w);
  }
  static torch::autograd::variable_list backward(AutogradContext* ctx, torch::autograd::variable_list grads) {
    auto saved = ctx->get_saved_variables();
    return {grads[0] * saved[1], grads[0] * saved[0]};
  }
};

at::Tensor mul_autograd(const at::Tensor& x, const at::Tensor& w) {
  if (!at::GradMode::is_enabled() || !(x.requires_grad() || w.requires_grad())) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call(x, w);
  }
  return Mul::apply(x, w);
}

TORCH_LIBRARY(overhead_cpp, m) { m.def("mul(Tensor x, Tensor w) -> Tensor"); }
TORCH_LIBRARY_IMPL(overhead_cpp, CPU, m) { m.impl("mul", mul_kernel); }
TORCH_LIBRARY_IMPL(overhead_cpp, Autograd, m) { m.impl("mul", mul_autograd); }
"""


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class WithSetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


@torch.library.custom_op("overhead::mul", mutates_args=())
def custom_op(x: Tensor, w: Tensor) -> Tensor:
    return x * w


custom_op.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@opsmith.operator("overhead::opsmith_mul")
def ours(x: Tensor, w: Tensor) -> Tensor:
    return x * w


ours.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)


def cpp_operator() -> Callable[..., Tensor]:
    """The operator of `CPP`, compiled: about half a minute when it is not cached."""
    from torch.utils.cpp_extension import load_inline

    load_inline("opsmith_overhead", CPP, is_python_module=False, verbose=False)
    return torch.ops.overhead_cpp.mul.default


def cases() -> dict[str, Callable[[Callable[..., Tensor]], Callable[[], Any]]]:
    """Calls to time, as closures over the function under test."""
    x, w = torch.randn(SIZE), torch.randn(SIZE)
    a, b, grad = x.clone().requires_grad_(), w.clone().requires_grad_(), torch.ones(SIZE)
    return {
        "no grad": lambda f: lambda: f(x, w),
        "forward, grad": lambda f: lambda: f(a, b),
        "forward + backward": lambda f: lambda: torch.autograd.grad(f(a, b), (a, b), grad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=400, help="calls in each round")
    parser.add_argument(
        "--without-cpp", action="store_true", help="leave out what a C++ compiler is needed for"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, Callable[..., Tensor]] = {
        "aten": torch.mul,
        "autograd.Function": OldStyle.apply,
        "autograd.Function, setup_context": WithSetupContext.apply,
        "torch.library.custom_op": custom_op,
        "opsmith": ours,
        "opsmith, through torch.ops": ours.torch_operator,
    }
    if not given.without_cpp:
        ways["C++ TORCH_LIBRARY"] = cpp_operator()
    print(f"torch {torch.__version__}, 1 thread, {SIZE} floats, {given.rounds} rounds of {given.calls} calls")
    print("microseconds (ratio to aten)")
    columns = {case: measure(ways, prepare, given) for case, prepare in cases().items()}
    print(f"{'':34s}" + "".join(f"{case:>22s}" for case in columns))
    for name in ways:
        cells = [f"{column[name][0]:12.2f} (x{column[name][1]:5.2f})" for column in columns.values()]
        print(f"{name:34s}" + "".join(f"{cell:>22s}" for cell in cells))


def measure(
    ways: dict[str, Callable[..., Tensor]],
    prepare: Callable[..., Callable[[], Any]],
    given: argparse.Namespace,
) -> dict[str, tuple[float, float]]:
    """Median microseconds, and median ratio to aten, of each way."""
    timers = {name: timeit.Timer(prepare(way)) for name, way in ways.items()}
    for timer in timers.values():
        timer.timeit(given.calls)

    def steady(timer: timeit.Timer) -> float:
        timer.timeit(given.calls // 10)  # what ran before has its own code and data in the caches
        return timer.timeit(given.calls) / given.calls * 1e6

    rounds = [{name: steady(timer) for name, timer in timers.items()} for _ in range(given.rounds)]
    return {
        name: (
            statistics.median(each[name] for each in rounds),
            statistics.median(each[name] / each["aten"] for each in rounds),
        )
        for name in ways
    }


if __name__ == "__main__":
    main()
