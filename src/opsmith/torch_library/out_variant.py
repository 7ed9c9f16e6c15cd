"""Registration of `name.out`: an operator that writes its results into tensors of the caller."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import DerivedOperator, Operator, OutForm
from opsmith.core.out_form import out_form, out_names
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import Contract
from opsmith.torch_library.in_place import InPlaceRegistration
from opsmith.torch_library.registration import TRANSFORM_KEY, DispatcherRegistration

OUT_TAG: Any = getattr(torch.Tag, "out", None)
"""Tag of an operator that writes into `out`; None if torch has no such tag."""


class OutRegistration(InPlaceRegistration):
    """Registration of the out form, and of the overload `name.out` that calls it.

    Args:
        specification: The out form.
        registered: The operator whose results it writes.
    """

    def __init__(self, specification: Specification, registered: DispatcherRegistration) -> None:
        self._registered = registered
        super().__init__(specification)

    def in_torch(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the reference of the operator, and copy its results, using only torch operations."""
        form = out_form(self._registered.specification, self._registered.in_torch)
        return Contract(self.specification).run(form.reference, values)

    def _register(self) -> None:
        super()._register()
        schema, name = self.specification.schema, self.specification.short_name
        written = [each for each in schema.arguments if each.keyword_only and each.name in schema.written]
        self._outs = [each.name for each in written]
        returns = ", ".join(f"Tensor({each.alias}!)" for each in written)
        text = schema.text(name).removesuffix("()") + (returns if len(written) == 1 else f"({returns})")
        # Because of the tag, Inductor calls this overload instead of the operator. Up to torch 2.14 it passes
        # numbers twice, or after all tensors: the tag is only for tensors, and calls without other writes.
        given = schema.arguments[: -len(written)]
        plain = all(each.kind.annotation() == "Tensor" and not each.alias for each in given)
        tagged = OUT_TAG is not None and plain and not any(each.keyword_only for each in given)
        tags = [torch.Tag.pt2_compliant_tag, *([OUT_TAG] if tagged else [])]
        self._library.define(text, tags=tuple(tags))
        for key in ("CompositeImplicitAutograd", TRANSFORM_KEY):
            self._library.impl(name, self._with_out, key)

    def _with_out(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `out`, and return it."""
        self.overload(*args, **kwargs)
        outs = tuple(kwargs[name] for name in self._outs)
        return outs[0] if len(outs) == 1 else outs

    def _call_with_autograd(self, values: list[Any]) -> tuple[Any, ...]:
        if any(map(_differentiates, tensors_in(values))):
            raise self.specification.error(
                errors.MutationError,
                "an argument requires a gradient, but no gradient flows through `out=`",
                argument="out",
                expected="a call without gradients, as for torch's own operations with `out=`",
                hint="call it under `torch.no_grad()`, or without `out=`",
            )
        return super()._call_with_autograd(values)


def _differentiates(tensor: Tensor) -> bool:
    dual = capabilities.forward_mode_active() and capabilities.unpack_dual(tensor)[1] is not None
    return dual or (torch.is_grad_enabled() and tensor.requires_grad)


def make_out_form(owner: Operator[..., Any], registered: DispatcherRegistration) -> OutForm:
    """Register the out form of an operator."""
    form = _form(registered)
    registration = OutRegistration(form, registered)
    made: DerivedOperator[..., Any] = DerivedOperator(form, registration, owner, "out_operator")
    names = out_names(registered.specification.schema)
    return renew_out_form(OutForm(made, registration, registration.overload, names), registered)


def renew_out_form(form: OutForm, registered: DispatcherRegistration) -> OutForm:
    """Update the out form to the current state of its operator."""
    kernels = _kernels(registered.specification, form.operator)
    form.operator.redeclare(replace(_form(registered), kernels=kernels))
    return replace(form, overload=form.registration.overload)


def _form(registration: DispatcherRegistration) -> Specification:
    return out_form(registration.specification, partial(_all_results, registration))


def _all_results(registration: DispatcherRegistration, values: list[Any]) -> list[Tensor]:
    args, kwargs = registration.specification.schema.dispatched(values)
    found = registration.call_whole(args, kwargs)
    return list(found) if isinstance(found, tuple | list) else [found]


def _kernels(specification: Specification, form: Operator[..., Any]) -> tuple[Kernel, ...]:
    """The kernels that can write into `out`; for each device, only those before the first that cannot."""
    hidden_last = specification.schema.visible == tuple(range(len(specification.schema.visible)))
    kernels: list[Kernel] = []
    closed: set[str] = set()
    for kernel in specification.kernels:
        built = kernel.function
        into = built.into_results(form) if isinstance(built, BuiltKernel) and hidden_last else None
        if into is None:
            closed.add(kernel.device)
        elif kernel.device not in closed:
            kernels.append(Kernel(kernel.device, into, kernel.dtypes))
    return tuple(kernels)
