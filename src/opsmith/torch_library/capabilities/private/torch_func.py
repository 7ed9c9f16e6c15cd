"""The running transforms of `torch.func`, one level at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import vmap as _vmap
from torch._functorch.autograd_function import reductify_leaf
from torch._functorch.pyfunctorch import coerce_cinterpreter
from torch._functorch.utils import enable_single_level_autograd_function

_C: Any = torch._C

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""Base of a node that belongs to one `torch.func.grad` transform."""


@dataclass(frozen=True)
class Transform:
    """One running `torch.func` transform.

    Args:
        kind: `Grad`, `Jvp`, `Vmap` or `Functionalize`.
        interpreter: torch's own description of it.
    """

    kind: str
    interpreter: Any

    @property
    def level(self) -> int:
        """Its depth among the running transforms, from 1."""
        return int(self.interpreter.level())

    @property
    def batch_size(self) -> int:
        """Number of examples of a `Vmap` transform."""
        size: int = self.interpreter.batch_size()
        return size

    @property
    def randomness(self) -> str:
        """The `randomness` of a `Vmap` transform: `error`, `same` or `different`."""
        return str(self.interpreter.randomness())

    def lift(self, value: Any) -> Any:
        """A tensor as a tensor of this transform."""
        return self.interpreter._cptr.lift(value) if isinstance(value, Tensor) else value

    def unwrap(self, value: Any) -> Any:
        """A tensor of this transform as a tensor of the transform below."""
        return _functorch._unwrap_for_grad(value, self.level) if isinstance(value, Tensor) else value

    def wrap(self, value: Tensor) -> Tensor:
        """A tensor of the transform below as a tensor of this transform."""
        wrapped: Tensor = _functorch._wrap_for_grad(value, self.level)
        return wrapped

    def unwrap_batched(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        """Batched tensors of this transform as plain tensors, and the batch dimension of each."""
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        found = iter(zip(*_vmap.unwrap_batched(tensors, self.level), strict=True) if tensors else ())
        pairs = [next(found) if isinstance(value, Tensor) else (value, None) for value in values]
        return tuple(value for value, _ in pairs), tuple(dim for _, dim in pairs)

    def wrap_batched(self, values: Sequence[Tensor], dims: Sequence[int | None]) -> tuple[Tensor, ...]:
        """Plain tensors as batched tensors of this transform."""
        wrapped: tuple[Tensor, ...] = _vmap.wrap_batched(tuple(values), tuple(dims), self.level)
        return wrapped


def innermost_transform() -> Transform | None:
    """The innermost `torch.func` transform that is running; None outside."""
    top: Any = _functorch.peek_interpreter_stack()
    if top is None:
        return None
    return Transform(str(top.key()).rpartition(".")[2], coerce_cinterpreter(top))


def is_mapped() -> bool:
    """Return True under a `vmap`, even if it is not the innermost transform."""
    stack: Any = _functorch.get_interpreter_stack()
    return any(str(each.key()).endswith("Vmap") for each in stack or ())


def single_level_nodes() -> AbstractContextManager[None]:
    """Context in which a `SingleLevelFunction` may be applied."""
    region: AbstractContextManager[None] = enable_single_level_autograd_function()
    return region


def unwrap_dead(value: Any) -> Any:
    """The plain tensor inside a tensor that outlived its transform."""
    return _functorch.unwrap_if_dead(value) if isinstance(value, Tensor) else value


def innermost_value(tensor: Tensor) -> Tensor:
    """The tensor below all transforms, with the numbers of all examples."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


is_functional: Any = _functorch.is_functionaltensor
"""Return True for a wrapper of `functionalize`: a write replaces the tensor inside it."""


def below_transforms(tensor: Tensor) -> Tensor:
    """The tensor below all transforms, or the wrapper of `functionalize` there."""
    if torch.compiler.is_dynamo_compiling():  # there torch 2.15 crashes at a wrapped tensor
        return tensor
    while _functorch.is_functorch_wrapped_tensor(tensor) and not is_functional(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def over_examples(function: Callable[..., Any], dims: Any, size: int, randomness: str) -> Callable[..., Any]:
    """Make a function of one example a function of a batch, which returns results and batch dimensions."""
    batched: Callable[..., Any] = _vmap.restore_vmap(function, dims, size, randomness)
    return batched


def reduce_to_dim(
    value: Tensor, dim: int | None, wanted: int | None, size: int, shape: torch.Size | None = None
) -> Any:
    """A gradient or tangent whose batch dimension is moved to its tensor's, added, or summed away."""
    reduced: Any = reductify_leaf(value, dim, wanted, size, shape)
    return reduced


is_gradient_batch: Any = _functorch.is_legacy_batchedtensor
"""Return True if a tensor is a batch of gradients, made by `is_grads_batched=True`."""


def transform_kernel(name: str) -> Any:
    """Kernel of torch for transforms of an operator; call this before another kernel replaces it."""
    return _C._dispatch_get_computed_kernel_for_dispatch_key(name, "FuncTorchDynamicLayerFrontMode")


def self_test() -> None:
    """A transform of each kind is found, and its tensors are unwrapped, computed and wrapped again."""
    assert innermost_transform() is None
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    _test_grad(x)
    _test_vmap(x)
    _test_functionalize(x)
    function = over_examples(lambda row, by: row * by, (0, None), 3, "error")
    result, dim = function(x, torch.tensor(2.0))
    assert (result.tolist(), dim) == ((x * 2).tolist(), 0)
    assert torch.func.grad(lambda x: (x * innermost_value(x).item()).sum())(x[0, 0]).item() == 1.0
    assert reduce_to_dim(x, 0, 1, 3).tolist() == x.mT.tolist()
    assert reduce_to_dim(x, 0, None, 3).tolist() == [9.0, 12.0], "a shared gradient is not summed"
    assert innermost_transform() is None


class _Sevenfold(SingleLevelFunction):  # type: ignore[misc]  # torch gives it no type
    @staticmethod
    def forward(transform: Transform, x: Tensor) -> Tensor:
        with transform.interpreter.lower():
            result = transform.unwrap(x) * 2
        return transform.wrap(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad * 7 * unwrap_dead(ctx.saved_tensors[0])


def _running(kind: str) -> Transform:
    transform = innermost_transform()
    assert transform is not None, f"a running {kind} is not seen"
    assert (transform.kind, transform.level) == (kind, 1)
    return transform


def _test_grad(x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        transform = _running("Grad")
        with single_level_nodes():
            apply: Any = _Sevenfold.apply
            result: Tensor = apply(transform, transform.lift(x))
        return result.sum()

    gradient: Any = torch.func.grad(function)(x)
    assert gradient.tolist() == (7 * x).tolist(), "a node of a transform has the wrong gradient"
    pulled: Any = torch.func.vjp(function, x)
    value, pull = pulled
    assert value.item() == 2 * x.sum().item()
    assert pull(torch.tensor(1.0))[0].tolist() == (7 * x).tolist(), "a vjp that is kept is wrong"


def _test_vmap(x: Tensor) -> None:
    def function(row: Tensor) -> Tensor:
        transform = _running("Vmap")
        assert (transform.batch_size, transform.randomness) == (3, "same")
        (value, constant), dims = transform.unwrap_batched((row, 2.0))
        assert dims == (0, None)
        with transform.interpreter.lower():
            result = value * constant
        (wrapped,) = transform.wrap_batched((result,), (0,))
        return wrapped

    result: Any = torch.func.vmap(function, randomness="same")(x)
    assert result.tolist() == (2 * x).tolist()


def _test_functionalize(x: Tensor) -> None:
    library = torch.library.Library("opsmith_self_test", "FRAGMENT")
    library.define("layered(Tensor x) -> Tensor")
    library.impl("layered", lambda x: x * 3, "CompositeExplicitAutograd")
    operator: Any = torch.ops.opsmith_self_test.layered.default
    by_torch = transform_kernel("opsmith_self_test::layered")
    seen: list[str] = []

    def at_front(keyset: Any, x: Tensor) -> Any:
        transform = innermost_transform()
        seen.append("none" if transform is None else transform.kind)
        return by_torch.call_boxed(keyset, x)

    library.impl("layered", at_front, "FuncTorchDynamicLayerFrontMode", with_keyset=True)
    result: Any = torch.func.functionalize(operator)(x)
    assert (result.tolist(), seen) == ((x * 3).tolist(), ["Functionalize"])
    library._destroy()
