"""Registration of operators that write into their arguments, with the help of their functional form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import runs_ordinary
from opsmith.core.call_arguments import tensors_in
from opsmith.core.functional_form import all_results, copies_of_written, functional_form
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.torch_library import capabilities
from opsmith.torch_library.compilation import EAGER
from opsmith.torch_library.contract import Contract
from opsmith.torch_library.dtensor.placements import local_shard, mesh_of
from opsmith.torch_library.flattening import ArgumentFlattening
from opsmith.torch_library.registration import (
    HIDDEN_SUFFIX,
    KERNEL_RUN,
    TRANSFORM_KEY,
    DispatcherRegistration,
    is_watched,
)
from opsmith.torch_library.writes import raising_versions, refuse_leaves, refuse_unwritable, written_tensors

IN_PLACE: Any = getattr(torch.Tag, "inplace", None)
"""Tag of an operator that returns the argument that it writes into; None before torch 2.13."""

BITS = ("Conjugate", "Negative")
"""Dispatch keys of views whose memory has different numbers. torch's kernel there expects operators that
return their written arguments."""


class InPlaceRegistration(DispatcherRegistration):
    """Registration of an operator that writes into its arguments.

    Attributes:
        every_call_refuses: True if even a call without derivatives refuses tensors that share elements.
    """

    every_call_refuses = True

    def __init__(self, specification: Specification) -> None:
        self._form: tuple[Specification, Specification] | None = None
        self._form_registration: DispatcherRegistration | None = None
        super().__init__(specification)

    @property
    def form(self) -> Specification:
        """The specification of its functional form, from which derivatives and transforms are derived."""
        made = self._form
        if made is None or made[0] is not self.specification:
            specification = self.specification
            made = self._form = specification, functional_form(specification, Contract(specification).run)
        return made[1]

    @property
    def form_registration(self) -> DispatcherRegistration:
        """The registration of the functional form, made when it is first needed."""
        with self._lock:
            if self._form_registration is None:
                self._form_registration = DispatcherRegistration(self.form)
            return self._form_registration

    def make_functional(self) -> None:
        """Make the functional form, if it does not exist yet."""
        registration = self.form_registration
        with self._lock:
            if self.functional is None:
                kind = self.owner.derived_kind
                self.functional = kind(self.form, registration, self.owner, "functional")

    def update(self, specification: Specification) -> None:
        """Replace the specification, and the functional form's specification."""
        registered, self._form_registration = self._form_registration, None  # `remove` does not remove it
        try:
            super().update(specification)
        finally:
            self._form_registration = registered
        if self.functional is not None:
            self.functional.redeclare(self.form)
        elif registered is not None:
            registered.update(self.form)

    def remove(self) -> None:
        """Deregister the operator, and its functional form."""
        super().remove()
        if self._form_registration is not None:
            self._form_registration.remove()

    def _register(self) -> None:
        super()._register()
        self._void = self.overload
        name = self.specification.torch_name.partition("::")[2]
        if self.specification.schema.returns is not None and not self.specification.origin.registered:
            self.overload = getattr(getattr(torch.ops, self.specification.namespace), name).default

    def _define(self, name: str, *, hidden: bool) -> Any:
        schema = self.specification.schema
        void = self.specification.dispatched_name.partition("::")[2] + HIDDEN_SUFFIX * hidden
        overload = super()._define(void, hidden=hidden)

        def resolved(*args: Any, **kwargs: Any) -> Any:
            self._values(args, kwargs)  # refuses written arguments that are such views
            named = zip(kwargs, map_tensors(_resolved, list(kwargs.values())), strict=True)
            return overload(*map_tensors(_resolved, args), **dict(named))

        for key in BITS:
            self._library.impl(void, resolved, key)
        if schema.returns is not None and not hidden:
            # torch's functionalization loses a write into a view of an operator's returned argument.
            tags = [torch.Tag.pt2_compliant_tag, *([] if IN_PLACE is None else [IN_PLACE])]
            self._define_text(schema.text(name), tags)
            for key in ("CompositeImplicitAutograd", TRANSFORM_KEY):
                self._library.impl(name, partial(self._returning, overload), key)
        return overload

    def _returning(self, writes: Any, *args: Any, **kwargs: Any) -> Any:
        """Write, and return the first argument; a copy if a mode may keep it for another call."""
        writes(*args, **kwargs)
        return args[0].clone() if KERNEL_RUN.wanted is self else args[0]

    @property
    def overloads(self) -> tuple[Any, ...]:
        """The operators of torch that compute this operator, its functional form's operators last."""
        void = () if self._void is self.overload else (self._void,)
        return (*super().overloads, *void, *self.form_registration.overloads)

    def call_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator through the dispatcher, and return all results except the arguments.

        If a mode returned a cached result, the arguments are still written.
        """
        ours = not self.specification.origin.registered
        if not (ours and is_watched([*args, *kwargs.values()])):
            return self.full_overload(*args, **kwargs)
        self._stop_serving()  # a kernel without Python does not report that it has run
        shown, results = self._watched(args, kwargs)
        storage: Any = None if self.specification.schema.returns is None else shown.untyped_storage()
        if results is None:
            with capabilities.without_modes():
                if not hasattr(storage, "hidden_results"):
                    return self.full_overload(*args, **kwargs)
                args[0].copy_(shown)
            results = storage.hidden_results
        elif storage is not None:
            storage.hidden_results = results
        return self._returned(results, hidden=True)

    def _call_below(self, overload: Any, keyset: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call without a derivative, below autograd; a mode sees the name that callers use."""
        if self.specification.schema.returns is None or not is_watched([*args, *kwargs.values()]):
            return super()._call_below(overload, keyset, args, kwargs)
        with capabilities.below_autograd():
            whole = self.call_whole(args, kwargs)
        return whole if overload is self.full_overload else None

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        values = super()._values(args, kwargs)
        if self.every_call_refuses:
            refuse_unwritable(self.specification, values)
        return values

    def _run(self, values: list[Any]) -> tuple[Any, ...]:
        written = [tensor for _, tensor in written_tensors(self.specification, values)]
        with raising_versions(written):
            return super()._run(values)

    def _call_with_autograd(self, values: list[Any]) -> tuple[Any, ...]:
        """Write, through autograd or the running transforms, and return the results."""
        values = self._adapted(values)
        forward_mode = capabilities.forward_mode_active()
        # With DTensors the backward, too, must treat plain tensors as replicated: only our node does.
        sharded = any(map(mesh_of, tensors_in(values)))
        ordinary = not sharded and runs_ordinary(self.form, values, forward_mode=forward_mode)
        # In a trace, torch hides writes below autograd from the gradients of the traced code.
        traced = any(type(local_shard(tensor)) not in EAGER for tensor in tensors_in(values))
        transformed = capabilities.innermost_transform() is not None
        if not (transformed or traced):
            refuse_leaves(self.specification, values)
        by_torch = forward_mode or traced or self.writes_views_besides(values)
        if transformed or (by_torch and not ordinary):
            return self._copied_back(values)
        if ordinary:
            results = self._by_reference(values)
            self._validated = self.specification
            return results
        specification, results = self.specification, self.by_node(values)
        self._validated = specification
        return results[len(specification.schema.written) :]

    def by_node(self, values: list[Any]) -> tuple[Any, ...]:
        """Write with an autograd node; return the new values, and all results."""
        # Imported with the first such call.
        from opsmith.torch_library.autograd.node import Node, through
        from opsmith.torch_library.autograd.primitive import OperatorPrimitive

        flattening = ArgumentFlattening.of(self.form.schema, values)
        flat = flattening.flatten(values)
        call = OperatorPrimitive(self.form_registration, flattening, self._write)
        written = flattening.positions(self.form.schema.new_values)
        rule = self.rule(call, written=[at for at in written if flat[at] is not None])
        rule.keep_before(flat)
        results = through(self.node(Node).apply, rule, *flat)  # the lengths of lists are known after it
        return tuple(call.results.pack(results))

    def recorded(self, values: list[Any]) -> tuple[Any, ...]:
        refuse_unwritable(self.specification, values)
        return self._call_with_autograd(values)

    def writes_views_besides(self, values: list[Any]) -> bool:
        """Return True for a call that a single node cannot record: it writes a view, and something else.

        torch differentiates a write into a view only by a node's first tensor, which must be the view.
        """
        written = [tensor for _, tensor in written_tensors(self.specification, values)]
        if all(capabilities.viewed(tensor) is None for tensor in written):
            return False
        flattening = ArgumentFlattening.of(self.specification.schema, values)
        new = flattening.positions(self.specification.schema.written)  # a missing argument counts, too
        first = next(at for at, value in enumerate(flattening.flatten(values)) if isinstance(value, Tensor))
        return len(new) + len(self.specification.schema.results) > 1 or first != new[0]

    def _write(self, values: list[Any]) -> tuple[Any, ...]:
        """Write through the dispatcher; return the new values, and all results."""
        args, kwargs = self.specification.schema.dispatched(values)
        return all_results(self.specification.schema, values, self.call_whole(args, kwargs))

    def _run_fake(self, values: list[Any]) -> tuple[Any, ...]:
        """Compute shapes and dtypes; register the functional form, which cached code may call."""
        _ = self.form_registration
        return super()._run_fake(values)

    def _traced(self, values: list[Any]) -> tuple[Any, ...] | None:
        found = super()._traced(values)
        written = [tensor for _, tensor in written_tensors(self.specification, values)]
        # Inductor writes at offset 0 instead of a symbolic offset: pytorch issue 198068.
        shifted = any(isinstance(each.storage_offset(), torch.SymInt) for each in written)
        # torch functionalizes operators that return tensors, but not lists: `can_auto_functionalize`.
        lists = any(result.sequence for result in self.specification.schema.results)
        return self._copied_back(values, values) if found is None and (shifted or lists) else found

    def is_transformed_by_torch(self, transform: capabilities.Transform | None) -> bool:
        """Return True if torch's own kernel handles this transform: its functionalization takes no writes."""
        functionalizes = transform is not None and transform.kind == "Functionalize"
        return not functionalizes and super().is_transformed_by_torch(transform)

    def _copied_back(self, values: list[Any], before: list[Any] | None = None) -> tuple[Any, ...]:
        """Compute the functional form, and copy the new values back by torch's own operation."""
        specification, registration = self.specification, self.form_registration
        if before is None:  # a backward may keep the overwritten values
            before = copies_of_written(specification.schema, values)
        args, kwargs = self.form.schema.dispatched(before)
        found = registration.call_whole(args, kwargs)
        results = list(found) if isinstance(found, tuple) else [found]
        new = tensors_in(results[: len(specification.schema.written)])
        for (name, tensor), value in zip(written_tensors(specification, values), new, strict=True):
            try:
                tensor.copy_(value)
            except RuntimeError as error:
                transform = capabilities.innermost_transform()
                if transform is None:
                    raise
                mapped = transform.kind == "Vmap"
                what = (
                    f"it cannot write a mapped value into `{name}`: `vmap` does not map `{name}`"
                    if mapped
                    else f"`{name}` cannot be written under this transform of `torch.func`"
                )
                remedy = f"map `{name}`, too" if mapped else f"make `{name}` an argument, or `{name}.clone()`"
                raise specification.error(
                    errors.TransformError,
                    what,
                    argument=name,
                    got=str(error).partition(". ")[0],
                    hint=f"{remedy}, or call `{specification.variable}.functional`",
                ) from error
        return tuple(results[len(specification.schema.written) :])


def register_operator(specification: Specification) -> DispatcherRegistration:
    """Register an operator with torch."""
    if specification.schema.written:
        return InPlaceRegistration(specification)
    return DispatcherRegistration(specification)


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg()
