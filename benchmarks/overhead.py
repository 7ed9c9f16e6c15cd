"""Cost of one call beyond the work, on 8 floats, by each way to make an operator and each form of one.

The first table is of one multiplication, as ratios to aten. The second compares each form of an operator with
its peer: the same kernel with an autograd formula in C++, `apply` of the same class, an operator of the same
work. Figures are processor time of the one thread. What is compared takes turns within each round, so that a
machine that slows down slows all of it; a figure is the median over rounds, a ratio the median of the ratios
within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
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

at::Tensor loop_kernel(const at::Tensor& x, const at::Tensor& w) {
  TORCH_CHECK(x.sizes() == w.sizes() && x.is_contiguous() && w.is_contiguous(), "of one shape, contiguous");
  at::Tensor y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *by = w.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  for (int64_t i = 0; i < y.numel(); i++) to[i] = from[i] * by[i];
  return y;
}

at::Tensor call_loop(const at::Tensor& x, const at::Tensor& w) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("overhead_cpp::loop", "")
                       .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, w);
}

struct Loop : public torch::autograd::Function<Loop> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, w});
    return call_loop(x, w);
  }
  static torch::autograd::variable_list backward(AutogradContext* ctx, torch::autograd::variable_list grads) {
    auto saved = ctx->get_saved_variables();
    return {call_loop(grads[0], saved[1]), call_loop(grads[0], saved[0])};
  }
};

at::Tensor loop_autograd(const at::Tensor& x, const at::Tensor& w) {
  if (!at::GradMode::is_enabled() || !(x.requires_grad() || w.requires_grad())) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_loop(x, w);
  }
  return Loop::apply(x, w);
}

TORCH_LIBRARY(overhead_cpp, m) {
  m.def("mul(Tensor x, Tensor w) -> Tensor");
  m.def("loop(Tensor x, Tensor w) -> Tensor");
}
TORCH_LIBRARY_IMPL(overhead_cpp, CPU, m) {
  m.impl("mul", mul_kernel);
  m.impl("loop", loop_kernel);
}
TORCH_LIBRARY_IMPL(overhead_cpp, Autograd, m) {
  m.impl("mul", mul_autograd);
  m.impl("loop", loop_autograd);
}
"""

LOOP = """
template <class T>
void loop(Contiguous<const T> x, Contiguous<const T> w, Contiguous<T> y) {
  for (int64_t i = 0; i < y.numel(); i++) y[i] = x[i] * w[i];
}
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


@opsmith.operator("overhead::opsmith_loop", shapes="x: N, w: N -> N")
def loop(x: Tensor, w: Tensor) -> Tensor:
    return x * w


loop.gradients(x=lambda grad, w: loop(grad, w), w=lambda grad, x: loop(grad, x))


@opsmith.operator("overhead::hidden", hidden=("scale",))
def hidden(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.exp()
    return scale * w, scale


@opsmith.operator("overhead::visible")
def visible(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.exp()
    return scale * w, scale


hidden.gradients(x=lambda grad, w, scale: grad * w * scale, w=lambda grad, scale: grad * scale)
visible.gradients(
    x=lambda grad_result0, grad_result1, w, result1: (grad_result0 * w + grad_result1) * result1,
    w=lambda grad_result0, result1: grad_result0 * result1,
)


class Keeping(torch.autograd.Function):
    """The work of `hidden`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        scale = x.exp()
        ctx.save_for_backward(w, scale)
        return scale * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        w, scale = ctx.saved_tensors
        return grad * w * scale, grad * scale


class Attribute(torch.autograd.Function):
    """The work of `hidden`, kept as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.scale, ctx.w = x.exp(), w
        return ctx.scale * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.w * ctx.scale, grad * ctx.scale


class Reversal(torch.autograd.Function):
    """A reversal of gradients, which returns a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return -grad, torch.zeros_like(grad)


@opsmith.operator("overhead::thrice")
def thrice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * w, x + w, x - w


thrice.gradients(
    x=lambda grad_result0, grad_result1, grad_result2, w: grad_result0 * w + grad_result1 + grad_result2,
    w=lambda grad_result0, grad_result1, grad_result2, x: grad_result0 * x + grad_result1 - grad_result2,
)


@opsmith.operator("overhead::once")
def once(x: Tensor, w: Tensor) -> Tensor:
    return (x * w) + w - w


once.gradients(x=lambda grad, w: grad * w + grad - grad, w=lambda grad, x: grad * x + grad - grad)


class Thrice(torch.autograd.Function):
    """The work of `thrice`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w, x - w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w + grads[1] + grads[2], grads[0] * x + grads[1] - grads[2]


class Once(torch.autograd.Function):
    """The work of `once`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w) + w - w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w + grad - grad, grad * x + grad - grad


@opsmith.operator("overhead::listed")
def listed(xs: list[Tensor]) -> Tensor:
    return xs[0] * xs[1]


listed.gradients(xs=lambda grad, xs: [grad * xs[1], grad * xs[0]])


@opsmith.operator("overhead::random", random=True)
def random(x: Tensor, w: Tensor) -> Tensor:
    return x * w


random.gradients(x=lambda grad, w: grad * w, w=lambda grad, x: grad * x)
ADOPTED = {
    "forward(ctx, ...)": (opsmith.adopt(OldStyle, "overhead::old_style"), OldStyle.apply),
    "setup_context": (opsmith.adopt(WithSetupContext, "overhead::with_setup"), WithSetupContext.apply),
    "saves what it computed": (opsmith.adopt(Keeping, "overhead::keeping"), Keeping.apply),
    "an attribute": (opsmith.adopt(Attribute, "overhead::attribute"), Attribute.apply),
    "returns its input": (opsmith.adopt(Reversal, "overhead::reversal", kind="surrogate"), Reversal.apply),
}


def cpp_operators() -> None:
    """Compile the operators of `CPP`: about half a minute when they are not cached."""
    from torch.utils.cpp_extension import load_inline

    load_inline("opsmith_overhead", CPP, is_python_module=False, verbose=False)
    loop.kernel("cpu", cpp=LOOP, entry="loop", strict=True)


Way = Callable[..., Any]


def peers(*, cpp: bool) -> dict[str, tuple[Way, Way]]:
    """Forms of operators, each with its peer, by a name that says both."""
    both = {
        "hidden result : visible results": (hidden, visible),
        "hidden result : autograd.Function": (hidden, Keeping.apply),
        "three results : one of as many operations": (thrice, once),
        "the same of autograd.Function": (Thrice.apply, Once.apply),
        "list : plain": (lambda x, w: listed([x, w]), lambda x, w: ours(x, w)),
        "random=True : plain": (random, ours),
        **{f"adopted, {name} : apply": pair for name, pair in ADOPTED.items()},
    }
    if cpp:
        both["kernel in C++ : the same with its formula in C++"] = (loop, torch.ops.overhead_cpp.loop.default)
    return both


def cases() -> dict[str, Callable[[Way], Callable[[], Any]]]:
    """Calls to time, as closures over the function under test."""
    x, w = torch.randn(SIZE), torch.randn(SIZE)
    a, b, grad = x.clone().requires_grad_(), w.clone().requires_grad_(), torch.ones(SIZE)
    return {
        "no grad": lambda f: lambda: f(x, w),
        "forward, grad": lambda f: lambda: f(a, b),
        "forward + backward": lambda f: both_directions(f, a, b, grad),
    }


def both_directions(f: Way, a: Tensor, b: Tensor, grad: Tensor) -> Callable[[], Any]:
    """A call with its backward, from the gradients of all results."""
    results = f(a, b)
    if isinstance(results, Tensor):
        return lambda: torch.autograd.grad(f(a, b), (a, b), grad)
    grads = (grad,) * len(results)
    return lambda: torch.autograd.grad(f(a, b), (a, b), grads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=400, help="calls in each round")
    parser.add_argument(
        "--without-cpp", action="store_true", help="leave out what a C++ compiler is needed for"
    )
    parser.add_argument("--json", action="store_true", help="print the ratios of opsmith alone, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, Way] = {
        "aten": torch.mul,
        "autograd.Function": OldStyle.apply,
        "autograd.Function, setup_context": WithSetupContext.apply,
        "torch.library.custom_op": custom_op,
        "opsmith": ours,
        "opsmith, through torch.ops": ours.torch_operator,
    }
    if not given.without_cpp:
        cpp_operators()
        ways["C++ TORCH_LIBRARY"] = torch.ops.overhead_cpp.mul.default
    if given.json:
        print(json.dumps(ratios(given)))
        return
    print(f"torch {torch.__version__}, 1 thread, {SIZE} floats, {given.rounds} rounds of {given.calls} calls")
    print(f"load of the machine {os.getloadavg()[0]:.1f}; microseconds (ratio to aten)")
    columns = {case: measure(ways, "aten", prepare, given) for case, prepare in cases().items()}
    print(f"{'':34s}" + "".join(f"{case:>22s}" for case in columns))
    for name in ways:
        cells = [f"{column[name][0]:12.2f} (x{column[name][1]:5.2f})" for column in columns.values()]
        print(f"{name:34s}" + "".join(f"{cell:>22s}" for cell in cells))
    print("\nmicroseconds of the first (ratio to the second)")
    for name, (way, peer) in peers(cpp=not given.without_cpp).items():
        cells = []
        for prepare in cases().values():
            taken, ratio = measure({"first": way, "second": peer}, "second", prepare, given)["first"]
            cells.append(f"{taken:8.2f} (x{ratio:5.2f})")
        print(f"{name:50s}" + "".join(f"{cell:>20s}" for cell in cells), flush=True)


def ratios(given: argparse.Namespace) -> dict[str, float]:
    """The ratio of each form of an operator to its peer, by what is compared and the case."""
    pairs = {"plain : torch.mul": (ours, torch.mul), **peers(cpp=not given.without_cpp)}
    return {
        f"{name}, {case}": measure({"first": way, "second": peer}, "second", prepare, given)["first"][1]
        for name, (way, peer) in pairs.items()
        for case, prepare in cases().items()
    }


def measure(
    ways: dict[str, Way],
    baseline: str,
    prepare: Callable[[Way], Callable[[], Any]],
    given: argparse.Namespace,
) -> dict[str, tuple[float, float]]:
    """Median microseconds, and median ratio to the baseline, of each way."""
    timers = {name: timeit.Timer(prepare(way), timer=time.thread_time) for name, way in ways.items()}
    for timer in timers.values():
        timer.timeit(given.calls)

    def steady(timer: timeit.Timer) -> float:
        timer.timeit(given.calls // 10)  # what ran before has its own code and data in the caches
        return timer.timeit(given.calls) / given.calls * 1e6

    rounds = [{name: steady(timer) for name, timer in timers.items()} for _ in range(given.rounds)]
    return {
        name: (
            statistics.median(each[name] for each in rounds),
            statistics.median(each[name] / each[baseline] for each in rounds),
        )
        for name in ways
    }


if __name__ == "__main__":
    main()
