"""Registration of an operator with torch's dispatcher: its schema, and a kernel for each dispatch key."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.backward_plan import BackwardPlan, backward_plan, kernel_of, runs_ordinary
from opsmith.core.call_arguments import tensors_in, type_error
from opsmith.core.forked_locks import lock_of
from opsmith.core.kernels import BuiltKernel, Kernel, choose, refuse_strictly
from opsmith.core.operator import Operator, OutForm
from opsmith.core.schema import REQUIRED
from opsmith.core.specification import Specification
from opsmith.torch_library import autocast, capabilities, served_libraries
from opsmith.torch_library.arguments import fake_by_shapes, refuse_shapes, refuse_unsupported
from opsmith.torch_library.calls.autograd_kernel import AutogradKernel
from opsmith.torch_library.compilation import EAGER, CompiledCode, inline_reference, traced_results
from opsmith.torch_library.contract import Contract, run_call
from opsmith.torch_library.dtensor.placements import author_code, mesh_of, validated_placements
from opsmith.torch_library.dtensor.rule import DTensorRule
from opsmith.torch_library.flattening import ArgumentFlattening, ResultFlattening, detached
from opsmith.torch_library.flops import register_flops, unregister_flops
from opsmith.torch_library.torch_messages import KERNEL_OVERRIDDEN

if TYPE_CHECKING:
    from opsmith.torch_library.autograd.formula_rule import FormulaRule
    from opsmith.torch_library.autograd.node import RunsRule
    from opsmith.torch_library.calls.routes import RouteTable
    from opsmith.torch_library.held_results import HeldResults

HIDDEN_SUFFIX = "_and_hidden"
"""Suffix of the second operator that is registered for hidden results, and returns them."""


BITWISE: Any = getattr(torch.Tag, "nondeterministic_bitwise", None)
"""Tag of an operator whose runs may differ in bits; None if torch has no such tag."""


class KernelRun(threading.local):
    """The results of the running kernel in `DispatcherRegistration.call_whole`.

    Attributes:
        wanted: The registration whose kernel keeps them; None outside.
        results: The results; None before the kernel has run.
    """

    wanted: Any = None
    results: tuple[Any, ...] | None = None


KERNEL_RUN = KernelRun()

Returned = Callable[[tuple[Any, ...]], Any]
"""Function that selects, from all results, the results that the dispatcher takes."""
TRANSFORM_KEY = "FuncTorchDynamicLayerFrontMode"


class DispatcherRegistration:
    """Registration of one operator with torch's dispatcher.

    Attributes:
        specification: The current specification.
        overload: `torch.ops.namespace.name.default`.
        full_overload: The overload that also returns hidden results.
        out_form: The out form; None before it is needed.
        functional: The functional form of an in-place operator; None before it is needed.
        owner: The handle; None for a functional form until it has one.
        autograd_kernels: The kernels for the autograd key.
    """

    overload: Any
    full_overload: Any
    owner: Any = None

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self._validated: Specification | None = None
        self._routes: RouteTable | None = None
        self._held: HeldResults | None = None
        self._lock = lock_of(self, "_lock")
        self._deregister: list[Callable[[], None]] = []
        self._plans: dict[frozenset[str], BackwardPlan] = {}
        self._result_flattenings: dict[tuple[int | None, ...], ResultFlattening] = {}
        self._compiled = CompiledCode()
        self._nodes: dict[Any, Any] = {}
        for make in (type(self).make_out_form, type(self).make_functional):
            capabilities.run_in_traces(make)
        self._packets: list[Any] = []
        self.autograd_kernels: list[AutogradKernel] = []
        self._announced: list[str] = []
        self.out_form: OutForm | None = None
        self.functional: Operator[..., Any] | None = None
        self._library: Any = None
        try:
            self._register()
        except BaseException:  # also an interrupt: torch would keep the name forever
            self.remove()
            raise

    @property
    def traced(self) -> bool:
        """True if a graph may contain the operator."""
        return self._compiled.traced

    @property
    def validated(self) -> bool:
        """True if a call with the current specification has passed validation."""
        return self._validated is self.specification

    def update(self, specification: Specification) -> None:
        """Replace the specification, and drop compiled code that contains the old one."""
        with self._lock:  # calls of other threads may be adding routes or a kernel
            # The specification last: after an interrupt, the next replacement repeats these steps.
            self._forget_routes()
            before = self.specification
            _withdraw(before)
            self.specification = specification
        self._plans, self._result_flattenings = {}, {}
        if not _same_registration(before, specification):
            self.remove()
            try:
                self._register()
            except BaseException:
                self.remove()
                self.specification = before
                self._register()
                raise
        traced = self._compiled.traced
        if traced and replace(before, samples=None) != replace(specification, samples=None):
            self._compiled.drop()
        if self.out_form is not None:
            from opsmith.torch_library import out_variant  # it builds on this module

            self.out_form = out_variant.renew_out_form(self.out_form, self)

    def node(self, base: type[RunsRule]) -> Any:
        """The class of its autograd nodes on this base, made with the first node."""
        from opsmith.torch_library.autograd.node import node_class

        nodes = self._nodes  # another thread may redeclare the operator
        return nodes.get(base) or nodes.setdefault(base, node_class(self.specification.short_name, base))

    @property
    def rule(self) -> type[FormulaRule]:
        """The type of rule that its nodes have."""
        from opsmith.torch_library.autograd.formula_rule import FormulaRule

        return self.specification.origin.rule or FormulaRule

    def held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel or reference, whose results are checked for their promised layout."""
        if self._held is None or self._held.specification is not self.specification:
            from opsmith.torch_library.held_results import HeldResults  # with the first call

            self._held = HeldResults(self.specification)
        return self._held.of(function)

    @property
    def copied_results(self) -> tuple[str, ...]:
        """Descriptions of the kernel results that earlier calls have copied into different strides."""
        held = self._held
        current = held is not None and held.specification is self.specification
        return tuple(held.copies.values()) if held is not None and current else ()

    def forget_calls(self) -> None:
        """Validate the next call like the first call of a process."""
        with self._lock:
            self._forget_routes()
            self._validated = None

    def renew_routes(self) -> None:
        """Forget all routes, but remember that calls have passed validation."""
        with self._lock:
            self._forget_routes()

    def _forget_routes(self) -> None:
        if self._routes is not None:
            self._routes.detach()
            self._routes = None

    def make_functional(self) -> None:
        """Do nothing: an operator that writes into no argument is its own functional form."""

    def make_out_form(self) -> None:
        """Make the out form, if it does not exist yet."""
        from opsmith.torch_library import out_variant  # it builds on this module

        with self._lock:
            if self.out_form is None:
                self.out_form = out_variant.make_out_form(self.owner, self)

    def _stop_serving(self) -> None:
        """Deregister kernels that run without Python."""
        with self._lock:
            while self._deregister:
                self._deregister.pop()()

    def remove(self) -> None:
        """Deregister the operator; kernels first, as otherwise torch would crash."""
        if self.out_form is not None:
            self.out_form.registration.remove()
            self.out_form = None
        _withdraw(self.specification)
        self.renew_routes()
        self._stop_serving()
        for packet in self._packets:
            unregister_flops(packet)
        while self._announced:
            served_libraries.withdraw(self._announced.pop())
        self._compiled.drop()
        if self._library is not None:
            capabilities.destroy(self._library)

    def _register(self) -> None:
        specification = self.specification
        schema, name = specification.schema, specification.torch_name.partition("::")[2]
        self._packets, self.autograd_kernels = [], []
        self._library = torch.library.Library(specification.namespace, "FRAGMENT")
        self._nodes = {}
        self._placements: list[DTensorRule] = []
        self.overload = self.full_overload = self._define(name, hidden=False)
        if schema.hidden:
            self.full_overload = self._define(name + HIDDEN_SUFFIX, hidden=True)

    def _define(self, name: str, *, hidden: bool) -> Any:
        schema = self.specification.schema
        text = schema.void.text(name, with_hidden=hidden)
        tags = [torch.Tag.pt2_compliant_tag]
        if self.specification.random:
            tags.append(torch.Tag.nondeterministic_seeded)
        if not self.specification.deterministic and BITWISE is not None:
            tags.append(BITWISE)
        try:
            self._define_text(text, tags)
        except (RuntimeError, ValueError, IndexError):
            self._raise_default_error()
            raise

        packet = getattr(getattr(torch.ops, self.specification.namespace), name)
        overload, returned = packet.default, partial(self._returned, hidden=hidden)
        by_reference = self._kernel(self._by_reference, hidden=hidden)
        at_backend = partial(self._at_backend, returned, self._kernel(self._run, hidden=hidden))
        self._library.impl(name, at_backend, "CompositeExplicitAutograd", with_keyset=True)
        full_name = f"{self.specification.namespace}::{name}"
        if served_libraries.library_of(full_name) is not None:
            self._take_over(name, hidden=hidden)
        served_libraries.announce(full_name, partial(self._share, name, hidden))
        self._announced.append(full_name)
        shown = tuple(range(len(schema.results))) if hidden else schema.visible
        at_autograd = AutogradKernel(partial(self._at_autograd, overload, returned), shown)
        self.autograd_kernels.append(at_autograd)
        self._library.impl(name, at_autograd, "Autograd", with_keyset=True)
        self._register_transforms(overload, name, returned)
        fake = self._kernel(self._run_fake, hidden=hidden)
        capabilities.add_fake(self._library, overload, fake, self.specification.where)
        if capabilities.on("inlining"):
            inline_reference(
                self._library,
                overload,
                lambda: self.specification,
                by_reference,
                self._values,
                self._traced,
                returned,
            )
        self._add_placements(overload, returned)
        self._count_flops(packet)
        return overload

    def _define_text(self, text: str, tags: list[Any]) -> None:
        """Define an operator in torch, unless a library has defined it; then Python takes it over."""
        try:
            self._library.define(text, tags=tuple(tags))
        except RuntimeError:
            if served_libraries.library_of(self.specification.dispatched_name) is None:
                raise

    def _take_over(self, name: str, *, hidden: bool) -> None:
        """Replace a library's kernel by this operator's kernel."""
        with warnings.catch_warnings():  # torch warns, but the replacement is intended
            warnings.filterwarnings("ignore", KERNEL_OVERRIDDEN, UserWarning)
            for device in served_libraries.DEVICES:
                kernel = self._kernel(self._run, hidden=hidden)
                self._library.impl(name, kernel, device.upper(), allow_override=True)

    def _share(self, name: str, hidden: bool, library: served_libraries.ServedLibrary) -> str:
        """Take over an operator from a library of the same sources; else return where it is declared."""
        specification = self.specification
        if not served_libraries.is_same(specification, library):
            return specification.where
        self._take_over(name, hidden=hidden)
        return ""

    def _refuse_other_library(self) -> None:
        """Refuse to compute an operator that a library computes from different sources.

        Raises:
            NameTakenError: With the file of the library.
        """
        specification = self.specification
        library = served_libraries.library_of(specification.dispatched_name)
        if library is not None and not served_libraries.is_same(specification, library):
            raise specification.error(
                errors.NameTakenError,
                "a library in this process also computes this operator, but from other sources",
                expected="a library built from the same sources",
                got=library.file,
                hint="build the library again from the present package, or load only one of the two",
            )

    def _kernel(
        self, compute: Callable[[list[Any]], tuple[Any, ...]], *, hidden: bool = False
    ) -> Callable[..., Any]:
        """A kernel for the dispatcher, from a function of argument values that returns all results."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with capabilities.resolving_bits():
                results = compute(self._values(args, kwargs))
            if KERNEL_RUN.wanted is self:
                KERNEL_RUN.results = results
            return self._returned(results, hidden=hidden)

        return kernel

    @property
    def overloads(self) -> tuple[Any, ...]:
        """The operators of torch that compute this operator; first the operator that callers use."""
        hidden = self.specification.schema.hidden
        return (self.overload, self.full_overload) if hidden else (self.overload,)

    def call_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator through the dispatcher, and return all results, like `full_overload`.

        A mode sees the name that callers use. It may return cached results, as a selective checkpoint does:
        hidden results are kept as long as the memory of the first result that callers see.
        """
        if not (self.specification.schema.hidden and is_watched([*args, *kwargs.values()])):
            return self.full_overload(*args, **kwargs)
        shown, results = self._watched(args, kwargs)
        carriers = tensors_in(list(shown) if isinstance(shown, tuple) else [shown])
        storage: Any = capabilities.storage_of(carriers[0]) if carriers else None
        if results is not None and storage is not None:
            storage.hidden_results = [results[position] for position in self.specification.schema.hidden]
        elif results is None and not hasattr(storage, "hidden_results"):
            with capabilities.without_modes():  # the modes have already seen it
                return self.full_overload(*args, **kwargs)
        schema = self.specification.schema
        whole = dict(zip(schema.visible, shown if isinstance(shown, tuple) else (shown,), strict=False))
        hidden = storage.hidden_results if results is None else [results[at] for at in schema.hidden]
        whole |= dict(zip(schema.hidden, hidden, strict=True))
        return self._returned(tuple(whole[at] for at in range(len(whole))), hidden=True)

    def _watched(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...] | None]:
        """Call the operator by the name that callers use; also return all results, if its kernel has run."""
        before, KERNEL_RUN.wanted = KERNEL_RUN.wanted, self
        try:
            return self.overload(*args, **kwargs), KERNEL_RUN.results
        finally:
            KERNEL_RUN.wanted, KERNEL_RUN.results = before, None

    def _add_placements(self, overload: Any, returned: Returned) -> None:
        """Register the rule for DTensors, with which the reference computes."""
        self._placements.append(
            DTensorRule(
                self._library,
                overload,
                lambda: self.specification,
                lambda values: returned(self._by_reference_on_dtensors(values)),
                lambda values: returned(self.in_torch(values)),
            )
        )

    def _by_reference_on_dtensors(self, values: list[Any]) -> tuple[Any, ...]:
        specification = self.specification
        results = self._by_reference(values)
        self._validated = specification
        return results

    def _adapted(self, values: list[Any]) -> list[Any]:
        """Argument values, with DTensors placed so that torch can compute a reference that writes."""
        return self._placements[-1].adapted(values) if self._placements else values

    def _count_flops(self, packet: Any) -> None:
        """Make the flop counter of torch count the operator."""
        register_flops(packet, lambda: self.specification)
        self._packets.append(packet)

    def _raise_default_error(self) -> None:
        specification = self.specification
        for argument in specification.schema.arguments:
            if argument.default is REQUIRED:
                continue
            leaves = ", ".join(leaf.schema() for leaf in argument.leaves())
            if capabilities.schema_fault(f"probe({leaves}) -> Tensor") is not None:
                raise specification.error(
                    errors.DefaultError,
                    f"torch's schema language cannot write the default of `{argument.name}`",
                    argument=argument.name,
                    got=repr(argument.default),
                    hint=f"write `{argument.name}: {argument.kind.annotation()} | None = None` "
                    "and set the value inside the function"
                    if argument.kind.structure is None
                    else "leave the default out, or use a default without a list of strings",
                )

    def _at_autograd(self, overload: Any, returned: Returned, keyset: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call at the autograd key."""
        if _is_compiled():
            return torch.compiler.disable(self._at_autograd)(overload, returned, keyset, args, kwargs)
        routes = self._routes  # another thread may delete it
        results = None if routes is None else routes.results(keyset, args, kwargs)
        if results is not None:
            return results[0] if len(results) == 1 else returned(results)
        return self._accepted(partial(self._call_in_full, overload, returned, keyset), keyset, args, kwargs)

    def _at_backend(
        self, returned: Returned, in_full: Callable[..., Any], keyset: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The kernel below autograd, which calls in inference mode reach first."""
        if _is_compiled():
            return torch.compiler.disable(self._at_backend)(returned, in_full, keyset, *args, **kwargs)
        if not torch.is_inference_mode_enabled() or KERNEL_RUN.wanted is not None:
            return in_full(*args, **kwargs)
        routes = self._routes  # another thread may delete it
        results = None if routes is None else routes.results(keyset, args, kwargs)
        if results is not None:
            return results[0] if len(results) == 1 else returned(results)
        return self._accepted(in_full, keyset, args, kwargs)

    def _accepted(self, in_full: Callable[..., Any], keyset: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call without a route, in full, and accept it."""
        if not self.specification.schema.written:
            result = in_full(*args, **kwargs)
            self._accept(keyset, args, kwargs)
            return result
        self._accept(keyset, args, kwargs)  # after the call, a written one may require a gradient
        try:
            return in_full(*args, **kwargs)
        except BaseException:
            self.renew_routes()
            raise

    def _accept(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call: if it passes validation, later calls like it take a route."""
        if not (self.validated and capabilities.on("known_calls")):
            return
        with self._lock:
            routes = self._routes
            if routes is None or routes.specification is not self.specification:
                routes = self._routes = self._make_routes()
        routes.accept(keyset, args, kwargs)

    def _make_routes(self) -> RouteTable:
        from opsmith.torch_library.calls.routes import RouteTable  # with the first call
        from opsmith.torch_library.dtensor.computation import DTensorComputations

        if self.specification.origin.routes is not None:
            own = self.specification.origin.routes(self)
            return RouteTable(self, None, own.route, accelerated=own.as_applied)
        on_dtensors = (
            DTensorComputations(self, self._placements[-1]).computation if self._placements else None
        )
        return RouteTable(self, on_dtensors, None)

    @property
    def form_registration(self) -> DispatcherRegistration:
        """The registration of the functional form; an operator that writes into no argument is its own."""
        return self

    def recorded(self, values: list[Any]) -> tuple[Any, ...]:
        """Compute a call with a graph, from argument values with validated metadata."""
        return self._call_with_autograd(values)

    def _call_in_full(
        self, overload: Any, returned: Returned, keyset: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute a call at the autograd key that must be validated in full."""
        values = self._values(args, kwargs)
        classes = self.specification.origin.kind == "class" and capabilities.on("inlining")
        with autocast.noting_autocast(autocast.autocast_in_force()) if classes else nullcontext():
            if not self._differentiates(values):
                return self._call_below(overload, keyset, args, kwargs)
            return returned(self._call_with_autograd(values))

    def _call_below(self, overload: Any, keyset: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call without a derivative, below autograd."""
        return capabilities.redispatch_below_autograd(overload, keyset, args, kwargs)

    def _register_transforms(self, overload: Any, name: str, returned: Returned) -> None:
        """Register the kernel for transforms of `torch.func`, and the kernels for autocast."""
        autocasts = self._register_autocast(overload, name)
        by_level = capabilities.on("torch_func")
        if by_level:
            by_torch = capabilities.transform_kernel(f"{self.specification.namespace}::{name}")

        def transforms(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _is_compiled():
                return torch.compiler.disable(transforms)(keyset, *args, **kwargs)
            self._record_call([*args, *kwargs.values()])
            if by_level and self.is_transformed_by_torch(capabilities.innermost_transform()):
                return by_torch.call_boxed(keyset, *args, **kwargs)
            values = self._values(args, kwargs)
            cast = autocast.in_force(autocasts, tensors_in(values))
            if cast is not None:
                return cast(keyset, *args, **kwargs)
            return returned(self._call_with_autograd(values))

        self._library.impl(name, transforms, TRANSFORM_KEY, with_keyset=True)

    def _record_call(self, given: list[Any]) -> None:
        """Record a call under a transform; opsmith's own operators are recorded with their values."""

    def is_transformed_by_torch(self, transform: capabilities.Transform | None) -> bool:
        """Return True if torch's own kernel handles this transform."""
        return transform is None or transform.kind == "Functionalize"

    def _register_autocast(self, overload: Any, name: str) -> dict[str, Any]:
        """Register an autocast kernel for each type of device that has none, and return all of them."""
        kernels: dict[str, Any] = {}
        if not self.specification.origin.casts:
            return kernels  # a class handles autocast itself, as in `apply`
        leaves = enumerate(self.specification.schema.leaves)
        written = {each for place, leaf in leaves if leaf.alias for each in (place, leaf.name)}
        for device in capabilities.AUTOCAST_DEVICES:
            key = capabilities.autocast_key(device)
            if key is None:
                continue
            if self.specification.origin.own("autocast", device):
                kernels[device] = capabilities.kernel_at(overload, key).call_boxed
                continue
            kernel = autocast.autocast_kernel(overload, device, lambda: self.specification.autocast, written)
            self._library.impl(name, kernel, key, with_keyset=True)
            capabilities.serve_autocast_while_tracing(overload, key, partial(kernel, None))
            kernels[device] = kernel
        return kernels

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Argument values in order, validated beyond what the dispatcher checks."""
        specification = self.specification
        if not self.validated:
            from opsmith.core.reachable import refuse_captured_tensors  # with the first call

            refuse_captured_tensors(specification.reference, specification.name)
            self._refuse_other_library()
        try:
            values = specification.schema.received(args, kwargs)
        except errors.ArgumentError as error:  # raised for a value, without the operator's name
            raise error.of(specification.name) from None
        for argument, value in zip(specification.schema.arguments, values, strict=True):
            kind = argument.kind
            held = kind.length is not None or kind.base.held or kind.encoded
            if (value is None and not kind.optional) or (held and not kind.accepts(value)):
                call = f"call it as {specification.schema.call_text(specification.variable)}"
                wrong = type_error(argument, value)
                raise wrong.of(specification.name, specification.where, kind.base.hint or call)
        refuse_unsupported(specification, values)
        refuse_shapes(specification, values)
        self._compiled.notice(specification, tensors_in(values))
        for placements in self._placements:
            placements.serve()
        return validated_placements(specification, values)

    def _returned(self, results: tuple[Any, ...], *, hidden: bool = False) -> Any:
        """Results as the dispatcher takes them."""
        shown = results if hidden else [results[position] for position in self.specification.schema.visible]
        return (shown[0] if len(shown) == 1 else tuple(shown)) if shown else None

    def _run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the kernel that takes the call, or the reference."""
        specification = self.specification
        accepted, rejected = choose(specification.kernels, values)
        refuse_strictly(rejected, specification.name)
        function = accepted.kernel.function if accepted else specification.computed_by
        if accepted and isinstance(function, BuiltKernel):
            self._serve_without_python(specification, accepted.kernel, function)
        # The forward of a class runs without grad mode, as in `apply`.
        with torch.set_grad_enabled(torch.is_grad_enabled() and specification.origin.kind != "class"):
            if self.validated or function is not specification.reference:
                results = run_call(specification, self.held(function), values)
            else:  # only the first run shows the operators that it calls
                results = self._by_reference(values)
        self._validated = specification
        return results

    def _serve_without_python(
        self, specification: Specification, kernel: Kernel, built: BuiltKernel[Any]
    ) -> None:
        """Let a kernel take calls without Python, if it is the first of its device."""
        first = next(each for each in specification.kernels if each.device == kernel.device)
        plain = specification.origin.outputs is None and not specification.schema.hidden
        plain &= served_libraries.library_of(specification.dispatched_name) is None
        if first is kernel and plain and specification.rounds_alike:  # else Python may refuse a call
            with self._lock:
                current = self.specification is specification
                deregister = built.serve(self._kernel(self._run)) if current else None
                if deregister is not None:
                    self._deregister.append(deregister)

    def _traced(self, values: list[Any]) -> tuple[Any, ...] | None:
        """Compute a call in operations that torch traces; None if compiled code calls the operator."""
        return traced_results(self.specification, values)

    def _by_reference(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the reference, even if there are kernels."""
        from opsmith.torch_library.autograd.graph_cuts import refusing_cuts  # if derivatives may follow

        specification = self.specification
        reference, derived = specification.reference, not self.validated
        with author_code, refusing_cuts(specification, reference, "the reference", derived=derived):
            return run_call(specification, self.held(specification.computed_by), values)

    def in_torch(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the reference, using only torch operations."""
        return self._by_reference(values)

    def _run_fake(self, values: list[Any]) -> tuple[Any, ...]:
        """Compute only shapes and dtypes."""
        specification = self.specification
        by_class = specification.origin.kind == "class"
        if specification.opaque and specification.fake is None and not by_class:
            derived = fake_by_shapes(specification, values)
            if derived is not None:
                return derived
            raise specification.error(
                errors.MissingFakeError,
                "it is opaque and has no fake kernel, but tracing, compiling and `meta` tensors need one",
                hint="write `@op.fake` over a function that returns `x.new_empty(shape)` for each result; a "
                "size that depends on data is `torch.library.get_ctx().new_dynamic_size()`",
            )
        if specification.fake is not None or by_class:
            return Contract(specification).run(specification.fake or specification.computed_by, values)
        return Contract(specification).run_traced(specification.reference, values)

    def _differentiates(self, values: list[Any]) -> bool:
        """Return True if this call needs an autograd node."""
        if capabilities.forward_mode_active():
            return True
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(values))

    def _call_with_autograd(self, values: list[Any]) -> tuple[Any, ...]:
        """Compute all results, through autograd or the running transforms."""
        values = self._adapted(values)
        specification = self.specification
        transformed = capabilities.innermost_transform() is not None
        forward_mode = transformed or capabilities.forward_mode_active()
        # With DTensors the backward, too, must treat plain tensors as replicated: only our node does.
        sharded = any(map(mesh_of, tensors_in(values)))
        # If a reference writes into a copy, `vmap` must map the copy: only our rule does.
        mapped = transformed and specification.schema.new_values
        if not (sharded or mapped) and runs_ordinary(specification, values, forward_mode=forward_mode):
            refuse_strictly(choose(specification.kernels, values)[1], specification.name)
            kernel = kernel_of(specification, values)
            results = (
                run_call(specification, self.held(kernel.function), values)
                if kernel
                else self._by_reference(values)
            )
            self._validated = specification
            roles = zip(results, specification.schema.results, strict=True)
            return tuple(result if role.differentiable else detached(result) for result, role in roles)
        flattening = ArgumentFlattening.of(specification.schema, values)
        differentiable = specification.gradients.differentiable
        flat = [
            value if not isinstance(value, Tensor) or differentiable(name) else value.detach()
            for name, value in zip(flattening.names, flattening.flatten(values), strict=True)
        ]
        # Imported with the first such call, which an operator without gradients never has.
        from opsmith.torch_library.autograd.primitive import OperatorPrimitive, differentiate

        call = OperatorPrimitive(self, flattening)
        if transformed:
            from opsmith.torch_library.autograd.functorch import call_under_transforms

            results = call_under_transforms(call, flat)
        else:
            results = differentiate(call, flat)
        self._validated = specification
        return tuple(call.results.pack(results))

    def plan(self, needed: frozenset[str]) -> BackwardPlan:
        """The backward for these inputs, made once."""
        plan = self._plans.get(needed)
        if plan is None:
            plan = self._plans[needed] = backward_plan(self.specification, needed)
        return plan

    def result_flattening(self, lengths: tuple[int | None, ...]) -> ResultFlattening:
        """Flat form of results with lists of these lengths, made once."""
        result_flattening = self._result_flattenings.get(lengths)
        if result_flattening is None:
            result_flattening = self._result_flattenings[lengths] = ResultFlattening(
                self.specification.schema, lengths
            )
        return result_flattening


def _is_compiled() -> bool:
    """Return True while Dynamo compiles each function, as after a graph break; kernels run uncompiled."""
    # The first is true in a function that Dynamo compiles; the second is set in a function that it has left.
    return torch.compiler.is_dynamo_compiling() or capabilities.frame_callback() not in (None, False)


def is_watched(given: list[Any]) -> bool:
    """Return True if a mode sees a call with these arguments, and no graph is made of the call."""
    return (
        capabilities.seen_by_modes()
        and not capabilities.recording()
        and all(type(capabilities.innermost_value(tensor)) in EAGER for tensor in tensors_in(given))
    )


def _withdraw(specification: Specification) -> None:
    for kernel in specification.kernels:
        if isinstance(kernel.function, BuiltKernel):
            kernel.function.withdraw()


def _same_registration(before: Specification, now: Specification) -> bool:
    """Return True if the operator need not be registered again."""
    if before.schema is not now.schema and (
        before.schema.text("", with_hidden=True) != now.schema.text("", with_hidden=True)
        or before.schema.hidden != now.schema.hidden
    ):
        return False
    parts = ("torch_name", "random", "deterministic")
    same = all(getattr(before, part) == getattr(now, part) for part in parts)
    return same and before.origin.kind == now.origin.kind
