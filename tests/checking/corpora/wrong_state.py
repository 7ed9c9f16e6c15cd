"""Function classes that remember what they must not: earlier calls, modes, threads."""

import functools
from typing import Any

import torch
from class_mutants import Twice, matrix, mutant, twin
from torch import Tensor
from torch.autograd import Function

LAST: list[Tensor] = []


def by_key(key: Any) -> Any:
    """The square, remembered under a key of its argument."""
    memory: dict[Any, Tensor] = {}

    class Remembers(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            if key(x) not in memory:
                memory[key(x)] = (x * x).detach().clone()
            return memory[key(x)].clone()

    return Remembers, matrix()


@mutant("state", "stale-state", "result", "differs from the same call alone: at", "leak")
def remembers_by_shape() -> Any:
    return by_key(lambda x: tuple(x.shape))


@mutant(
    "state", "stale-state", "result", "made after this call, differs from the same call alone: at", "leak"
)
def remembers_by_shape_and_dtype() -> Any:
    return by_key(lambda x: (tuple(x.shape), x.dtype))


@mutant(
    "state",
    "stale-state",
    "result",
    "made in the same tensors, after other numbers were in them, differs from the same call alone: at",
    "leak",
)
def remembers_by_address() -> Any:
    return by_key(lambda x: (x.data_ptr(), x.shape, x.stride(), x.dtype))


@mutant(
    "state", "stale-state", "x", "The operator keeps something in `LAST` of the module `wrong_state`", "leak"
)
def saves_in_a_global() -> Any:
    class Saves(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            LAST[:] = [x.detach()]
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad * LAST[0]

    return Saves, matrix()


@mutant("state", "stale-state", "x", "comes between its forward and its backward, differs", "leak")
def saves_on_the_class() -> Any:
    class Saves(Twice):
        x: Any = None

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            Saves.x = x.detach()
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad * Saves.x

    return Saves, matrix()


@mutant(
    "state",
    "stale-state",
    None,
    "another layout comes between its forward and its backward, raises",
    "side-effect",
)
def saves_a_shape_on_the_class() -> Any:
    """Right as long as all calls have one layout."""

    class Saves(Twice):
        strides: Any = None

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            Saves.strides = x.stride()
            return Twice.forward(ctx, x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            if Saves.strides != x.stride():
                raise RuntimeError("its strides are not those of the forward")
            return 2 * grad * x

    return Saves, matrix()


@mutant(
    "state",
    "stale-state",
    None,
    "after this call was made under `torch.inference_mode()`, raises RuntimeError",
)
def caches_in_inference_mode() -> Any:
    grids: dict[Any, Tensor] = {}

    class Weighted(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            key = x.shape, x.dtype
            if key not in grids:
                grids[key] = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
            ctx.save_for_backward(grids[key])
            return x * grids[key]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    return Weighted, matrix()


@mutant("state", "stale-state", "x", "after this call was made under `torch.no_grad()`")
def remembers_the_first_mode() -> Any:
    known: dict[str, bool] = {}

    class Decides(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            needed = known.setdefault("needed", ctx.needs_input_grad[0])
            ctx.save_for_backward(x if needed else torch.zeros_like(x))
            return x * x

    return Decides, matrix()


@mutant("state", "input-needs-grad", "x", "`result` differs where `x` requires no gradient, with")
def computes_otherwise_without_gradients() -> Any:
    class Rounds(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = x * x
            return y if ctx.needs_input_grad[0] else (y * 64).round() / 64

    return Rounds, matrix()


@mutant("state", "unknown", "result", "a call that is made under `torch.inference_mode()` differs: at")
def computes_otherwise_in_inference_mode() -> Any:
    class Rounds(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = x * x
            return (y * 64).round() / 64 if torch.is_inference_mode_enabled() else y

    return Rounds, matrix()


@twin
def computes_likewise_without_gradients() -> Any:
    class Saves(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(x)
                return x * x
            return x.square()

    return Saves, matrix()


@mutant("state", "raises", None, "this call, made under `torch.inference_mode()`, raises RuntimeError")
def refuses_inference_mode() -> Any:
    class Refuses(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad((inner * inner).sum(), inner)
            ctx.slope = slope
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.slope

    return Refuses, matrix()


@mutant("state", "stale-state", "result", "after a call in which an operation of torch failed, differs")
def stays_in_its_state_when_stopped() -> Any:
    busy: list[int] = []

    class Enters(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            if busy:
                return x.clone()
            busy.append(1)
            y = x * x
            busy.pop()
            return y

    return Enters, matrix()


@twin
def leaves_its_state_when_stopped() -> Any:
    busy: set[int] = set()

    class Enters(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            busy.add(id(ctx))
            try:
                return x * x
            finally:
                busy.discard(id(ctx))

    return Enters, matrix()


@mutant(
    "state", "stale-state", "result", "made in four threads at once, differs from the same call alone: at"
)
def works_in_one_buffer() -> Any:
    """Its result is new memory, and right for a single call."""
    buffers: dict[Any, Tensor] = {}

    class Doubles(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            key = x.shape, x.dtype
            with torch.inference_mode(False):
                work = buffers.setdefault(key, torch.empty(x.shape, dtype=x.dtype))
            work.copy_(x.detach())
            return work + work

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()


@mutant(
    "state",
    "stale-state",
    "result",
    "made in four threads at once, differs from the same call alone: at",
    "leak",
)
def hands_over_on_the_class() -> Any:
    class Doubles(Function):
        x: Any = None

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            Doubles.x = x.detach()
            return Doubles.double()

        @staticmethod
        def double() -> Any:
            two = torch.ones(()) + 1
            return Doubles.x * two

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()


@twin
def remembers_by_contents() -> Any:
    """Its result depends on its arguments alone, though it remembers a few results."""

    @functools.lru_cache(maxsize=2)
    def factor(count: int) -> float:
        return 1.0 / max(count, 1)

    class Scales(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.count = x.numel()
            return x * factor(x.numel())

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * factor(ctx.count)

    return Scales, matrix()


@twin
def looks_up_a_registry() -> Any:
    """It cannot do without what lies in its dictionary, and changes nothing there."""
    registry = {"slope": torch.tensor(0.1), "name": "leaky"}

    class Leaky(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.where(x > 0, x, x * registry["slope"])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return torch.where(x > 0, grad, grad * registry["slope"])

    return Leaky, matrix()


@twin
def looks_up_a_registry_with_a_default() -> Any:
    registry = {"slope": 0.1}

    class Leaky(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.where(x > 0, x, x * registry.get("slope", 0.01))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return torch.where(x > 0, grad, grad * registry.get("slope", 0.01))

    return Leaky, matrix()


@twin
def has_a_buffer_of_its_own() -> Any:
    class Weighted(Function):
        weight = torch.linspace(1, 2, 4)

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * Weighted.weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * Weighted.weight

    return Weighted, matrix()
