"""Code as users write it: to a strict type checker an operator is the function that it was declared with.

Each `type: ignore` is a wrong call that has to be found; where it is not, mypy complains of the comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

import opsmith


@opsmith.operator("typing::linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    y = x @ weight.mT * scale
    return y if bias is None else y + bias


@opsmith.operator("typing::split", results=("low", "high"))
def split(x: Tensor, size: int | tuple[int, int] = 1) -> tuple[Tensor, Tensor]:
    return x.floor(), x.ceil()


@opsmith.operator(
    "typing::norm", results={"y": ..., "rstd": opsmith.non_differentiable}, hidden=("rstd",), random=True
)
def norm(x: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    rstd = (x.var() + eps).rsqrt()
    return x * rstd, rstd


@opsmith.operator("typing::total", opaque=True, autocast="float32", inline=False)
def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


x, weight = torch.ones(2, 3), torch.ones(4, 3)

# A right call has the type that the reference returns.
assert_type(linear(x, weight), Tensor)
assert_type(linear(x, weight, None, scale=2.0), Tensor)
assert_type(linear(x=x, weight=weight, bias=torch.ones(4)), Tensor)
assert_type(split(x, (1, 2)), tuple[Tensor, Tensor])
assert_type(total([x, x]), Tensor)
assert_type(linear.reference(x, weight), Tensor)
low, high = split(x, 2)
assert_type(low, Tensor)

# A wrong call is found.
linear(x)  # type: ignore[call-arg]
linear(x, weight, None, 2.0)  # type: ignore[call-arg]
linear(x, weight, gain=1.0)  # type: ignore[call-arg]
linear(x, 3.0)  # type: ignore[arg-type]
linear(x, weight, scale="twice")  # type: ignore[arg-type]
linear(x, weight, bias=[1.0])  # type: ignore[arg-type]
linear(None, weight)  # type: ignore[arg-type]
split(x, (1, 2, 3))  # type: ignore[arg-type]
split(x, size="same")  # type: ignore[arg-type]
total(x)  # type: ignore[arg-type]
linear.explain(x)  # type: ignore[call-arg]
linear.reference(x)  # type: ignore[call-arg]
first, second, third = split(x)  # type: ignore[misc]
wrong: int = linear(x, weight)  # type: ignore[assignment]

# Hidden results are no part of the type of a call.
assert_type(norm(x), Tensor)
norm(x, eps="small")  # type: ignore[arg-type]
norm()  # type: ignore[call-arg]
assert_type(norm.reference(x), tuple[Tensor, Tensor])


@opsmith.operator("typing::hides", hidden=("mean", "rstd"), shapes="x: N -> N")
def hides(x: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor]:
    return x, [x], None, x


@opsmith.operator("typing::hides_three", hidden=("a", "b", "c"))
def hides_three(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x, x, x, x


@opsmith.operator("typing::places", results=("mean", "y", "rstd"), hidden=("mean", "rstd"))
def places(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


@opsmith.operator("typing::mixed", results=("mean", "y"), hidden=("mean",))
def mixed(x: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x], x


@opsmith.operator("typing::listed", hidden=["mean"])
def listed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


assert_type(hides(x), tuple[Tensor, list[Tensor]])
assert_type(hides_three(x), Tensor)
assert_type(places(x), Tensor)
# Where `results=` may place a hidden one before others of another type, or their number is not known.
assert_type(mixed(x), Any)
assert_type(listed(x), Any)
hides_three(x, x)  # type: ignore[call-arg]
hides.gradients(x=lambda grad: grad)(3)  # type: ignore[arg-type]


# Writing in place; the functional and the out form.
@opsmith.operator("typing::add_", mutates=("x",))
def add_(x: Tensor, y: Tensor, by: float = 1.0) -> None:
    x.add_(y * by)


add_(x, x)
assert_type(add_.functional(x, x), Any)
add_.functional(x)  # type: ignore[call-arg]
add_.functional(x, "y")  # type: ignore[arg-type]
assert_type(linear.functional(x, weight), Tensor)
assert_type(norm.functional(x), Any)
linear.functional(x)  # type: ignore[call-arg]
assert_type(linear.out(x, weight, out=torch.empty(2, 4)), Tensor)
assert_type(split.out(x, out=(x, x)), tuple[Tensor, Tensor])
linear.out(x, weight, out=(x, x))  # type: ignore[arg-type]
split.out(x, out=x)  # type: ignore[arg-type]
linear.out(x, weight)  # type: ignore[call-arg]


# Adopted classes have the types of their forward.
class WithContext(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int = 2) -> Tensor:
        return x * n


class WithSetup(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)


class OwnContext(FunctionCtx):
    n: int


class WithOwnContext(Function):
    @staticmethod
    def forward(ctx: OwnContext, x: Tensor) -> Tensor:
        return x


class Untyped(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, n: Any) -> Any:
        return getattr(x, n)


with_context = opsmith.adopt(WithContext, "typing::with_context")
assert_type(with_context(x, n=3), Tensor)
with_context(x, "n")  # type: ignore[arg-type]
with_context()  # type: ignore[call-arg]
with_setup = opsmith.adopt(WithSetup, "typing::with_setup", opaque=True)
assert_type(with_setup(x, y=x), tuple[Tensor, Tensor])
with_setup(x)  # type: ignore[call-arg]
assert_type(opsmith.adopt(WithOwnContext, "typing::own")(x), Tensor)
assert_type(opsmith.adopt(Untyped, "typing::untyped"), opsmith.Operator[..., Any])
assert_type(opsmith.adopt(Untyped, "typing::text", signature="(x: Tensor) -> Tensor")(x), Any)
signed = opsmith.adopt(Untyped, "typing::signed", signature=linear.reference)
assert_type(signed(x, weight), Tensor)
signed(x)  # type: ignore[call-arg]
assert_type(opsmith.adopt(torch.ops.aten.relu, reference=torch.relu)(x), Tensor)
assert_type(opsmith.adopt(torch.ops.aten.relu), opsmith.Operator[..., Any])
opsmith.adopt(WithContext, "typing::a", opaque="yes")  # type: ignore[call-overload]

# Attaching returns the operator, with its signature.
assert_type(linear.gradients(x=lambda grad, weight: grad @ weight, bias=opsmith.zero)(x, weight), Tensor)
assert_type(total.surrogate_gradients(xs=opsmith.not_implemented("why"))([x]), Tensor)
assert_type(linear.kernel("cpu", linear.reference)(x, weight), Tensor)
chained = linear.gradients(weight=opsmith.non_differentiable).kernel("cpu", linear.reference)
linear.kernel("cpu", cpp="", flags=["-O2"], include_dirs=[Path("/usr/include")], libraries=["m"])
linear.kernel("cpu", cpp_file="", flags=["-O2"], include_dirs=("headers",), libraries=(Path("libm.so"),))
chained(x)  # type: ignore[call-arg]
# A package may bring another language: its options are not known here.
assert_type(
    linear.kernel("cuda", helion=chained, deterministic=False, dtypes=[torch.half])(x, weight), Tensor
)


# A decorator returns the function, with its own type.
@linear.kernel("cuda", dtypes=[torch.float32])
def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, scale: float) -> Tensor:
    return x @ weight.mT * scale


assert_type(fast_linear(x, weight, None, scale=1.0), Tensor)
fast_linear(x, weight)  # type: ignore[call-arg]


@linear.gradients("x", "weight")
def both(grad: Tensor, x: Tensor, weight: Tensor, grads_needed: frozenset[str]) -> dict[str, Tensor]:
    return {"x": grad @ weight, "weight": grad.mT @ x}


assert_type(both(x, x, weight, frozenset()), dict[str, Tensor])


@split.gradients
def _(grad_low: Tensor, grad_high: Tensor) -> dict[str, Tensor]:
    return {"x": grad_low + grad_high}


@total.fake
def empty(xs: list[Tensor]) -> Tensor:
    return torch.empty_like(xs[0])


assert_type(empty([x]), Tensor)


@linear.samples
def some(make: opsmith.Make) -> Iterator[Any]:
    yield make(2, 3), make(4, 3)
    yield make.call(make(2, 3), make(4, 3), scale=2.0)


# What an operator is.
assert_type(linear.name, str)
as_function: Callable[[Tensor, Tensor], Tensor] = linear
not_a_function: Callable[[int], Tensor] = linear  # type: ignore[assignment]
known: list[opsmith.Operator[..., Any]] = opsmith.declared_operators()
assert_type(opsmith.find_operator("typing::linear")(1, 2, 3), Any)
assert_type(linear.explain(x, weight).saved, tuple[str, ...])
assert_type(linear.explain(x, weight).gradients, dict[str, str])

# A module: its calls have the type of the operator's.
Linear = linear.module(
    sizes=("in_features", "out_features"),
    parameters={"weight": ("out_features", "in_features"), "bias": ["out_features"]},
    init={"weight": opsmith.init.uniform(-0.1, 0.1), "bias": torch.nn.init.zeros_},
)
assert_type(Linear, type[opsmith.modules.OperatorModule[Tensor]])
layer = Linear(3, 4, bias=False, dtype=torch.float64, device="meta")
assert_type(layer(x), Tensor)
assert_type(split.module(forward=["size"])()(x, 2), tuple[Tensor, Tensor])
network: torch.nn.Module = torch.nn.Sequential(layer, split.module()())
layer.reset_parameters()
size: int = layer.in_features
assert_type(layer.operator.name, str)
assert_type(Linear.plan.sizes, tuple[str, ...])
linear.module(sizes={"M": "in_features"}, parameters=("weight",), init=opsmith.init.zeros, name="Linear")
Linear(3, 4, dtype="float64")  # type: ignore[arg-type]
linear.module(sizes=2)  # type: ignore[arg-type]
linear.module(init=0.5)  # type: ignore[arg-type]
linear.module(shapes=())  # type: ignore[call-arg]
opsmith.init.uniform("small")  # type: ignore[arg-type]


# What is refused when declaring.
opsmith.operator("typing::a", autocast="float16")  # type: ignore[call-overload]
opsmith.operator("typing::a", opaque="yes")  # type: ignore[call-overload]
opsmith.operator(linear)  # type: ignore[call-overload]
linear.kernel(0, fast_linear)  # type: ignore[call-overload]
linear.kernel("cpu", dtypes=["float32"])  # type: ignore[list-item]
linear.kernel("cpu", cpp="", dtypes=["float32"])  # type: ignore[list-item]
linear.kernel("cuda", cuda="", grid=1, dtypes="float32")  # type: ignore[arg-type]
linear.kernel("cpu", linear.reference, dtypes=torch.float32)
linear.kernel("cpu", cpp="", flags=[3])  # type: ignore[list-item]
linear.kernel("cpu", cpp="", flagz=["-O2"])  # type: ignore[call-overload]
linear.kernel("cpu", cpp_file="", deterministic=False)  # type: ignore[call-overload]
linear.kernel("cuda", cuda="", gird=1)  # type: ignore[call-overload]
linear.kernel("cuda", cuda_file="", grid=1, num_warps=4)  # type: ignore[call-overload]
linear.kernel("cuda", triton=fast_linear, grid=1, blok=2)  # type: ignore[call-overload]
linear.kernel("cuda", cuda="", triton=fast_linear, grid=1)  # type: ignore[call-overload]
linear.kernel("cuda", helion=fast_linear, strict="yes")  # type: ignore[call-overload]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)
