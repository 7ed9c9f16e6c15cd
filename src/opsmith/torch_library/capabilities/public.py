"""Replacements of capabilities that are off: the same functions, with only torch's public names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook

from opsmith import errors
from opsmith.core.tensors import on_meta
from opsmith.torch_library import capabilities
from opsmith.torch_library.capabilities.operation import Operation
from opsmith.torch_library.torch_messages import SAVED_WRITTEN, has_message

_AUTOCAST_KEYS = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "privateuseone": "AutocastPrivateUse1",
}
_numbers = itertools.count()


def autocast_key(device: str) -> str | None:
    """Name of autocast's dispatch key for a type of device; None if this torch has none."""
    key = _AUTOCAST_KEYS.get(device)
    if key is None:
        return None
    library = torch.library.Library(f"opsmith_keys_{next(_numbers)}", "FRAGMENT")
    library.define("cast(Tensor x) -> Tensor")
    try:
        library.impl("cast", lambda x: x.clone(), key)
    except RuntimeError:  # an unknown key
        return None
    return key


def without_autocast(device: str) -> AbstractContextManager[None]:
    """Context in which autocast is off on a type of device."""
    return torch.autocast(device, enabled=False)


def any_autocast() -> bool:
    """Return True if autocast is on, for any type of device."""
    available = filter(torch.amp.is_autocast_available, _AUTOCAST_KEYS)
    return any(map(torch.is_autocast_enabled, available))


def serve_autocast_while_tracing(operator: Any, key: str, kernel: Any) -> None:
    """Do nothing: a trace finds the kernel where the dispatcher does."""


def add_fake(library: torch.library.Library, overload: Any, fake: Callable[..., Any], where: str) -> None:
    """Register a fake kernel; `where` is not shown."""
    torch.library.register_fake(overload, fake, lib=library)


def mark_compiled_code(name: str, token: str) -> None:
    """Turn the caches off in this process, from the first trace that contains an operator."""
    torch.compiler.config.force_disable_caches = True


def frame_callback() -> None:
    """Return None: the callback is not public."""


def compiler_imported() -> bool:
    """Return True: `mark_compiled_code` needs no compiler."""
    return True


class _MetaMode:
    def __enter__(self) -> _MetaMode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same metadata, without data."""
        return on_meta(tensor)


def run_in_traces(function: Callable[..., Any]) -> None:
    """Import Dynamo, and make it run a function during tracing and use the result as a constant."""
    torch.compiler.assume_constant_result(function)


def fake_mode() -> _MetaMode:
    """Context whose tensors have metadata and no data; its `from_tensor` converts a real tensor."""
    return _MetaMode()


def symbolic_mode(*, inputs: bool = True) -> None:
    """Return None: tensors on the device `meta` have no symbolic sizes."""
    return


_FORWARD_MODE_PROBE, _TORCH_FUNC_PROBE = capabilities.plain_tensor(), capabilities.plain_tensor()


def forward_mode_active() -> bool:
    """Return True if a forward-mode level is open: `unpack_dual` makes a new tensor only then."""
    try:
        return forward_ad.unpack_dual(_FORWARD_MODE_PROBE).primal is not _FORWARD_MODE_PROBE
    except RuntimeError:  # torch unpacks only at an open level, and refuses it inside a fake run
        return True


def forward_mode_allowed() -> bool:
    """Return True: tangents are assumed to propagate at an open level."""
    return True


def forward_mode_on() -> AbstractContextManager[None]:
    """Return an empty context: inside a `jvp` staticmethod no tangents are left to propagate."""
    return nullcontext()


def primal_of(tensor: Tensor) -> Tensor:
    """A tensor without its tangent."""
    primal: Tensor = forward_ad.unpack_dual(tensor).primal
    return primal


def outside_graph(tensor: Tensor) -> Tensor:
    """A tensor that requires no gradient, but keeps its tangent, which `detach` would drop."""
    if not forward_mode_active():
        return tensor.detach()
    primal, tangent = unpack_dual(tensor)
    return primal.detach() if tangent is None else make_dual(primal.detach(), tangent.detach())


def unpack_dual(value: Any) -> tuple[Any, Tensor | None]:
    """A value and its tangent at the current forward-mode level, if it has one."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value, None
    dual: Any = forward_ad.unpack_dual(value)
    return dual.primal, dual.tangent


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, at the current forward-mode level."""
    dual: Tensor = forward_ad.make_dual(primal, tangent)
    return dual


def onnx_translator(opset: int, table: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that translates modules and programs to ONNX.

    Args:
        opset: Version of ONNX's operators.
        table: Translations of operators that are not torch's own.
    """

    def translate(model: Any, args: tuple[Any, ...] = (), dynamic_shapes: Any = None) -> Any:
        return torch.onnx.export(
            model,
            args,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=dynamic_shapes,
            custom_translation_table=dict(table),
            verbose=False,
        )

    return translate


_SAVED = "_saved_"
"""Prefix of attributes for saved values: torch's notes on autograd, "Saved tensors"."""


def calls_in_cpp() -> None:
    """Return None: calls are made in Python."""


def forward_class(node: Any) -> type | None:
    """Return None: the class of a node is not public."""
    return None


def result_metadata(node: Any) -> list[tuple[tuple[int, ...], torch.dtype, torch.device]]:
    """Return an empty list: the metadata is not public."""
    return []


def saved_tensors(node: Any) -> dict[str, Any]:
    """Values that a node saved, by name; items of a list have numbers; values of a Function are `0`, `1`, ...

    Values that a hook has packed are unpacked. Values that were overwritten later are left out.

    Raises:
        RuntimeError: If the values were freed.
    """
    found: dict[str, Any] = {}
    for label, value in _saved_values(node):
        if isinstance(value, Tensor):
            found[label] = value
        elif isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            found |= {f"{label}[{at}]" if label else str(at): each for at, each in enumerate(value)}
    return found


def overwritten(node: Any) -> bool:
    """Return True if a saved tensor of a node was overwritten later, so that its backward raises an error."""
    return any(isinstance(value, _Overwritten) for _, value in _saved_values(node))


class _Overwritten:
    """Placeholder of a saved tensor that can no longer be read."""


def _saved_values(node: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(node):
        if not name.startswith(_SAVED) and name != "saved_tensors":
            continue
        try:
            yield "" if name == "saved_tensors" else name.removeprefix(_SAVED), getattr(node, name)
        except RuntimeError as error:
            if not has_message(error, SAVED_WRITTEN):
                raise
            yield name.removeprefix(_SAVED), _Overwritten()


def after_modules(hook: Callable[..., None]) -> Callable[[], None]:
    """Call a function after every call of a module, with the module, its positional arguments and its output.

    Returns:
        A function that removes the hook.
    """
    return register_module_forward_hook(hook, always_call=True).remove


def differentiated(
    results: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], **options: bool
) -> Sequence[Tensor | None]:
    """Compute gradients by `torch.autograd.grad`; None for a missing gradient."""
    return torch.autograd.grad(results, inputs, grads, allow_unused=True, **options)


_OPERATOR_TYPES = ("OpOverload", "OpOverloadPacket", "CustomOpDef")


def overloads_of(subject: Any) -> dict[str, Any] | None:
    """Return None for an object that is not an operator of torch.

    Raises:
        UnsupportedTorchError: For an operator, with the name of the capability.
    """
    if type(subject).__name__ not in _OPERATOR_TYPES:
        return None
    raise errors.UnsupportedTorchError(
        "it was registered elsewhere; adopting it needs the capability `library_operators`, which is off",
        operator=_operator_name(subject),
        hint="`opsmith doctor` shows why; declare your own operator, with this operator as a kernel",
    )


def _operator_name(subject: Any) -> str:
    """`namespace::name`, from torch's text: `ns.name`, `ns.name.default`, `<CustomOpDef(ns::name)>`."""
    printed = str(subject)
    found = re.search(r"\((.+)\)", printed)
    return (found[1] if found else printed.replace(".", "::", 1)).removesuffix(".default")


def has_derivative(overload: Any, transformed: bool) -> None:
    """Return None: an operator's kernels are not public."""


def around_operators(call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return an empty context: torch's own functions run."""
    return nullcontext()


def replicates_implicitly() -> bool:
    """Return False: the caller's request for implicit replication is not public."""
    return False


def implicit_replication() -> AbstractContextManager[None]:
    """Context in which DTensor treats plain tensors as replicated; its end also ends an outer context."""
    from torch.distributed.tensor.experimental import implicit_replication

    region: AbstractContextManager[None] = implicit_replication()
    return region


def shard_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, without a graph."""
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def shard_key(tensor: Any) -> Hashable:
    """Hashable identity of a DTensor without its data: mesh, placements, metadata of whole and shard."""
    shard = shard_of(tensor)
    whole = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(), tensor.dtype
    return *whole, type(shard), shard.shape, shard.stride(), shard.dtype, shard.device


def placed_like(example: Any) -> Callable[[Tensor], Tensor | None]:
    """A function that returns None, since torch's quick constructor of DTensors is not public."""
    return lambda shard: None


def observe_shards(
    see: Callable[[Operation], Any], see_placed: Callable[[Operation], Any] | None = None
) -> AbstractContextManager[Any]:
    """Raise an error, since operations on shards cannot be observed with public names.

    Raises:
        NotImplementedError: Always, which ends the trial.
    """
    raise NotImplementedError("it needs the capability `sharding`, which is off")


class SingleLevelFunction:
    """Placeholder: subclasses can be imported, but are not used."""


class Transform(NamedTuple):
    """A running transform, whose kind is not public."""

    kind: str = ""


def innermost_transform() -> Transform | None:
    """The transform of `torch.func` that is running; None outside."""
    try:
        _TORCH_FUNC_PROBE.requires_grad_()
    except RuntimeError:  # raised only under a transform
        return Transform()
    return None


def is_mapped() -> bool:
    """Return False: the running transforms are not public."""
    return False


def is_gradient_batch(tensor: Tensor) -> bool:
    """Return True if a tensor is a batch of gradients, of `is_grads_batched=True`: it cannot be detached."""
    try:
        tensor.detach()
    except RuntimeError:
        return True
    return False


def unwrap_dead(value: Any) -> Any:
    """Return a view of a tensor: after the end of its transform, any operation returns a plain tensor."""
    return value.view_as(value) if isinstance(value, Tensor) else value


def innermost_value(tensor: Tensor) -> Tensor:
    """The tensor; under a transform, whose inner numbers are not public, a tensor that is not zero."""
    return tensor if innermost_transform() is None else torch.ones(())


def is_functional(tensor: Tensor) -> bool:
    """Return False: `functionalize` is refused."""
    return False


def below_transforms(tensor: Tensor) -> Tensor:
    """The tensor itself: the tensor below a transform is not public."""
    return tensor


def traced(tensors: Sequence[Tensor]) -> bool:
    """Return True if some tensors have a symbolic size."""
    return any(torch.SymInt in map(type, each.shape) for each in tensors)


def symbolic_functions() -> dict[str, Callable[[Any], Any]]:
    """Functions of `math` on one number that torch can also compute on a symbol, by name."""
    return {"sqrt": torch.sym_sqrt}


def observe_operators(
    see: Callable[[Any, dict[str, Any]], None], given: Callable[[Any, Sequence[Any]], None] | None = None
) -> AbstractContextManager[Any]:
    """Return an empty context, in which nothing is observed."""
    return nullcontext()


def observe_writes(see: Callable[[Tensor], None]) -> AbstractContextManager[Any]:
    """Return an empty context, in which nothing is observed."""
    return nullcontext()


def operators_behind_modes() -> AbstractContextManager[list[Any] | None]:
    """Return a context with None: the operators are not observed."""
    return nullcontext()


def tracing_imported() -> bool:
    """Return True, so that callers use tensors without data."""
    return True


class FusedGraphs:
    """The graphs of a function, which no public name of torch makes."""


def fused_graphs(function: Callable[..., Any], tensors: Sequence[Tensor], needed: Any) -> FusedGraphs:
    """Refuse to make the graphs of a function.

    Raises:
        ToolchainError: Always.
    """
    raise errors.ToolchainError(
        "no kernel can be derived from a reference with this torch",
        expected="a torch with which the capability `fused_graphs` is on",
        got=str(torch.__version__),
        hint="`opsmith doctor` lists all capabilities; until then the reference computes the operator",
    )


def compile_graph(graph: Any, path: Any, compiler: str) -> None:
    """Compile no graph, because `fused_graphs` makes none."""


def load_graph(path: Any) -> Any:
    """Load no graph.

    Raises:
        ToolchainError: Always.
    """
    return fused_graphs(load_graph, (), ())
