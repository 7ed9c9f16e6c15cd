"""Operators of every kind of declaration and origin as rows, each beside plain torch that it must agree with.

A new origin of operators is one row more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith
from opsmith.torch_library import capabilities


@dataclass(frozen=True)
class Subject:
    """One operator as a function of tensors alone, beside plain torch.

    Args:
        name: Name of the row.
        operator: The handle.
        call: A call of the handle, of tensors alone.
        plain: The independent truth, of the same tensors.
        shapes: Shapes of the tensors.
        applied: `apply` of the class that was adopted; None for other origins.
        any_kind: True if sparse, nested and quantised tensors go to a kernel of others.
        refuses: Errors that are right, by the name of the context or of the executor.
    """

    name: str
    operator: opsmith.Operator[..., Any]
    call: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((2, 3), (2, 3))
    applied: Callable[..., Any] | None = None
    any_kind: bool = False
    refuses: dict[str, str] = field(default_factory=dict)

    def inputs(self) -> tuple[Tensor, ...]:
        """Float64 tensors from a fixed seed."""
        make = opsmith.Make(generator=torch.Generator().manual_seed(1))
        return tuple(make(*shape, low=-2.0) for shape in self.shapes)


@opsmith.operator("calls::declared")
def declared(x: Tensor, w: Tensor, by: float = 2.0) -> Tensor:
    return x * w.sin() * by


declared.gradients(
    x=lambda grad, w, by: grad * w.sin() * by, w=lambda grad, x, w, by: grad * x * w.cos() * by
)


@opsmith.operator("calls::derived")
def derived(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


@opsmith.operator("calls::partly_derived")
def partly_derived(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


partly_derived.gradients(x=lambda grad, x, w: grad * w * (x * w).cos())


@opsmith.operator("calls::kernel_derived")
def kernel_derived(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


@kernel_derived.kernel("cpu")
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.sin(x.numpy() * w.numpy())))


@opsmith.operator("calls::kernel_hidden_derived", hidden=("product",))
def kernel_hidden_derived(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = x * w
    return product.sin(), product


kernel_hidden_derived.kernel("cpu", lambda x, w: ((x * w).sin(), x * w))


@opsmith.operator("calls::joint")
def joint(x: Tensor, w: Tensor) -> Tensor:
    return x * w.exp()


@joint.gradients
def _(grad: Tensor, x: Tensor, w: Tensor, grads_needed: Any) -> dict[str, Tensor]:
    found = {"x": grad * w.exp()}
    return {**found, "w": grad * x * w.exp()} if "w" in grads_needed else found


@opsmith.operator("calls::hidden", hidden=("mean", "rstd"))
def hidden(x: Tensor, w: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * w, mean, rstd


def _hidden_x(grad: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    scaled, unit = grad * w, (x - mean) * rstd
    return (scaled - scaled.mean(-1, keepdim=True) - unit * (scaled * unit).mean(-1, keepdim=True)) * rstd


hidden.gradients(x=_hidden_x, w=lambda grad, x, mean, rstd: grad * (x - mean) * rstd)


@opsmith.operator("calls::several", results=("product", "total"))
def several(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, x + w


several.gradients(
    x=lambda grad_product, grad_total, w: grad_product * w + grad_total,
    w=lambda grad_product, grad_total, x: grad_product * x + grad_total,
)


@opsmith.operator("calls::constants", results={"y": ..., "large": opsmith.non_differentiable})
def constants(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * w, x.sign()


constants.gradients(x=lambda grad_y, w: grad_y * w, w=lambda grad_y, x: grad_y * x)


@opsmith.operator("calls::lists")
def lists(xs: list[Tensor], w: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    doubled = [x * 2 for x in xs]
    return doubled, xs[0] * xs[1] * (1.0 if w is None else w)


@opsmith.operator("calls::list_with_formulas", hidden=("total",))
def list_with_formulas(xs: list[Tensor], w: Tensor, by: float = 1.0) -> tuple[Tensor, Tensor]:
    total = sum((x * x for x in xs), torch.zeros_like(w))
    return total * w * by, total


list_with_formulas.gradients(
    xs=lambda grad, xs, w, by: [2 * grad * x * w * by for x in xs],
    w=lambda grad, total, by: grad * total * by,
)


@opsmith.operator("calls::optional")
def optional(x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    y = x + 1 if scale is None else x * scale
    return y if shift is None else y + shift


optional.gradients(
    x=lambda grad, scale: grad.clone() if scale is None else grad * scale,
    scale=lambda grad, x: grad * x,
    shift=lambda grad: grad.clone(),
)


def every_choice(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda x, a, b: (function(x), function(x, a), function(x, None, b), function(x, a, b))


@opsmith.operator("calls::in_place", mutates=["state"])
def in_place(state: Tensor, x: Tensor) -> None:
    state.mul_(x.sin()).add_(x)


in_place.gradients(
    state=lambda grad_state, x: grad_state * x.sin(),
    x=lambda grad_state, state, x: grad_state * (1 + state * x.cos()),
)


@opsmith.operator("calls::in_place_returned_", mutates=["x"], returns="x")
def in_place_returned_(x: Tensor, w: Tensor) -> Tensor:
    return x.mul_(w)


@opsmith.operator("calls::in_place_list", mutates=["totals"])
def in_place_list(totals: list[Tensor], x: Tensor) -> Tensor:
    totals[0].add_(x.sin())
    totals[1].mul_(x)
    return totals[0] * totals[1]


@opsmith.operator("calls::in_place_kernel", mutates=["x"])
def in_place_kernel(x: Tensor, w: Tensor) -> None:
    x.mul_(w).add_(1)


@in_place_kernel.kernel("cpu")
def _(x: Tensor, w: Tensor) -> None:
    x.numpy()[...] = x.numpy() * w.numpy() + 1


BOTH = """
template <class T>
void both(View<const T, 1> x, std::optional<View<const T, 1>> y, View<T, 1> total, View<T, 1> product) {
  for (int64_t i = 0; i < x.size(0); i++) {
    const T other = y ? (*y)(i) : T(1);
    total(i) = x(i) + other;
    product(i) = x(i) * other;
  }
}
"""
SUM = """
template <class T>
void sum(List<View<const T, 1>> xs, View<T, 1> total) {
  for (int64_t i = 0; i < total.size(0); i++) {
    total(i) = 0;
    for (const auto& x : xs) total(i) += x(i);
  }
}
"""
ADD = """
template <class T> void add(View<T, 2> x, View<const T, 2> w) {
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) x(i, j) = 2 * x(i, j) + w(i, j);
}
"""


def total_and_product(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    other = torch.ones_like(x) if y is None else y
    return x + other, x * other


cpp_several = opsmith.operator("calls::cpp_several")(total_and_product)
cpp_hidden = opsmith.operator("calls::cpp_hidden", results=("total", "product"), hidden=("product",))(
    total_and_product
)
for _operator in (cpp_several, cpp_hidden):
    _operator.kernel("cpu", cpp=BOTH, entry="both")


@opsmith.operator("calls::cpp_list")
def cpp_list(xs: list[Tensor]) -> Tensor:
    return sum(xs, torch.zeros_like(xs[0]))


cpp_list.kernel("cpu", cpp=SUM, entry="sum")


@opsmith.operator("calls::cpp_in_place", mutates=["x"])
def cpp_in_place(x: Tensor, w: Tensor) -> None:
    x.mul_(2).add_(w)


cpp_in_place.kernel("cpu", cpp=ADD, entry="add")


# A reference keeps an old value of an argument that it writes.
@opsmith.operator("calls::swap_", mutates=["a", "b"])
def swap_(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


@opsmith.operator("calls::rotate_", mutates=["a", "b"])
def rotate_(a: Tensor, b: Tensor) -> None:
    old = a * 1
    a.mul_(0.6).sub_(b, alpha=0.8)
    b.mul_(0.6).add_(old, alpha=0.8)


@opsmith.operator("calls::cycle_", mutates=["a", "b", "c"])
def cycle_(a: Tensor, b: Tensor, c: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(kept)


@opsmith.operator("calls::momentum_", mutates=["velocity", "x"])
def momentum_(velocity: Tensor, x: Tensor) -> None:
    before = velocity.clone()
    velocity.mul_(0.5).add_(x)
    x.add_(velocity - before)


@opsmith.operator("calls::add_into", mutates=["target"])
def add_into(source: Tensor, target: Tensor) -> None:
    target.add_(2 * source)


@add_into.kernel("cpu")
def _(source: Tensor, target: Tensor) -> None:
    for column in range(target.shape[1]):
        target[:, column] += 2 * source[:, column]


def beside_its_clone(read: Any, written: Any) -> Callable[[Tensor], Tensor]:
    """A part of a tensor is written, and a part of a clone of it is read."""

    def called(x: Tensor) -> Tensor:
        x = x * 1
        kept = x.clone()
        add_into(kept[read], x[written])
        return x

    return called


def on_copies(function: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """A function that writes its first arguments as one of tensors alone, which writes copies."""

    def functional(*given: Tensor) -> Any:
        copies = [each.clone() for each in given[:count]]
        function(*copies, *given[count:])
        return copies[0] if count == 1 else tuple(copies)

    return functional


def on_a_list(function: Callable[..., Any]) -> Callable[..., Any]:
    def functional(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        totals = [first.clone(), second.clone()]
        result = function(totals, x)
        return (result, *totals)

    return functional


@opsmith.operator("calls::out_form")
def out_form(x: Tensor, w: Tensor) -> Tensor:
    return x * w.cos()


def into(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call with `out=`, which has no gradient, as a function that has the gradient of `x`."""

    def called(x: Tensor, w: Tensor) -> Tensor:
        written = torch.empty_like(x.detach())
        function(x.detach(), w.detach(), written)
        return x + w + written

    return called


@opsmith.operator(
    "calls::drawn",
    random=True,
    results={"y": ..., "mask": opsmith.non_differentiable},
    hidden=("mask",),
)
def drawn(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.rand_like(x)
    return x.sin() * mask, mask


drawn.gradients(x=lambda grad_y, x, mask: grad_y * x.cos() * mask)


@opsmith.operator("calls::opaque_sin", opaque=True)
def opaque_sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.sin(x.numpy())))


@opsmith.operator("calls::opaque_cos", opaque=True)
def opaque_cos(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.cos(x.numpy())))


opaque_sin.fake(torch.empty_like)
opaque_cos.fake(torch.empty_like)
opaque_sin.gradients(x=lambda grad, x: grad * opaque_cos(x))
opaque_cos.gradients(x=lambda grad, x: -grad * opaque_sin(x))


class OldStyle(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w if ctx.needs_input_grad[0] else None, grad * x


class WithSetupContext(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class Attributes(Function):
    """Keeps a computed tensor, a number and a size as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.slope, ctx.by, ctx.size = x.cos(), 2.0, x.shape
        ctx.save_for_backward(x, w)
        return x.sin() * w * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        assert ctx.size == grad.shape
        return grad * w * ctx.slope * ctx.by, grad * x.sin() * ctx.by


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x.add_(w.sin())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grad, grad * w.cos()


class ReturnsItsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)
        return x.view_as(x), x * w

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        x, w = ctx.saved_tensors
        by_x = 0 if second is None else second * w
        return by_x if first is None else first + by_x, None if second is None else second * x


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


def adopted(name: str, function_class: type[Function], plain: Callable[..., Any], **refuses: str) -> Subject:
    operator = opsmith.adopt(function_class, f"calls::{function_class.__name__.lower()}")
    writes = function_class is InPlace
    call, applied = (on_copies(each) if writes else each for each in (operator, function_class.apply))
    return Subject(name, operator, call, plain, applied=applied, refuses=refuses)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _of_product(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors  # once: a checkpoint unpacks nothing twice
    return grad * w, grad * x


def library_operator(name: str, *, gradient: bool) -> Subject:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    made = torch.library.custom_op(f"calls_elsewhere::{name}", product, mutates_args=())
    made.register_fake(lambda x, w: x.new_empty(torch.broadcast_shapes(x.shape, w.shape)))
    if gradient:
        made.register_autograd(_of_product, setup_context=_save)
    operator = opsmith.adopt(made, reference=product)
    row = f"library-operator{'' if gradient else '-without-gradient'}"
    return Subject(row, operator, operator, product, any_kind=True)


def library_operator_in_place() -> Subject:
    def add_sine(x: Tensor, w: Tensor) -> None:
        x.add_(w.sin())

    made = torch.library.custom_op("calls_elsewhere::add_sine", add_sine, mutates_args=("x",))
    operator = opsmith.adopt(made, reference=add_sine)
    return Subject(
        "library-operator-in-place", operator, on_copies(operator), on_copies(add_sine), any_kind=True
    )


def library_operators() -> list[Subject]:
    """Operators of a library; none where they cannot be adopted, which other tests say is refused."""
    if not capabilities.on("library_operators"):
        return []
    return [
        library_operator("product", gradient=True),
        library_operator("product_alone", gradient=False),
        library_operator_in_place(),
    ]


SUBJECTS = {
    each.name: each
    for each in (
        Subject("declared", declared, lambda x, w: declared(x, w, by=3), lambda x, w: x * w.sin() * 3),
        Subject("derived", derived, derived, lambda x, w: (x * w).sin()),
        Subject("partly-derived", partly_derived, partly_derived, lambda x, w: (x * w).sin()),
        Subject("kernel-derived", kernel_derived, kernel_derived, lambda x, w: (x * w).sin()),
        Subject(
            "kernel-hidden-derived", kernel_hidden_derived, kernel_hidden_derived, lambda x, w: (x * w).sin()
        ),
        Subject("joint", joint, joint, lambda x, w: x * w.exp()),
        Subject("hidden", hidden, hidden, lambda x, w: hidden.reference(x, w)[0], ((2, 3), (3,))),
        Subject("several", several, several, lambda x, w: (x * w, x + w)),
        Subject("constants", constants, constants, lambda x, w: (x * w, x.sign().detach())),
        Subject(
            "lists",
            lists,
            lambda a, b: (*lists([a, b])[0], lists([a, b], a)[1]),
            lambda a, b: (a * 2, b * 2, a * b * a),
        ),
        Subject(
            "list-with-formulas",
            list_with_formulas,
            lambda a, b, w: list_with_formulas((a, b), w, 1.5),
            lambda a, b, w: (a * a + b * b) * w * 1.5,
            ((2, 3), (2, 3), (2, 3)),
        ),
        Subject(
            "optional", optional, every_choice(optional), every_choice(optional.reference), ((3,), (3,), (3,))
        ),
        Subject("in-place", in_place, on_copies(in_place), lambda s, x: s * x.sin() + x),
        Subject("in-place-returned", in_place_returned_, on_copies(in_place_returned_), lambda x, w: x * w),
        Subject(
            "in-place-list",
            in_place_list,
            on_a_list(in_place_list),
            lambda a, b, x: ((a + x.sin()) * b * x, a + x.sin(), b * x),
            ((3,), (3,), (3,)),
        ),
        Subject("in-place-kernel", in_place_kernel, on_copies(in_place_kernel), lambda x, w: x * w + 1),
        Subject(
            "cpp-several",
            cpp_several,
            lambda x, y: (*cpp_several(x, y), *cpp_several(x)),
            lambda x, y: (x + y, x * y, x + 1, x * 1),
            ((3,), (3,)),
        ),
        Subject("cpp-hidden", cpp_hidden, cpp_hidden, torch.add, ((3,), (3,))),
        Subject("cpp-list", cpp_list, lambda a, b: cpp_list([a, b, a]), lambda a, b: 2 * a + b, ((3,), (3,))),
        Subject("cpp-in-place", cpp_in_place, on_copies(cpp_in_place), lambda x, w: 2 * x + w),
        Subject("swap", swap_, on_copies(swap_, 2), lambda a, b: (b + 0 * a, a + 0 * b)),
        Subject(
            "rotate", rotate_, on_copies(rotate_, 2), lambda a, b: (0.6 * a - 0.8 * b, 0.6 * b + 0.8 * a)
        ),
        Subject(
            "cycle",
            cycle_,
            on_copies(cycle_, 3),
            lambda a, b, c: (b + 0 * a, c + 0 * a, a + 0 * b),
            ((2, 3), (2, 3), (2, 3)),
        ),
        Subject(
            "momentum",
            momentum_,
            on_copies(momentum_, 2),
            lambda v, x: (0.5 * v + x, x + (0.5 * v + x) - v),
        ),
        Subject(
            "kept-clone-columns",
            add_into,
            beside_its_clone(np.s_[:, :-1], np.s_[:, 1:]),
            lambda x: torch.cat([x[:, :1], x[:, 1:] + 2 * x[:, :-1]], 1),
            ((2, 3),),
            any_kind=True,  # it is sliced before the call
        ),
        Subject(
            "kept-clone-rows",
            add_into,
            beside_its_clone(np.s_[:-1], np.s_[1:]),
            lambda x: torch.cat([x[:1], x[1:] + 2 * x[:-1]]),
            ((3, 2),),
            any_kind=True,
        ),
        Subject(
            "kept-clone-whole",
            add_into,
            beside_its_clone(..., ...),
            lambda x: 3 * x,
            ((2, 3),),
            refuses={
                "sparse": "NotImplementedError",
                "mkldnn": "NotImplementedError",
                "quantised": "RuntimeError",
            },
            # of the clone and its slice, before the call
        ),
        Subject(
            "out",
            out_form,
            into(lambda x, w, out: out_form.out(x, w, out=out)),
            lambda x, w: x + w + x.detach() * w.detach().cos(),
            refuses={"mkldnn": "NotImplementedError"},  # of `torch.empty_like`, before the call
        ),
        Subject(
            "random",
            drawn,
            drawn,
            lambda x: x.sin() * torch.rand_like(x),
            ((2, 3),),
            refuses={"DTensor": "PlacementError", "DTensor rows": "PlacementError"},
        ),
        Subject(
            "opaque",
            opaque_sin,
            opaque_sin,
            torch.sin,
            ((2, 3),),
            refuses={"DTensor rows": "PlacementError"},
        ),
        adopted("adopted-old-style", OldStyle, lambda x, w: x * w),
        adopted("adopted-setup-context", WithSetupContext, lambda x, w: x * w),
        adopted("adopted-attributes", Attributes, lambda x, w: x.sin() * w * 2),
        adopted("adopted-in-place", InPlace, lambda x, w: x + w.sin()),
        adopted("adopted-returns-its-input", ReturnsItsInput, lambda x, w: (x * 1, x * w)),
        adopted(
            "adopted-once",
            Once,
            lambda x, w: x * w,
            **{"dual": "TransformError", "double-backward": "TransformError"},
        ),
        *library_operators(),
    )
}
