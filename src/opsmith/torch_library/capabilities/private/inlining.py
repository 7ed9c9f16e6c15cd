"""Functionalization: the mode in which a trace replaces an operator by its reference."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

FUNCTIONALIZATION: type = FunctionalTensorMode
"""The mode in which a trace replaces in-place operations, and operators by their references."""


def exporting() -> bool:
    """Return True under torch.export, which keeps operators whole."""
    import torch._functorch.config as config  # a slow import, only needed for tracing

    return not config.decompose_custom_triton_ops


def only_stand_ins(types: Sequence[type]) -> bool:
    """Return True if all these types are plain or fake tensors, without other subclasses."""
    return all(kind is Tensor or issubclass(kind, FunctionalTensor | FakeTensor) for kind in types)


def traced(tensors: Sequence[Tensor]) -> bool:
    """Return True if some tensors are fake or functional, as in a trace, or have a symbolic size."""
    return any(
        isinstance(each, FunctionalTensor | FakeTensor) or torch.SymInt in map(type, each.shape)
        for each in tensors
    )


def source_in_trace(tensor: Tensor) -> tuple[Any, bool]:
    """Return the node of a trace that Inductor reads for a tensor, and True if Inductor drops a copy.

    Inductor drops operations that change no number, such as a clone, even if the copied tensor is written
    later.
    Without a trace for Inductor the node is None.
    """
    passes, mode = sys.modules.get("torch._inductor.fx_passes.post_grad"), get_proxy_mode()
    if passes is None or mode is None or not isinstance(tensor, FunctionalTensor):
        return None, False
    slot = get_proxy_slot(FunctionalTensor.from_functional(tensor), mode.tracer, None)
    if slot is None:
        return None, False
    node, copied = slot.proxy.node, False
    while (source := _unchanged(node, passes)) is not None:
        node, copied = source, copied or not node.target.is_view
    return node, copied


def _unchanged(node: Any, passes: Any) -> Any:
    """Return the source of a node that is a view, or a copy that Inductor drops; None for other nodes."""
    if getattr(node.target, "is_view", False):
        return node.args[0]
    _, at = passes.noop_registry.get(node.target, (None, None))
    if at is None:
        return None
    source = node.args[at] if isinstance(at, int) else node.all_input_nodes[0]  # one in a list
    return source if hasattr(source, "target") and passes.same_meta(node, source) else None


def copy_in_trace(tensor: Tensor) -> Tensor:
    """Return a copy that Inductor fuses, but does not drop."""
    return torch.where(torch.ones((), dtype=torch.bool, device=tensor.device), tensor, tensor)


def symbolic_functions() -> dict[str, Callable[[Any], Any]]:
    """Functions of `math` on one number that torch can also compute on a symbol, by name."""
    prefix = "_sym_"
    names = (name.removeprefix(prefix) for name in vars(torch) if name.startswith(prefix))
    return {name: vars(torch)[f"{prefix}{name}"] for name in names if hasattr(math, name)}


def run_in_traces(function: Callable[..., Any]) -> None:
    """Make Dynamo run a function during tracing, and use the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports Dynamo, which is slow.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def self_test() -> None:
    """A rule for the mode sees a functionalized call of an operator, and its result is used."""
    assert exporting() is False
    functions = symbolic_functions()
    assert functions["sqrt"](4) == 2.0
    assert functions["log2"](8) == 3.0

    def marked() -> None: ...

    def by_torch() -> None: ...

    run_in_traces(marked)
    torch.compiler.assume_constant_result(by_torch)
    assert vars(marked) == vars(by_torch), "constants in traces are marked in another way"
    library = torch.library.Library("opsmith_self_test", "FRAGMENT")
    library.define("inlined(Tensor x) -> Tensor")
    library.impl("inlined", lambda x: x.clone(), "CompositeExplicitAutograd")
    operator: Any = torch.ops.opsmith_self_test.inlined.default
    seen: list[bool] = []

    def rule(mode: Any, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(only_stand_ins(types))
        with mode:
            return args[0] * 3

    torch.library.register_torch_dispatch("opsmith_self_test::inlined", FUNCTIONALIZATION, rule, lib=library)
    mode: Any = FUNCTIONALIZATION()
    x = torch.ones(2)  # made outside the mode, which would wrap it
    with mode:
        result = FunctionalTensor.from_functional(operator(FunctionalTensor.to_functional(x)))
    assert seen == [True], "the rule was not called, or the types of a trace have changed"
    assert result.tolist() == [3.0, 3.0]
    library._destroy()
