"""Function classes that keep tensors alive that are no longer needed."""

from typing import Any, ClassVar

import torch
from class_mutants import Twice, matrix, mutant, twin
from torch import Tensor
from torch.autograd import Function

HISTORY: list[Tensor] = []


@mutant(
    "memory",
    "held",
    "result",
    "the result `result` and `x` of a call stays alive in a reference cycle (`ctx.y` holds it)",
)
def keeps_its_result_on_the_context() -> Any:
    class Keeps(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.y = x.exp()
            return ctx.y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.y

    return Keeps, matrix()


@twin
def saves_its_result() -> Any:
    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    return Saves, matrix()


@mutant("memory", "held", "x", "`x` stays on the context as `ctx.x` after the backward")
def leaves_its_input_on_the_context() -> Any:
    class Leaves(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad * ctx.x

    return Leaves, matrix()


@twin
def keeps_a_mask_on_the_context() -> Any:
    """An attribute of the context goes with the context."""

    class Masks(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.mask = x > 0
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.mask

    return Masks, matrix()


@mutant("memory", "leak", "x", "`x` of a call is kept for ever by `HISTORY` of the module `wrong_memory`")
def remembers_every_input() -> Any:
    class Remembers(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            HISTORY.append(x.detach())
            return Twice.forward(ctx, x)

    return Remembers, matrix()


@mutant("memory", "leak", "x", "Remembers.last`: it is not freed")
def remembers_the_last_input() -> Any:
    class Remembers(Twice):
        last: Any = None

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            Remembers.last = x
            return Twice.forward(ctx, x)

    return Remembers, matrix()


@mutant("memory", "leak", None, "a grad_output")
def remembers_gradients() -> Any:
    seen: list[Tensor] = []

    class Remembers(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append(grad.detach())
            return Twice.backward(ctx, grad)

    return Remembers, matrix()


@mutant("memory", "leak", None, "what is saved of a call is kept for ever by `masks`, which")
def remembers_what_it_saves() -> Any:
    masks: list[Tensor] = []

    class Remembers(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            mask = (x > 0).to(x.dtype)
            masks.append(mask)
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    return Remembers, matrix()


@mutant("memory", "leak", "x", "kept for ever by a list")
def hides_what_it_keeps() -> Any:
    """It is reached by an object of a library, which is not followed."""
    import types

    hidden = types.SimpleNamespace(seen=[])

    class Hides(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            hidden.seen.append(x.detach())
            return Twice.forward(ctx, x)

    return Hides, matrix()


@twin
def keeps_a_bounded_constant() -> Any:
    class Windows(Function):
        windows: ClassVar[dict[Any, Tensor]] = {}

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            key = x.shape[-1], x.dtype
            if key not in Windows.windows:
                with torch.inference_mode(False):
                    Windows.windows[key] = torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)
            ctx.save_for_backward(Windows.windows[key])
            return x * Windows.windows[key]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    return Windows, matrix()
