"""Function classes that change what lies outside of them: `.grad`, modules, logs, settings."""

import os
import warnings
from typing import Any

import torch
from class_mutants import Twice, matrix, mutant, twin
from torch import Tensor
from torch.autograd import Function

CALLS: list[str] = []
COUNT = {"calls": 0}
SCALE = torch.nn.Parameter(torch.ones(()))


@mutant("effects", "side-effect", "x", "a backward wrote into `x.grad`", "held")
def accumulates_itself() -> Any:
    class Accumulates(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            mine = 2 * grad * ctx.x.detach()
            if not ctx.x.is_leaf:
                return mine
            ctx.x.grad = mine if ctx.x.grad is None else ctx.x.grad + mine
            return mine

    return Accumulates, matrix()


@mutant(
    "effects", "side-effect", None, "of the module `wrong_class_effects`: its `.grad` was written, though"
)
def accumulates_into_a_parameter() -> Any:
    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * SCALE.detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            mine = (grad * x).sum().detach()
            SCALE.grad = mine if SCALE.grad is None else SCALE.grad + mine
            return grad * SCALE.detach()

    return Scaled, matrix()


@mutant(
    "effects",
    "side-effect",
    None,
    "its `bias` changed: its numbers change with each call",
    "stale-state",
    "nondeterministic",
)
def updates_a_module() -> Any:
    layer = torch.nn.Linear(2, 2)

    class Updates(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.no_grad():
                layer.bias.add_(1)
            return Twice.backward(ctx, grad)

    return Updates, matrix()


@mutant("effects", "side-effect", None, "it grows with each call: it had")
def keeps_a_log() -> Any:
    class Logs(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            CALLS.append(str(x.shape))
            return Twice.forward(ctx, x)

    return Logs, matrix()


@mutant(
    "effects",
    "side-effect",
    None,
    "`COUNT` of the module `wrong_class_effects`: its contents change with each call",
)
def counts_calls() -> Any:
    class Counts(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            COUNT["calls"] += 1
            return Twice.forward(ctx, x)

    return Counts, matrix()


@mutant("effects", "side-effect", None, "Counts.calls`: it was")
def counts_on_the_class() -> Any:
    class Counts(Twice):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            Counts.calls += 1
            return Twice.forward(ctx, x)

    return Counts, matrix()


@mutant("effects", "side-effect", None, "`calls`, which ")
def counts_in_a_closure() -> Any:
    calls = 0

    class Counts(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            nonlocal calls
            calls += 1
            return Twice.forward(ctx, x)

    return Counts, matrix()


@mutant("effects", "side-effect", None, "changes the number of torch's threads from")
def sets_threads() -> Any:
    class Sets(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            torch.set_num_threads(3)
            return Twice.backward(ctx, grad)

    return Sets, matrix()


@mutant("effects", "side-effect", None, "changes Python's warning filters from")
def silences_warnings() -> Any:
    class Silences(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            warnings.filterwarnings("ignore", message="whatever it says")
            return Twice.forward(ctx, x)

    return Silences, matrix()


@mutant("effects", "side-effect", None, "changes the environment's variables from")
def sets_a_variable() -> Any:
    class Sets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            os.environ["OPSMITH_TEST_OF_EFFECTS"] = os.environ.get("OPSMITH_TEST_OF_EFFECTS", "") + "1"
            return Twice.forward(ctx, x)

    return Sets, matrix()


@mutant("effects", "side-effect", None, "changes cuDNN's flags from")
def sets_a_flag() -> Any:
    class Sets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            torch.backends.cudnn.deterministic = False
            return Twice.forward(ctx, x)

    return Sets, matrix()


@mutant("effects", "side-effect", None, "a call sets torch's random state for the whole process")
def seeds_the_world() -> Any:
    class Seeds(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            torch.manual_seed(0)
            ctx.mask = torch.rand_like(x) > 0.5
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.mask

    return Seeds, matrix()


@twin
def draws_from_its_own_generator() -> Any:
    class Draws(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            generator = torch.Generator().manual_seed(0)
            ctx.mask = torch.rand(x.shape, generator=generator) > 0.5
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.mask

    return Draws, matrix()


@twin
def caches_a_constant() -> Any:
    """A grid for each shape: it is made once, and does not grow with the calls."""
    grids: dict[Any, Tensor] = {}

    class Weighted(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            key = x.shape, x.dtype
            if key not in grids:
                with torch.inference_mode(False):  # autograd does not save what is made in inference mode
                    grids[key] = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
            ctx.save_for_backward(grids[key])
            return x * grids[key]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    return Weighted, matrix()
