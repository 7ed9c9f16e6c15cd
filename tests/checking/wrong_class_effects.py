"""Function classes that write where they must not, or share memory, or depend on what memory held."""

import os
import warnings
from typing import Any

import numpy as np
import torch
from class_mutants import matrix, mutant, twin
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CALLS: list[str] = []
COUNT = {"calls": 0}
SCALE = torch.nn.Parameter(torch.ones(()))
WORK: dict[Any, Tensor] = {}


class Twice(Function):
    """The right one, of which all others are versions."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


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


@mutant("effects", "mutates-input", "x", "1 element, the first of them 1 past its last one")
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
    "writes outside of `x`, into memory that belongs to others: 1 element, the first of them 2 before",
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


@mutant("effects", "mutates-input", "x", "the first of them between its own")
def writes_between_the_elements() -> Any:
    class Writes(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            if not x.is_contiguous():
                x.detach().as_strided((x.numel(),), (1,), x.storage_offset())[1] = 5
            return x * x

    return Writes, matrix()


@mutant("effects", "mutates-input", "x", "a call laid other memory, or another shape, under `x`")
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
    "a backward wrote into a tensor of the shape [3, 4], which is kept for it",
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


@mutant("effects", "mutates-saved", None, "a backward wrote into the result `result`, which is kept for it")
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
    "gives another gradient of `x` than the first, and so it does in a new call: the first one wrote into "
    "`ctx.twice`",
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


@twin
def returns_a_view() -> Any:
    class Turns(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.mT

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mT

    return Turns, matrix()


@twin
def returns_its_input() -> Any:
    class Same(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return Same, matrix()


@mutant(
    "effects", "aliases-input", "result", "`result` shares memory with `x`, and autograd does not know it"
)
def returns_detached() -> Any:
    class Same(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return Same, matrix()


@mutant(
    "effects", "aliases-input", "result", "`result` shares memory with `x`, and autograd does not know it"
)
def returns_numpy_of_it() -> Any:
    class Turns(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.from_numpy(x.detach().numpy().T)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mT

    return Turns, matrix()


@mutant("effects", "aliases-input", "result1", "`result1` shares memory with the result `result0`")
def returns_two_of_one() -> Any:
    class Two(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = 2 * x
            return y, y.data

        @staticmethod
        def backward(ctx: Any, grad: Any, other: Any) -> Any:
            return 2 * (grad + other)

    return Two, matrix()


@mutant(
    "effects",
    "stale-state",
    "result",
    "two calls return the same memory as `result`, which it keeps: the second overwrites what the first",
    "leak",
)
def returns_a_buffer_again() -> Any:
    buffers: dict[Any, Tensor] = {}

    class Doubles(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            key = x.shape, x.dtype
            if key not in buffers:
                buffers[key] = torch.empty_like(x)
            return torch.mul(x.detach(), 2, out=buffers[key]).detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()


@twin
def works_in_a_buffer() -> Any:
    """One for each thread; what it returns is new."""
    import threading

    local = threading.local()

    class Doubles(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            buffers = local.__dict__.setdefault("buffers", {})
            with torch.inference_mode(False):  # one made in inference mode would be of no use elsewhere
                work = buffers.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
            torch.mul(x.detach(), 2, out=work)
            return work + 0

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 2 * grad

    return Doubles, matrix()


@mutant("effects", "side-effect", "x", "a backward wrote into `x.grad`", "leak")
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
    "of its `bias`, its numbers change with each call",
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


@mutant("effects", "side-effect", None, "`COUNT` of the module `wrong_class_effects`: what it holds changes")
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


@mutant("effects", "side-effect", None, "sets the number of torch's threads for the whole process, to")
def sets_threads() -> Any:
    class Sets(Twice):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            torch.set_num_threads(3)
            return Twice.backward(ctx, grad)

    return Sets, matrix()


@mutant("effects", "side-effect", None, "sets Python's warning filters for the whole process, to")
def silences_warnings() -> Any:
    class Silences(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            warnings.filterwarnings("ignore", message="whatever it says")
            return Twice.forward(ctx, x)

    return Silences, matrix()


@mutant("effects", "side-effect", None, "sets the environment's variables for the whole process, to")
def sets_a_variable() -> Any:
    class Sets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            os.environ["OPSMITH_TEST_OF_EFFECTS"] = os.environ.get("OPSMITH_TEST_OF_EFFECTS", "") + "1"
            return Twice.forward(ctx, x)

    return Sets, matrix()


@mutant("effects", "side-effect", None, "sets cuDNN's flags for the whole process, to")
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


@mutant("determinism", "nondeterministic", "result", "a call uses memory that is read before it is written")
def forgets_the_last_row() -> Any:
    class Forgets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            y[:-1] = x[:-1] ** 2
            return y

    return Forgets, matrix()


@mutant("determinism", "nondeterministic", "result", "a call uses memory that is read before it is written")
def forgets_in_numpy() -> Any:
    class Forgets(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            values = x.detach().numpy()
            y = np.empty(values.shape, values.dtype)
            y[:-1] = values[:-1] ** 2
            return torch.from_numpy(y)

    return Forgets, matrix()


@mutant("determinism", "nondeterministic", "x", "a backward uses memory that is read before it is written")
def adds_into_empty() -> Any:
    class Adds(Twice):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return torch.empty_like(x).add_(2 * grad * x)

    return Adds, matrix()


@mutant("determinism", "nondeterministic", "result", "where torch fills new memory with the largest number")
def forgets_whole_numbers() -> Any:
    class Ranks(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ranks = torch.empty(x.shape, dtype=torch.int64)
            ranks[1:] = x[1:].argsort()
            ctx.mark_non_differentiable(ranks)
            return ranks

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None

    return Ranks, matrix()


@twin
def fills_what_is_empty() -> Any:
    class Fills(Twice):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            y[:-1] = x[:-1] ** 2
            y[-1:] = x[-1:] ** 2
            return y

    return Fills, matrix()
