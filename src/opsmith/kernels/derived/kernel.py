"""Kernel that is derived from the reference: compiled by Inductor for each kind of call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.location import innermost, where
from opsmith.core.tensors import map_tensors, replace_tensors
from opsmith.kernels.common.dtypes import dtype_name
from opsmith.kernels.derived.variant import Traced, Variant, build_variant
from opsmith.kernels.languages import Declaration
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import Contract

MOST_VARIANTS = 64
"""Maximum number of kinds of calls, and of ranges of sizes, for which one kernel is compiled."""
MOST_SIZES = 4096
"""Maximum number of sizes of calls that are kept with their variant."""
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""The dtypes of tensors that Inductor compiles for the CPU."""

Kind = tuple[Any, ...]
"""Facts that the calls of a variant have in common: the tensors that need a gradient, dtypes and ranks, the
lengths of lists, and the values of all other arguments."""


@dataclass(frozen=True)
class ReferenceSource:
    """The reference of an operator as the source of a kernel."""

    reference: Any

    @property
    def entry(self) -> str:
        """Name of the function."""
        return str(self.reference.__name__)

    @property
    def text(self) -> str:
        """Text of the function; its name if Python has no text of it."""
        try:
            return inspect.getsource(self.reference)
        except (OSError, TypeError):
            return self.entry

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return where(self.reference)


class DerivedKernel(BuiltKernel[ReferenceSource]):
    """Function that computes an operator by compiled graphs of its reference and its gradients."""

    key, language = "derived", "Inductor"
    differentiable = True
    manner = "derived from the reference"

    def __init__(self, declaration: Declaration) -> None:
        operator = declaration.operator
        super().__init__(operator, lambda: ReferenceSource(operator.reference), strict=declaration.strict)
        self._dtypes = declaration.ordered_dtypes(DTYPES)

    def _forget(self) -> None:
        self._variants: dict[Kind, list[Variant]] = {}
        self._known: dict[Any, Variant] = {}
        self._count = 0

    @property
    def dtypes(self) -> tuple[torch.dtype, ...] | None:
        """The dtypes of tensors that it takes; None for all that Inductor compiles."""
        return self._dtypes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the results of a call, by the reference if no variant takes its sizes."""
        schema = self.operator.specification.schema
        values = schema.call_values(args, kwargs)
        variant = self._variant(values)
        if isinstance(variant, str):
            return self.operator.reference(*args, **kwargs)
        tensors = tensors_in(values)
        returned = iter(variant([each if each.is_contiguous() else each.contiguous() for each in tensors]))
        results = [
            None if form is None else next(returned) if form < 0 else [next(returned) for _ in range(form)]
            for form in variant.facts.forms
        ]
        return results[0] if schema.single else tuple(results)

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Return why it does not take a call with these values; None if it takes it.

        Raises:
            KernelSourceError: If no kernel can be derived from the reference.
            CompileError: If the compiler refuses what Inductor has written.
        """
        tensors = tensors_in([*values])
        if not tensors:
            return "the arguments contain no tensor"
        for each in tensors:
            if type(each) not in (Tensor, torch.nn.Parameter) or each.layout is not torch.strided:
                return "it takes only tensors with data, outside of a trace"
            if each.dtype not in (self._dtypes or DTYPES):
                return f"it does not take {dtype_name(each.dtype)}"
        if capabilities.innermost_transform() is not None or capabilities.forward_mode_active():
            return "the reference computes under transforms of `torch.func` and in forward mode"
        from opsmith.core.missing_kernels import missing_reason

        try:
            variant = self._variant([*values])
        except errors.ToolchainError as error:
            return missing_reason(self, error)
        return variant if isinstance(variant, str) else None

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the tensors that are not contiguous, which it copies."""
        names = self.operator.specification.schema.names
        return tuple(
            f"`{name}`: it is not contiguous"
            for name, value in zip(names, values, strict=True)
            if any(not each.is_contiguous() for each in tensors_in([value]))
        )

    def saved(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return the values that the backward of a call needs, with the sizes and bytes of hidden results."""
        variant = self._variant([*values])
        if isinstance(variant, str):
            return ()
        names = [
            name
            for name, value in zip(self.operator.specification.schema.names, values, strict=True)
            for _ in tensors_in([value])
        ]
        found = [names[at] for kind, at in variant.facts.taken if kind == "input"]
        found += [f"result {at}" for kind, at in variant.facts.taken if kind == "result"]
        return (*found, *variant.hidden_results(tensors_in([*values])))

    def origin_of(self, values: Sequence[Any]) -> str:
        """Return where the libraries for a call came from."""
        variant = self._variant([*values])
        return "" if isinstance(variant, str) else variant.origin

    def _variant(self, values: list[Any]) -> Variant | str:
        """Return the variant for a call; it is built if there is none. A text says why there can be none."""
        differentiates = torch.is_grad_enabled() and not self.operator.specification.gradients.given
        call = _call(values, differentiates)
        found = self._known.get(call)
        if found is not None:
            return found
        tensors = [each.contiguous() for each in tensors_in(values)]  # a library takes no other layout
        if any(each.numel() == 0 for each in tensors):
            return "a tensor has no elements"
        needed = tuple(at for at, each in enumerate(tensors) if differentiates and each.requires_grad)
        kind = (needed, *_kind(values))
        with self._lock:
            for variant in self._variants.get(kind, ()):
                if variant.fits(tensors):
                    break
            else:
                built = self._built(kind, values, tensors, needed)
                if built is None:
                    return f"it is compiled for {MOST_VARIANTS} kinds of calls, which is the maximum"
                variant = built
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            self._known[call] = variant
        return variant

    def _built(
        self, kind: Kind, values: list[Any], tensors: Sequence[Tensor], needed: tuple[int, ...]
    ) -> Variant | None:
        """Load variants of this kind from the cache until one takes these sizes; else build one."""
        from opsmith.build.cache import cache_on_disk
        from opsmith.build.toolchain import cpu_model, find_toolchain
        from opsmith.core.source_hash import source_hash

        toolchain = find_toolchain()
        specification = self.operator.specification
        variants = self._variants.setdefault(kind, [])
        parts = {
            "kind": "derived",
            "operator": specification.name,
            "reference": source_hash(specification.reference),
            "call": repr(kind),
            "format": "4",
            "torch": str(torch.__version__),
            "compiler": toolchain.identity,
            "processor": cpu_model(),
        }
        without_data = map_tensors(lambda tensor: torch.empty((), device="meta"), values)
        while self._count < MOST_VARIANTS:
            forms: list[int | None] = []
            traced = partial(self._traced, without_data, forms)  # it is kept, but the tensors must not be
            build = partial(self._build, traced, forms, tensors, needed, toolchain.command[0])
            entry = cache_on_disk().obtain({**parts, "number": str(len(variants))}, build)
            variant = Variant(
                f"{specification.name}_fused{self._count}",
                specification.reference,
                entry.directory,
                traced,
                tensors,
                needed,
                entry.origin,
            )
            variants.append(variant)
            self._count += 1
            if variant.fits(tensors):
                return variant
        return None

    def _build(
        self,
        traced: Traced,
        forms: list[int | None],
        tensors: Sequence[Tensor],
        needed: Sequence[int],
        compiler: str,
        folder: Path,
    ) -> None:
        try:
            graphs = capabilities.fused_graphs(traced, tensors, needed)
        except errors.OpsmithError:
            raise
        except Exception as error:
            raise self._no_graphs(error) from error
        try:
            build_variant(folder, graphs, forms, tensors, compiler)
        except Exception as error:
            raise self.error(
                errors.CompileError,
                "the compiler refuses the code that Inductor has written for the reference",
                got=errors.message_of(error)[:2000],
                hint="leave `derived=True` out; report it to PyTorch with the reference",
            ) from error

    def _traced(self, values: list[Any], forms: list[int | None], *given: Tensor) -> list[Tensor]:
        """Run the reference on the tensors of a trace, and return all results as tensors."""
        specification = self.operator.specification
        replaced = replace_tensors(values, iter(given))
        results = Contract(specification).run_traced(specification.reference, replaced)
        forms[:] = [
            None if each is None else -1 if isinstance(each, Tensor) else len(each) for each in results
        ]
        return tensors_in([*results])

    def _no_graphs(self, error: Exception) -> errors.KernelSourceError:
        """Return the error for a failed trace, at the line of the reference if there is one."""
        first = (errors.message_of(error).strip() or "no message").splitlines()[0]
        return self.error(
            errors.KernelSourceError,
            "no kernel can be derived from its reference",
            expected="a reference whose operations do not depend on the data of tensors",
            got=f"{type(error).__name__}: {first}",
            where=innermost(error, self.source.where),
            hint="compute with torch operations alone: `torch.where` in place of `if`, and no `.item()`",
        )


def _call(values: Sequence[Any], differentiates: bool) -> tuple[Any, ...]:
    """Facts of a call that choose its variant: its kind, and the sizes of its tensors."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found += (value.dtype, value.shape, differentiates and value.requires_grad)
        elif isinstance(value, list | tuple):
            found.append(_call(value, differentiates))
        else:
            found += (
                type(value),
                repr(value) if isinstance(value, float) else value,
            )  # nan is not equal to nan
    return tuple(found)


def _kind(values: Sequence[Any]) -> tuple[Any, ...]:
    """The dtypes and ranks of tensors, the lengths of lists, and the other values."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((str(value.dtype), value.ndim))
        elif isinstance(value, list | tuple):
            found.append(_kind(value))
        else:
            found.append(repr(value))
    return tuple(found)
