"""Function classes that write where they must not: into arguments, gradients, what was saved, or beside."""

from typing import Any

import torch
from class_mutants import Twice, matrix, mutant, twin
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@twin
def right() -> Any:
    return Twice, matrix()


@mutant("effects", "mutates-input", "x", "a call wrote into `x`: at [0, 0] it is", "mutates-saved")
def writes_into_input() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x.clone())
            x.mul_(2)
            return x * x / 4

    return Writes, matrix()


@mutant("effects", "mutates-input", "x", "a call whose arguments require gradients wrote into `x`: at [0, 0]")
def writes_into_input_where_it_requires_a_gradient() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x.clone())
            y = x * x
            if ctx.needs_input_grad[0]:
                x.mul_(2)
            return y

    return Writes, matrix()


@mutant("effects", "mutates-input", "x", "other bits for the same numbers (-0.0, or a nan)")
def writes_a_minus() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = x * x
            x.detach().numpy()[x.detach().numpy() == 0] = -0.0
            return y

    return Writes, [(torch.zeros(3),)]


@mutant("effects", "mutates-input", "x", "1 element, the first 1 after its last element")
def writes_past_the_end() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            if x.is_contiguous() and x.untyped_storage().nbytes() > x.numel() * x.element_size():
                x.detach().as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(9)
            return x * x

    return Writes, matrix()


@mutant(
    "effects",
    "mutates-input",
    "x",
    "writes outside of `x`, into memory of other tensors: 1 element, the first 2 before",
)
def writes_before_the_start() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            if x.storage_offset() > 2:
                x.detach().as_strided((1,), (1,), x.storage_offset() - 2).fill_(9)
            return x * x

    return Writes, matrix()


@mutant("effects", "mutates-input", "x", "the first between its own elements")
def writes_between_the_elements() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            if not x.is_contiguous():
                x.detach().as_strided((x.numel(),), (1,), x.storage_offset())[1] = 5
            return x * x

    return Writes, matrix()


@mutant(
    "effects", "mutates-input", "x", "a call gave `x` other memory or another shape (`.data = `, `resize_`)"
)
def exchanges_data() -> Any:
    class Exchanges(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x * x
            ctx.save_for_backward(x.clone())
            x.data = x.data * 1
            return y

    return Exchanges, matrix()


@mutant("effects", "side-effect", "x", "a call changed `x.requires_grad` from False to True")
def wants_gradients() -> Any:
    class Wants(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            x.requires_grad_()
            return x * x

    return Wants, matrix()


@mutant("effects", "mutates-grad-output", "grad", "a backward wrote into `grad`: at [0, 0] it is")
def writes_into_grad() -> Any:
    class Writes(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad.mul_(2 * x)

    return Writes, matrix()


@mutant("effects", "mutates-grad-output", "grad", "a backward writes outside of `grad`")
def writes_past_grad() -> Any:
    class Writes(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            if grad.storage_offset():
                grad.as_strided((1,), (1,), grad.storage_offset() + grad.numel()).fill_(1)
            return 2 * grad * x

    return Writes, matrix()


@mutant(
    "effects",
    "mutates-saved",
    None,
    "a backward wrote into a tensor of the shape [3, 4], which the call saved",
)
def writes_into_saved() -> Any:
    class Writes(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(2 * x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (twice,) = ctx.saved_tensors
            return twice.mul_(grad)

    return Writes, matrix()


@mutant("effects", "mutates-saved", None, "a backward wrote into the result `result`, which the call saved")
def writes_into_the_result() -> Any:
    class Writes(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (y,) = ctx.saved_tensors
            return y.detach().mul_(grad).clone()

    return Writes, matrix()


@mutant("effects", "mutates-input", "x", "a backward wrote into `x`: at", "mutates-saved")
def writes_into_saved_input() -> Any:
    class Writes(Twice):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return x.mul_(2).mul_(grad).clone()

    return Writes, matrix()


@mutant(
    "effects",
    "mutates-saved",
    "x",
    "gives a gradient of `x` that differs from the first gradient, also in a new call: the first "
    "backward wrote into `ctx.twice`",
)
def writes_into_context() -> Any:
    class Writes(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.twice = 2 * x.detach()
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            return ctx.twice.mul_(grad).clone()

    return Writes, matrix()


@mutant("effects", "mutates-saved", None, "(`retain_graph=True`) raises AttributeError: ", "leak")
def removes_what_it_kept() -> Any:
    class Removes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.twice = 2 * x.detach()
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            twice = ctx.twice
            del ctx.twice
            return twice * grad

    return Removes, matrix()


@twin
def refuses_a_second_backward() -> Any:
    class Refuses(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.done = False
            return Twice.forward(ctx, x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            if ctx.done:
                raise RuntimeError("it goes back once")
            ctx.done = True
            return Twice.backward(ctx, grad)

    return Refuses, matrix()


@twin
def works_on_copies() -> Any:
    class Copies(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = x.clone()
            return y.mul_(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad.clone().mul_(2).mul_(x)

    return Copies, matrix()


@twin
def says_that_it_writes() -> Any:
    class Doubles(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()
