"""What an operator that others registered has of its own: looked up in the dispatcher."""

from __future__ import annotations

from typing import Any

from opsmith.core.own import Own
from opsmith.torch_library import capabilities

COMPOSITE = "CompositeImplicitAutograd"
EVERYWHERE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
BACKENDS = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "mps": "MPS",
    "xpu": "XPU",
    "hpu": "HPU",
    "xla": "XLA",
    "lazy": "Lazy",
    "meta": "Meta",
    "privateuseone": "PrivateUse1",
}
"""Dispatch keys of kernels, by type of device."""
AUTOGRAD = "Autograd"
AUTOGRAD_KEYS = {**{device: f"Autograd{key}" for device, key in BACKENDS.items()}, "other": "AutogradOther"}
"""Dispatch keys of autograd, by type of device; the one above stands for all of them that have none."""
VMAP_KEYS = ("FuncTorchBatched", "FuncTorchBatchedDecomposition")


def computes(overload: Any) -> bool:
    """Whether an operator has any kernel."""
    kernels = (*EVERYWHERE, *(key for device, key in BACKENDS.items() if device != "meta"))
    return any(capabilities.registers_kernel(overload, key) for key in kernels)


def look(overload: Any) -> Own:
    """What an operator has."""
    custom = capabilities.custom_parts(overload)
    autograd = frozenset(
        device
        for device, key in AUTOGRAD_KEYS.items()
        if (capabilities.registers_kernel(overload, AUTOGRAD) or capabilities.registers_kernel(overload, key))
        and (custom is None or custom.backward)
    )
    fake = capabilities.registers_kernel(overload, "Meta") if custom is None else custom.fake is not None
    if custom is not None:
        sources: tuple[Any, ...] = (custom.backward, custom.setup_context, custom.fake)
    else:
        sources = (object(),) if autograd or fake else ()
    autocast = ((device, capabilities.autocast_key(device)) for device in capabilities.AUTOCAST_DEVICES)
    return Own(
        overload,
        devices=tuple(
            device
            for device, key in BACKENDS.items()
            if device != "meta" and capabilities.registers_kernel(overload, key)
        ),
        autograd=autograd,
        autocast=frozenset(
            device for device, key in autocast if key and capabilities.registers_kernel(overload, key)
        ),
        fake=fake,
        vmap=any(capabilities.registers_kernel(overload, key) for key in VMAP_KEYS),
        sources=sources,
    )
