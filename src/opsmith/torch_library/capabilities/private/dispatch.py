"""Parts of torch's dispatcher that every operator needs, but that have no public name."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from opsmith.core.lowering import recording

_C: Any = torch._C
_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_AUTOGRAD = functools.reduce(
    operator.or_, (_C.DispatchKeySet(getattr(_C.DispatchKey, name)) for name in _KEYS)
)


def below_autograd() -> AbstractContextManager[None]:
    """Context in which calls of operators skip autograd."""
    guard: AbstractContextManager[None] = _C._AutoDispatchBelowAutograd()
    return guard


_BITS = functools.reduce(
    operator.or_, (_C.DispatchKeySet(getattr(_C.DispatchKey, name)) for name in ("Conjugate", "Negative"))
)
_WRITES = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
_NOTHING: AbstractContextManager[None] = nullcontext()


def _without_excluded(keys: Any) -> AbstractContextManager[None]:
    guard: AbstractContextManager[None] = _C._ForceDispatchKeyGuard(
        _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set() - keys
    )
    return guard


def above_autograd() -> AbstractContextManager[None]:
    """Context inside `below_autograd` in which calls of operators go through autograd again."""
    return _without_excluded(_AUTOGRAD)


def counting_writes() -> AbstractContextManager[None]:
    """Context in which torch counts writes, also in the handler of a subclass."""
    return _without_excluded(_WRITES)


def resolving_bits() -> AbstractContextManager[None]:
    """Context in which operations resolve conjugate and negated views, also in the handler of a mode.

    torch excludes the two keys there; without this context, a view is read as the numbers in its memory.
    """
    if not _C._dispatch_tls_is_dispatch_key_excluded(_C.DispatchKey.Conjugate):
        return _NOTHING
    return _without_excluded(_BITS)


def without_modes() -> AbstractContextManager[Any]:
    """Context in which no mode, such as the fake-tensor mode, sees operations."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def seen_by_modes() -> bool:
    """Return True if a dispatch mode will see the next call of an operator."""
    return bool(_C._len_torch_dispatch_stack())


def without_data(tensors: Sequence[Tensor]) -> bool:
    """Return True if only metadata are needed: the tensors are fake or `meta`, and no trace is recording."""
    if not tensors or not all(isinstance(each, FakeTensor) or each.is_meta for each in tensors):
        return False
    return not recording()


def fresh_symbols(tensors: Sequence[Tensor]) -> list[Any]:
    """List of a trace's data-dependent sizes that no result has yet; a failing call must remove its own."""
    shapes = next((each.fake_mode.shape_env for each in tensors if isinstance(each, FakeTensor)), None)
    return [] if shapes is None else shapes.pending_fresh_unbacked_symbols


def is_a_size(symbol: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True if a symbol of a trace occurs in the shape of a tensor."""
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    return any(symbol in size.node.expr.free_symbols for size in sizes if isinstance(size, torch.SymInt))


def redispatch_below_autograd(operator: Any, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Redispatch a call from the autograd key to the keys below it."""
    with _C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & _C._after_autograd_keyset, *args, **kwargs)


def version(tensor: Tensor) -> int | None:
    """Version counter of a tensor; None for inference tensors, and in a compiled backward."""
    return None if torch.compiler.is_dynamo_compiling() or tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Version counters of tensors; None for inference tensors, and for a missing tensor."""
    return [None if each is None or each.is_inference() else each._version for each in tensors]


version_counter = operator.attrgetter("_version")
"""Version counter of a tensor that is not an inference tensor."""


def states(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Version, shape, strides, offset, storage, and number of bytes of the storage, of each tensor.

    Raises:
        RuntimeError: For inference tensors, which have no version.
    """
    return [
        (
            tensor._version,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            storage := tensor.untyped_storage(),
            storage.nbytes(),
        )
        for tensor in tensors
    ]


def marks(tensors: Sequence[Tensor]) -> list[Any]:
    """Version, shape, strides and address of each tensor, in one list, for tensors that are only read.

    Raises:
        RuntimeError: For inference tensors, which have no version.
    """
    found: list[Any] = []
    for each in tensors:  # a comprehension would cost a frame
        found += (each._version, each.shape, each.stride(), each.data_ptr())
    return found


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the base of a view, for autograd; None for a tensor that is not a view."""
    return tensor._base


def operator_exists(name: str) -> bool:
    """Return True if the dispatcher knows an operator of this name."""
    return bool(_C._dispatch_has_kernel(name)) or bool(_C._jit_get_schemas_for_operator(name))


def destroy(library: torch.library.Library) -> None:
    """Deregister everything that a library registered."""
    library._destroy()
    # Otherwise torch's finaliser would later remove registrations of another library under these names.
    for reference in weakref.getweakrefs(library):
        if isinstance(reference.__callback__, weakref.finalize):
            reference.__callback__()


def self_test() -> None:
    """A kernel at the autograd key continues below it; writes are counted; operators can be deregistered."""
    library = torch.library.Library("opsmith_self_test", "FRAGMENT")
    library.define("below(Tensor x) -> Tensor")
    below: Any = torch.ops.opsmith_self_test.below.default

    def at_autograd(keyset: Any, x: Tensor) -> Any:
        return redispatch_below_autograd(below, keyset, (x,), {})

    library.impl("below", lambda x: x * 3, "CompositeExplicitAutograd")
    library.impl("below", at_autograd, "Autograd", with_keyset=True)
    leaf = torch.ones(2, requires_grad=True)
    result = below(leaf)
    assert result.tolist() == [3.0, 3.0]
    assert not result.requires_grad, "a kernel below autograd was recorded"
    with below_autograd():
        recorded = [(leaf * 2).requires_grad]
    recorded.append((leaf * 2).requires_grad)
    assert recorded == [False, True], "autograd recorded a kernel below it, or stayed off"
    with below_autograd(), above_autograd():
        assert (leaf * 2).requires_grad, "autograd did not record above it"
    assert not seen_by_modes(), "a mode was found, but no mode is active"

    known = [operator_exists("opsmith_self_test::below")]
    destroy(library)
    known.append(operator_exists("opsmith_self_test::below"))
    assert known == [True, False], "an operator outlived its library"

    written = torch.ones(2)
    before = version(written)
    written.view(-1)[0] = 2.0
    assert version(written) != before, "a write was not counted"
    assert viewed(written) is None
    assert viewed(written[0]) is written
    before = version(written)
    with _C._ExcludeDispatchKeyGuard(_WRITES):
        written.add_(1)
        assert version(written) == before
        with counting_writes():
            written.add_(1)
    assert version(written) != before, "a write was not counted in a handler"
    with torch.inference_mode():
        assert version(torch.ones(2)) is None
    assert versions([written, None]) == [version(written), None]
    stood = states([written])
    assert states([written]) == stood
    written.resize_(3)
    assert states([written]) != stood, "a change of shape was not noticed"
