"""Capabilities: uses of torch's private names, each of which can be turned off.

At the first use of a function, its capability is tested. The function is then bound in this module to the
implementation by private names, or by public names. No other part of the package uses torch's private names.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.core.lowering import recording as recording
from opsmith.torch_library.capabilities.capability import CAPABILITIES, PROVIDERS, decide, implementation

if TYPE_CHECKING:  # the types of all names; their values are looked up below
    from opsmith.torch_library.capabilities.private.autocast import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.autograd_graph import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.calls_in_cpp import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.compiled_code import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.dispatch import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.dispatch_mode import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.fake_registration import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.fake_tensors import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.forward_mode import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.fused_graphs import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.inlining import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.known_calls import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.library_operators import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.onnx_registry import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.sharding import *  # noqa: F403
    from opsmith.torch_library.capabilities.private.torch_func import *  # noqa: F403

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "privateuseone")

_numbers = itertools.count()


def on(name: str) -> bool:
    """Return True if a capability is on; the first call runs its self-test."""
    return decide(CAPABILITIES[name]).on


def __getattr__(name: str) -> Any:
    capability = PROVIDERS.get(name)
    if capability is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(implementation(capability), name)
    return value


def plain_tensor() -> Tensor:
    """Make a tensor without dimensions that belongs to no mode: a module may be imported within a mode."""
    with torch.inference_mode(False), sys.modules[__name__].without_modes():
        return torch.zeros(())


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors share memory; wrapped tensors of a transform have no memory."""
    storage, other = storage_of(first), storage_of(second)
    if storage is None or other is None or storage is other:
        return storage is not None and storage is other
    if storage.resizable() and other.resizable():
        return False  # torch has allocated both
    (begin, end), (other_begin, other_end) = span(storage), span(other)
    return max(begin, other_begin) < min(end, other_end)


def span(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The first address and the end of a storage: equal for a storage without memory."""
    if storage.device.type == "meta":
        return 0, 0
    try:
        begin = storage.data_ptr()
    except RuntimeError:  # a wrapper has no memory; tensors that DLPack makes from one begin at 0
        begin = 0
    return begin, begin + storage.nbytes()


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with a tensor's memory: below all transforms, and this rank's part of a DTensor."""
    return layers(tensor)[-1]


def writes_of(layers: Sequence[Tensor]) -> int | None:
    """The number of writes that torch has counted in the layers of a tensor; None if torch counts none.

    torch counts a write under a transform in the tensor below it, and a write into a DTensor in the DTensor.
    """
    counts = map(sys.modules[__name__].version, layers)
    counted = [count for count in counts if count is not None]
    return sum(counted) if counted else None


def layers(tensor: Tensor) -> list[Tensor]:
    """A tensor, the tensor below all transforms if it is a different one, and the shard of a DTensor."""
    own = sys.modules[__name__]
    inner = own.below_transforms(tensor)
    found = [tensor] if inner is tensor else [tensor, inner]
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and isinstance(inner, kind) and not torch.compiler.is_dynamo_compiling():
        found.append(own.shard_of(inner))
    return found


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, the same object while referenced; None if wrapped, and in a trace."""
    if torch.compiler.is_dynamo_compiling():  # there torch 2.15 crashes at a wrapped tensor
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def schema_fault(text: str) -> str | None:
    """Return the error of torch's parser for a schema; None if the schema is valid."""
    library = torch.library.Library(f"opsmith_parses_{next(_numbers)}", "FRAGMENT")
    try:
        library.define(text)
    except (RuntimeError, ValueError, IndexError) as error:  # the last two for numbers out of range
        return str(error)
    return None
