"""Operators registered by another library: existing parts are inspected, missing parts are registered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from opsmith.core.call_arguments import tensors_in
from opsmith.core.forked_locks import lock_of
from opsmith.core.origins.declared import Origin
from opsmith.core.origins.registered import LibraryOperator
from opsmith.core.reachable import refuse_captured_tensors
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import Contract
from opsmith.torch_library.dtensor.placements import dtensor
from opsmith.torch_library.in_place import InPlaceRegistration
from opsmith.torch_library.registration import DispatcherRegistration, is_watched
from opsmith.torch_library.writes import raising_versions, refuse_unwritable, written_tensors

COMPOSITE = "CompositeImplicitAutograd"
DEFAULT_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
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
"""Dispatch keys of autograd, by type of device; `Autograd` is used for devices without their own key."""
VMAP_KEYS = ("FuncTorchBatched", "FuncTorchBatchedDecomposition")


def has_kernel(overload: Any) -> bool:
    """Return True if an operator has any kernel."""
    kernels = (*DEFAULT_KEYS, *(key for device, key in BACKENDS.items() if device != "meta"))
    return any(capabilities.registers_kernel(overload, key) for key in kernels)


def inspect_operator(overload: Any) -> LibraryOperator:
    """Inspect the kernels, gradients and rules of an operator."""
    custom = capabilities.custom_parts(overload)
    autograd = frozenset(
        device
        for device, key in AUTOGRAD_KEYS.items()
        if (capabilities.registers_kernel(overload, AUTOGRAD) or capabilities.registers_kernel(overload, key))
        and (custom is None or custom.backward)
    )
    fake = capabilities.registers_kernel(overload, "Meta") if custom is None else custom.fake is not None
    autocast = ((device, capabilities.autocast_key(device)) for device in capabilities.AUTOCAST_DEVICES)
    every = tuple(device for device in BACKENDS if device != "meta")
    devices = tuple(each for each in every if capabilities.registers_kernel(overload, BACKENDS[each]))
    by_default = any(capabilities.registers_kernel(overload, key) for key in DEFAULT_KEYS)
    return LibraryOperator(
        overload,
        devices=devices,
        served=_present_devices() if by_default else devices,
        rules={
            "forward": frozenset({""}),
            "gradient": autograd,
            "autocast": frozenset(
                device for device, key in autocast if key and capabilities.registers_kernel(overload, key)
            ),
            "fake": frozenset({""} if fake else ()),
            "vmap": frozenset("" for key in VMAP_KEYS if capabilities.registers_kernel(overload, key)),
        },
        custom=custom,
        unknown=object() if custom is None and (autograd or fake) else None,
    )


def _present_devices() -> tuple[str, ...]:
    """The types of devices that this torch is built for."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


_registrations: dict[str, LibraryOperatorRegistration] = {}


def library_operator_of(overload: Any) -> Origin:
    """Inspect the parts that an operator had before it was adopted.

    If something was registered since, the adoption is undone during the inspection, so concurrent calls see
    the operator as it was before.
    """
    earlier = _registrations.get(capabilities.signature_of(overload).name)
    if earlier is None:
        return inspect_operator(overload)
    if earlier.stands_for(overload):
        return earlier.specification.origin
    with earlier.withdrawn():
        return inspect_operator(overload)


class LibraryOperatorRegistration(DispatcherRegistration):
    """Registration of the missing parts of an operator of another library."""

    def __init__(self, specification: Specification) -> None:
        refuse_captured_tensors(specification.reference, specification.name)
        self._placing = lock_of(self, "_placing")
        super().__init__(specification)
        self._validated = specification  # it has just been inspected
        _registrations[specification.name] = self

    def stands_for(self, overload: Any) -> bool:
        """Return True if this operator was inspected, and nothing was registered for it afterwards."""
        return self._inspected_state == _registration_state(overload)

    def update(self, specification: Specification) -> None:
        """Use this specification from now on; an operator that is adopted again is registered again."""
        if specification.origin is self.specification.origin:
            super().update(specification)
        else:
            refuse_captured_tensors(specification.reference, specification.name)
            with self.withdrawn():
                self.specification, self._plans, self._result_flattenings = specification, {}, {}
            self._compiled.drop()
        self._validated = specification

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Context in which the operator is as it was before adoption."""
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
        self._nodes = {}
        self._library = torch.library.Library(specification.namespace, "FRAGMENT")
        self.overload, self.full_overload = specification.origin.subject, self._call_own
        with warnings.catch_warnings():
            # torch warns once in a process if a kernel replaces another kernel.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            if not specification.origin.own("fake"):
                fake = self._kernel(self._run_fake)
                capabilities.add_fake(self._library, self.overload, fake, specification.where)
            self._register_transforms(self.overload, name, self._returned)
            self._add_autograd(name)
        packet = getattr(getattr(torch.ops, specification.namespace), name.partition(".")[0])
        if packet not in flop_registry and len(packet.overloads()) == 1:
            self._count_flops(packet)
        self._inspected_state = _registration_state(self.overload)

    def _call_own(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call the operator on the current level, and validate its results."""
        values = self.specification.schema.received(args, kwargs)
        return Contract(self.specification).run(self.overload, values)

    def is_transformed_by_torch(self, transform: capabilities.Transform | None) -> bool:
        own = transform and transform.kind == "Vmap" and self.specification.origin.own("vmap")
        return bool(own) or super().is_transformed_by_torch(transform)

    def _add_autograd(self, name: str) -> None:
        """Register autograd kernels; if the operator has its own, ours wraps it."""
        everywhere = capabilities.registers_kernel(self.overload, AUTOGRAD)
        if not everywhere:
            self._library.impl(name, partial(self._autograd_around, None), AUTOGRAD, with_keyset=True)
        for device, key in AUTOGRAD_KEYS.items():
            if everywhere or capabilities.registers_kernel(self.overload, key):
                brought = self.specification.origin.own("gradient", device)
                own = capabilities.kernel_at(self.overload, key) if brought else None
                kernel = partial(self._autograd_around, own)
                self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    def _autograd_around(self, own: Any, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        self._record_call(given)
        by_own = own is not None and not self.specification.gradients.given
        if by_own and not capabilities.forward_mode_active():
            return own.call_boxed(keyset, *args, **kwargs)
        if not self._differentiates(given):
            return capabilities.redispatch_below_autograd(self.overload, keyset, args, kwargs)
        return self._returned(self._call_with_autograd(self._values(args, kwargs)))

    def _record_call(self, given: list[Any]) -> None:
        self._compiled.notice(self.specification, tensors_in(given))
        if not self._placed and dtensor() is not None:
            self._register_placements()

    def _register_placements(self) -> None:
        """Register a rule for DTensors, once, unless the operator has one."""
        with self._placing:
            if self._placed:
                return
            if not capabilities.shards_itself(self.overload):
                self._add_placements(self.overload, self._returned)
            self._placed = True  # last, or another thread would compute without placements


class LibraryInPlaceRegistration(InPlaceRegistration, LibraryOperatorRegistration):
    """Registration of the missing parts of an in-place operator of another library."""

    # It writes into its arguments as before; only derivatives need tensors that share no elements.
    every_call_refuses = False

    @contextmanager
    def withdrawn(self) -> Iterator[None]:
        """Context in which the operator is as it was before adoption; its functional form stays."""
        form, self._form_registration = self._form_registration, None
        try:
            with super().withdrawn():
                yield
        finally:
            self._form_registration = form

    def _by_reference(self, values: list[Any]) -> tuple[Any, ...]:
        return self._with_returned(values, super()._by_reference(values))

    def _autograd_around(self, own: Any, keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        values = self.specification.schema.received(args, kwargs)
        with raising_versions([tensor for _, tensor in written_tensors(self.specification, values)]):
            if not is_watched(values):
                return super()._autograd_around(own, keyset, *args, **kwargs)
            with capabilities.operators_behind_modes() as ran:
                results = super()._autograd_around(own, keyset, *args, **kwargs)
            if (
                ran is not None and self.overload not in ran
            ):  # a mode returned a cached result, as a selective checkpoint does
                with capabilities.without_modes(), capabilities.below_autograd():
                    self.overload(*args, **kwargs)
            return results

    def _call_with_autograd(self, values: list[Any]) -> tuple[Any, ...]:
        refuse_unwritable(self.specification, values)
        return self._with_returned(values, super()._call_with_autograd(values))

    def _run_fake(self, values: list[Any]) -> tuple[Any, ...]:
        specification = self.specification
        derived = specification.fake is not None or bool(specification.schema.results)
        results = super()._run_fake(values) if derived else ()  # written arguments keep their shape
        return self._with_returned(values, results)

    def _with_returned(self, values: list[Any], results: tuple[Any, ...]) -> tuple[Any, ...]:
        """All results, including the argument that it writes into and returns."""
        schema = self.specification.schema
        return results if schema.returns is None else (values[schema.names.index(schema.returns)],)

    def _returned(self, results: tuple[Any, ...], *, hidden: bool = False) -> Any:
        if self.specification.schema.returns is not None:
            return results[0]
        return super()._returned(results, hidden=hidden)


def register_adopted(specification: Specification) -> LibraryOperatorRegistration:
    """Register the missing parts of an operator of another library."""
    if specification.schema.written:
        return LibraryInPlaceRegistration(specification)
    return LibraryOperatorRegistration(specification)


def _registration_state(overload: Any) -> tuple[Any, ...]:
    """A value that changes with each registration for an operator, in the dispatcher or a `custom_op`."""
    return overload, capabilities.registrations(overload), capabilities.custom_parts(overload)
