"""Registration of an operator's fake kernel, also instead of an existing fake kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._library.simple_registry import singleton


def add_fake(library: torch.library.Library, overload: Any, fake: Callable[..., Any], where: str) -> None:
    """Give an operator a fake kernel until the library is destroyed, which restores the earlier one.

    `torch.library.register_fake` searches all modules for its caller, which takes a sixth of the time of
    `import opsmith.ops`. It would keep the fake kernel of a `custom_op` forever, and would refuse a fake
    kernel for a C++ operator that names a different module for it.

    Args:
        library: A library of the operator's namespace.
        overload: The operator.
        fake: Its fake kernel.
        where: Place of the declaration, for torch's messages.
    """
    holder = singleton.find(overload._name).fake_impl
    handle = holder.register(fake, where, lib=library, allow_override=True)
    library._registration_handles.append(handle)


def self_test() -> None:
    """The fake kernel that was added last runs, until its library is destroyed."""
    library = torch.library.Library("opsmith_self_test", "FRAGMENT")
    library.define("faked(Tensor x) -> Tensor")
    overload: Any = torch.ops.opsmith_self_test.faked.default
    add_fake(library, overload, torch.empty_like, "self-test")
    x = torch.ones(2, device="meta")
    faked = [overload(x).shape]
    other = torch.library.Library("opsmith_self_test", "FRAGMENT")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        add_fake(other, overload, lambda x: x.new_empty(7), "self-test")
    faked.append(overload(x).shape)
    other._destroy()
    faked.append(overload(x).shape)
    library._destroy()
    assert faked == [(2,), (7,), (2,)], "the last fake kernel is not used, or it outlived its library"
