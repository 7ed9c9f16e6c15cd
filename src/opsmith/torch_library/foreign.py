"""An operator that others registered: what it lacks is registered beside what it has.

Its kernels compute the forward. Autograd, transforms, autocast and DTensor go through the same layers as for
an operator of ours, with its entry in the dispatcher in the place of one that we made.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from opsmith.core.calls import tensors_in
from opsmith.core.captured import refuse_captured
from opsmith.core.own import Own
from opsmith.core.specification import Specification
from opsmith.torch_library import autocast, capabilities
from opsmith.torch_library.differentiation import OperatorNode
from opsmith.torch_library.distributed import dtensor
from opsmith.torch_library.effects import run_pure
from opsmith.torch_library.flops import register_flops
from opsmith.torch_library.looking import AUTOGRAD, AUTOGRAD_KEYS, look
from opsmith.torch_library.placements import Placements
from opsmith.torch_library.registration import DispatcherRegistration

FRONT = "FuncTorchDynamicLayerFrontMode"

_registrations: dict[str, ForeignRegistration] = {}


def own_of(overload: Any) -> Own:
    """What an operator has of its own, whatever an earlier adoption added to it.

    Where something was registered since, that adoption is taken back for the look, and whoever calls the
    operator meanwhile finds it without what it lacked.
    """
    earlier = _registrations.get(capabilities.signature_of(overload).name)
    if earlier is None:
        return look(overload)
    if earlier.stands_for(overload):
        return earlier.own
    with earlier.withdrawn():
        return look(overload)


class ForeignRegistration(DispatcherRegistration):
    """What is added to one operator that others registered; `specification.own` says what it has."""

    def __init__(self, specification: Specification) -> None:
        refuse_captured(specification.reference, specification.name)
        self._placing = threading.Lock()
        super().__init__(specification)
        self.proven = True  # what it stands for has just been looked at
        _registrations[specification.name] = self

    @property
    def own(self) -> Own:
        """What the operator has."""
        own = self.specification.own
        assert own is not None
        return own

    def stands_for(self, overload: Any) -> bool:
        """Whether this is the operator that was looked at, and nothing has been registered for it since."""
        return self._looked_at == _state(overload)

    def front_door(
        self, call: Callable[..., Any], compiled: Callable[..., Any] | None = None
    ) -> Callable[..., Any] | None:
        """None: its kernel is reached through the dispatcher alone."""
        return None

    def update(self, specification: Specification) -> None:
        """Use this specification from now on; an operator that is adopted again is registered anew."""
        if specification.own is self.own:
            super().update(specification)
        else:
            refuse_captured(specification.reference, specification.name)
            with self.withdrawn():
                self.specification, self._plans, self._lying = specification, {}, {}
            self._compiled.drop()
        self.proven = True

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """A region in which the operator is as others registered it."""
        self.remove()
        try:
            yield
        finally:
            self._register()

    def _register(self) -> None:
        specification = self.specification
        name = specification.short_name
        self._packets = []
        self._placements = []
        self._placed = False
        self._library = torch.library.Library(specification.namespace, "FRAGMENT")
        self.node = type(name, (OperatorNode,), {})
        self.overload, self.whole = self.own.overload, self._call_own
        with warnings.catch_warnings():
            # torch warns once in a process of any kernel that takes another's place.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            if not self.own.fake:
                capabilities.add_fake(self._library, self.overload, self._fake)
            self._add_transforms(name, self._register_autocast(self.overload, name))
            self._add_autograd(name)
        packet = getattr(getattr(torch.ops, specification.namespace), name.partition(".")[0])
        if packet not in flop_registry and len(packet.overloads()) == 1:
            register_flops(packet, lambda: self.specification, lambda: self.specification.flops)
            self._packets.append(packet)
        self._looked_at = _state(self.overload)

    def _call_own(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call the operator on the level that is in force, and hold it to its contract."""
        values = self.specification.schema.received(args, kwargs)
        return run_pure(self.specification, self.overload, values)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(self._run_fake(self._values(args, kwargs)), hidden=False)

    def _register_autocast(self, overload: Any, name: str) -> dict[str, Any]:
        """The autocast kernels by type of device: the operator's own, and ours where it has none."""
        kernels: dict[str, Any] = {}
        for device in capabilities.AUTOCAST_DEVICES:
            key = capabilities.autocast_key(device)
            if key is None:
                continue
            if device in self.own.autocast:
                kernels[device] = capabilities.kernel_at(overload, key).call_boxed
                continue
            kernel = autocast.autocast_kernel(overload, device, key, lambda: self.specification.autocast)
            self._library.impl(name, kernel, key, with_keyset=True)
            capabilities.serve_autocast_while_tracing(overload, key, partial(kernel, None))
            kernels[device] = kernel
        return kernels

    def _add_transforms(self, name: str, autocasts: dict[str, Any]) -> None:
        by_hand = capabilities.on("torch_func")
        if by_hand:
            by_torch = capabilities.transform_kernel(self.specification.name)

        def transforms(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._meet([*args, *kwargs.values()])
            if by_hand:
                layer = capabilities.innermost_layer()
                its_own = layer is not None and layer.kind == "Vmap" and self.own.vmap
                if layer is None or layer.kind == "Functionalize" or its_own:
                    return by_torch.call_boxed(keyset, *args, **kwargs)
            values = self._values(args, kwargs)
            cast = autocast.in_force(autocasts, tensors_in(values))
            if cast is not None:
                return cast(keyset, *args, **kwargs)
            return self._returned(self._in_layers(values), hidden=False)

        self._library.impl(name, transforms, FRONT, with_keyset=True)

    def _add_autograd(self, name: str) -> None:
        """Register where the operator has nothing, and, with what it has there, where it has something."""
        everywhere = capabilities.registers_kernel(self.overload, AUTOGRAD)
        if not everywhere:
            self._library.impl(name, partial(self._autograd, None), AUTOGRAD, with_keyset=True)
        for device, key in AUTOGRAD_KEYS.items():
            if everywhere or capabilities.registers_kernel(self.overload, key):
                own = capabilities.kernel_at(self.overload, key) if device in self.own.autograd else None
                kernel = partial(self._autograd, own)
                self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    def _autograd(self, own: Any, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        self._meet(given)
        by_own = own is not None and not self.specification.gradients.given
        if by_own and not capabilities.forward_mode_active():
            return own.call_boxed(keyset, *args, **kwargs)
        if not self._differentiates(given):
            return capabilities.redispatch_below_autograd(self.overload, keyset, args, kwargs)
        return self._returned(self._in_layers(self._values(args, kwargs)), hidden=False)

    def _meet(self, given: list[Any]) -> None:
        """Take note of a call, whatever becomes of it."""
        self._compiled.notice(self.specification, tensors_in(given))
        if not self._placed and dtensor() is not None:
            self._place()

    def _place(self) -> None:
        """Say what becomes of shards, once, unless its owner has."""
        with self._placing:
            if self._placed:
                return
            if not capabilities.shards_itself(self.overload):
                self._placements.append(
                    Placements(self._library, self.overload, lambda: self.specification, self._on_values)
                )
            self._placed = True  # not before: another thread would compute without placements

    def _on_values(self, values: list[Any]) -> Any:
        specification = self.specification
        return self._returned(run_pure(specification, specification.reference, values), hidden=False)


def _state(overload: Any) -> tuple[Any, ...]:
    """What changes with each registration for an operator, be it in the dispatcher or with a `custom_op`."""
    return overload, capabilities.registrations(overload), capabilities.custom_parts(overload)
