"""Every private name of torch that opsmith uses, each behind a function that says what it is for.

Nothing else in the package touches torch's private names, so that an upgrade of torch breaks here or nowhere.
"""

from __future__ import annotations

import sys
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
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad

_C: Any = torch._C
_autograd: Any = torch.autograd

FUNCTIONALIZATION: type = FunctionalTensorMode
"""The mode in which a trace replaces what writes by what does not; operators can be replaced there too."""

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "privateuseone")


def below_autograd() -> AbstractContextManager[None]:
    """A region in which calls of operators skip autograd."""
    guard: AbstractContextManager[None] = _C._AutoDispatchBelowAutograd()
    return guard


def redispatch_below_autograd(operator: Any, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Hand a call that reached the autograd key on to the keys below it."""
    with _C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & _C._after_autograd_keyset, *args, **kwargs)


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    return bool(_C._is_alias_of(first, second))


def version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None for an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version


def schema_fault(text: str) -> str | None:
    """What torch's parser says against a schema; None where it takes it."""
    try:
        _C.parse_schema(text)
    except (RuntimeError, ValueError, IndexError) as error:  # the last two for numbers that are out of range
        return str(error)
    return None


def operator_exists(name: str) -> bool:
    """Whether the dispatcher knows an operator of this name."""
    return bool(_C._dispatch_has_kernel(name)) or bool(_C._jit_get_schemas_for_operator(name))


def destroy(library: torch.library.Library) -> None:
    """Take back everything that a library registered."""
    library._destroy()


def forward_mode_active() -> bool:
    """Whether a forward-mode level is open, so that arguments may carry tangents."""
    return forward_ad._current_level >= 0 and forward_mode_allowed()


def forward_mode_allowed() -> bool:
    """Whether tangents propagate; inside the `forward` of a node they do not."""
    return bool(_C._is_fwd_grad_enabled())


def forward_mode_on() -> AbstractContextManager[None]:
    """A region in which tangents propagate, also inside a `jvp` staticmethod, where torch turns them off."""
    return forward_ad._set_fwd_grad_enabled(True)


def primal_of(tensor: Tensor) -> Tensor:
    """A tensor without its tangent."""
    primal: Tensor = torch._unpack_dual(tensor, level=0)[0]
    return primal


def outside_graph(tensor: Tensor) -> Tensor:
    """A tensor that requires no gradient, with its tangent, which `detach` would drop."""
    if not forward_mode_active():
        return tensor.detach()
    primal, tangent = unpack_dual(tensor)
    return primal.detach() if tangent is None else make_dual(primal.detach(), tangent.detach())


def autocast_key(device: str) -> str | None:
    """Name of the dispatch key of autocast on a type of device; None where this torch has none."""
    try:
        key = "Autocast" + _C._dispatch_key_for_device(device)
    except RuntimeError:
        return None
    return key if hasattr(_C.DispatchKey, key) else None


def without_autocast(key: str) -> AbstractContextManager[None]:
    """A region in which an autocast key is off."""
    guard: AbstractContextManager[None] = _C._ExcludeDispatchKeyGuard(
        _C.DispatchKeySet(getattr(_C.DispatchKey, key))
    )
    return guard


def serve_autocast_while_tracing(operator: Any, key: str, kernel: Any) -> None:
    """Let traced calls find an autocast kernel too: they look it up in Python."""
    operator.py_impl(getattr(_C.DispatchKey, key))(kernel)


def mark_compiled_code(name: str, token: str) -> None:
    """Let a token for an operator's sources enter the key of every compiled-code cache.

    Without it a new process gets the code that an earlier one compiled from an older formula.
    """
    from torch._inductor import config

    marked = {**config.unsafe_marked_cacheable_functions, f"torch.ops.{name.replace('::', '.')}": token}
    config.unsafe_marked_cacheable_functions = marked


def compiler_imported() -> bool:
    """Whether Inductor is there already; importing it takes longer than all else."""
    return "torch._inductor.config" in sys.modules


def fake_mode() -> Any:
    """A region whose tensors have a form and no data; its `from_tensor` makes one of a real tensor."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def watching(see: Callable[[Any, dict[str, Any]], None]) -> AbstractContextManager[Any]:
    """A region in which `see` is told of each operator that runs, with its keyword arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(operator, kwargs or {})
            return operator(*args, **(kwargs or {}))

    watch: AbstractContextManager[Any] = Watch()  # type: ignore[no-untyped-call]
    return watch


SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""Base of a node that belongs to one `torch.func.grad` layer."""


@dataclass(frozen=True)
class Layer:
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
        """How many examples a `Vmap` layer holds."""
        size: int = self.interpreter.batch_size()
        return size

    @property
    def randomness(self) -> str:
        """What a `Vmap` layer was told about random operations: `error`, `same` or `different`."""
        return str(self.interpreter.randomness())

    def lift(self, value: Any) -> Any:
        """A tensor as one of this layer."""
        return self.interpreter._cptr.lift(value) if isinstance(value, Tensor) else value

    def unwrap(self, value: Any) -> Any:
        """A tensor of this layer as one of the layer below."""
        return _functorch._unwrap_for_grad(value, self.level) if isinstance(value, Tensor) else value

    def wrap(self, value: Tensor) -> Tensor:
        """A tensor of the layer below as one of this layer."""
        wrapped: Tensor = _functorch._wrap_for_grad(value, self.level)
        return wrapped

    def unwrap_batched(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        """Batched tensors of this layer as plain ones, and the batch dimension of each."""
        unwrapped: tuple[tuple[Any, ...], tuple[int | None, ...]] = _vmap.unwrap_batched(
            tuple(values), self.level
        )
        return unwrapped

    def wrap_batched(self, values: Sequence[Tensor], dims: Sequence[int | None]) -> tuple[Tensor, ...]:
        """Plain tensors as batched ones of this layer."""
        wrapped: tuple[Tensor, ...] = _vmap.wrap_batched(tuple(values), tuple(dims), self.level)
        return wrapped


def innermost_layer() -> Layer | None:
    """The innermost `torch.func` transform that is running; None outside."""
    top: Any = _functorch.peek_interpreter_stack()
    if top is None:
        return None
    return Layer(str(top.key()).rpartition(".")[2], coerce_cinterpreter(top))


def single_level_nodes() -> AbstractContextManager[None]:
    """A region in which a `SingleLevelFunction` may be applied."""
    region: AbstractContextManager[None] = enable_single_level_autograd_function()
    return region


def unwrap_dead(value: Any) -> Any:
    """A tensor that outlived its transform, as the plain one that it holds."""
    return _functorch.unwrap_if_dead(value) if isinstance(value, Tensor) else value


def unpack_dual(value: Any) -> tuple[Any, Tensor | None]:
    """A value and its tangent at the forward-mode level in force, if it has one."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value, None
    primal, tangent = torch._unpack_dual(value, level=0)
    return primal, tangent


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, at the forward-mode level in force."""
    dual: Tensor = torch._make_dual(primal, tangent, level=0)
    return dual


def over_examples(function: Callable[..., Any], dims: Any, size: int, randomness: str) -> Callable[..., Any]:
    """A function of one example as one of a batch: it returns the results and the batch dimension of each."""
    batched: Callable[..., Any] = _vmap.restore_vmap(function, dims, size, randomness)
    return batched


def reduce_to_dim(
    value: Tensor, dim: int | None, wanted: int | None, size: int, shape: torch.Size | None = None
) -> Any:
    """A gradient or tangent with the batch dimension of its tensor: moved there, expanded or summed away."""
    reduced: Any = reductify_leaf(value, dim, wanted, size, shape)
    return reduced


def exporting() -> bool:
    """Whether a trace is one of torch.export, which keeps operators whole."""
    import torch._functorch.config as config

    return not config.decompose_custom_triton_ops


def only_stand_ins(types: Sequence[type]) -> bool:
    """Whether tensors of these types are plain or stand-ins of a trace, none of them a foreign subclass."""
    return all(kind is Tensor or issubclass(kind, FunctionalTensor | FakeTensor) for kind in types)


def recording() -> bool:
    """Whether operations are being recorded into a graph, in which nothing but operations is remembered."""
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def transform_kernel(name: str) -> Any:
    """The kernel that torch has for transforms of an operator, to be asked for before another replaces it."""
    return _C._dispatch_get_computed_kernel_for_dispatch_key(name, "FuncTorchDynamicLayerFrontMode")


is_view: Any = Tensor._is_view
"""Whether a tensor is a view of another, for autograd."""


def front_door_checks() -> dict[str, Any]:
    """What the conditions of a front door ask, by the names they have in its source."""
    return {
        "_op_dispatch_modes": _C._len_torch_dispatch_stack,
        "_op_function_modes": _C._len_torch_function_stack,
        "_op_transform": _functorch.peek_interpreter_stack,
        "_op_autocast": _C._is_any_autocast_enabled,
        "_op_forward_mode": forward_ad,
        "_op_tracing": _C._get_tracing_state,
        "_op_batched": _functorch.is_legacy_batchedtensor,
        "_op_profiling": _autograd._profiler_enabled,
        "_op_is_view": is_view,
    }


FRONT_DOOR_CONDITIONS = (
    "not _op_dispatch_modes()",
    "not _op_function_modes()",
    "_op_transform() is None",
    "not _op_autocast()",
    "_op_forward_mode._current_level < 0",
    "_op_tracing() is None",
    "not _op_profiling()",
)
"""What must hold for a call to need nothing of the dispatcher, in Python."""


def direct_apply(node: type[torch.autograd.Function]) -> Any:
    """The `apply` of a node in C, past the checks in Python that the front door has made already."""
    return super(torch.autograd.Function, node).apply  # type: ignore[misc]


def versions_source(names: Sequence[str]) -> str:
    """Source of a tuple of how often each of these tensors was written to; None for one that is not given."""
    return "(" + "".join(f"None if {name} is None else {name}._version, " for name in names) + ")"
