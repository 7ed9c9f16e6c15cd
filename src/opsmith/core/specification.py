"""Specification of an operator: its reference and everything attached to it, as one frozen value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from opsmith import errors
from opsmith.core.argument_types import VALUE_TYPES
from opsmith.core.gradients import GradientRules, TangentRules
from opsmith.core.kernels import Kernel
from opsmith.core.location import scopes_of_callers
from opsmith.core.origins.declared import DECLARED, Origin, Part
from opsmith.core.samples import Samples
from opsmith.core.schema import Schema, functional_schema

if TYPE_CHECKING:  # imported only if an operator has shapes
    from opsmith.core.shapes import Shapes

Accepting = Mapping[tuple[str, ...], str]
"""Reasons for findings of `check` that are accepted, by property and cause."""
Autocast = Literal["promote", "lower", "float32"]

FUNCTIONAL_SUFFIX = "_functional"
"""Suffix of the name of an in-place operator's functional form."""

OUT = ".out"
"""torch's overload name for an operator that writes its results into tensors of the caller."""

VOID_SUFFIX = "_void"
"""Suffix of the operator that writes and returns nothing; an operator that returns its argument calls it."""


@dataclass(frozen=True)
class Specification(errors.ErrorSubject):
    """Specification of an operator.

    Args:
        name: `namespace::name`.
        reference: The mathematics; for an opaque operator, the routine itself.
        schema: Arguments and results.
        module: Module that declared it.
        qualname: Name of the reference in that module.
        where: `file:line` of the reference.
        opaque: True if the reference is not made of torch operations, so that nothing is derived from it.
        random: True if it draws from torch's random state.
        deterministic: False if the rounding of two runs on the same bits may differ, as in sums with atomics.
        autocast: Rule for floating inputs under autocast.
        inline: True if torch.compile traces the reference; None if it does so when no kernel takes the call.
        shapes: Shapes of its tensors, in letters.
        batching: Rule by which one call computes a whole batch, if there is one.
        gradients: Gradient rules.
        tangents: Tangent rules.
        kernels: Kernels, in the order in which they are tried.
        fake: Function that computes shapes and dtypes only, if the author gave one.
        samples: Function that yields representative inputs.
        flops: Function that counts the floating-point operations of a call, if the author gave one.
        accept: Findings of a check that the author accepts: the reason by property and cause.
        origin: Origin of its code: declared here, or adopted from a class or an operator of torch.
        generation: Number of times that calls have shown new types after a graph was made. Such a graph keeps
            the operator of torch that it contains.
    """

    name: str
    reference: Callable[..., Any]
    schema: Schema
    module: str
    qualname: str
    where: str
    opaque: bool = False
    random: bool = False
    deterministic: bool = True
    autocast: Autocast = "promote"
    inline: bool | None = None
    shapes: Shapes | None = None
    batching: str | None = None
    gradients: GradientRules = field(default_factory=GradientRules)
    tangents: TangentRules = field(default_factory=TangentRules)
    kernels: tuple[Kernel, ...] = ()
    fake: Callable[..., Any] | None = None
    samples: Samples | None = None
    flops: Callable[..., int] | None = None
    accept: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    origin: Origin = DECLARED
    generation: int = 0

    @property
    def computed_by(self) -> Callable[..., Any]:
        """The function for calls that no kernel takes: the forward of an adopted class, or the reference."""
        return self.origin.compute(self.reference, in_place=bool(self.schema.written))

    @property
    def draws(self) -> bool:
        """True if a call may draw random numbers, from torch's random state or a generator that it takes."""
        generator = VALUE_TYPES[torch.Generator]
        return self.random or any(each.kind.base is generator for each in self.schema.arguments)

    def where_of(self, part: Part) -> str:
        """`file:line` of a part that the operator had before it was adopted, else of the operator."""
        own = self.origin.own(part)
        return own.where if own and own.where else self.where

    @property
    def rounds_alike(self) -> bool:
        """False if the rounding of the operator, or of a kernel, is declared to differ from run to run."""
        return self.deterministic and all(kernel.deterministic for kernel in self.kernels)

    @property
    def formula_schema(self) -> Schema:
        """The schema of the functional form, whose arguments and results formulas name."""
        return functional_schema(self.schema) if self.schema.written else self.schema

    @property
    def namespace(self) -> str:
        """Part of the name before `::`."""
        return self.name.partition("::")[0]

    @property
    def torch_name(self) -> str:
        """`namespace::name` of the operator that `torch.ops` shows."""
        return f"{self.name}_types{self.generation}" if self.generation else self.name

    @property
    def dispatched_name(self) -> str:
        """`namespace::name` of the operator with the kernels."""
        returns = self.schema.returns is not None or self.name.endswith(OUT)
        return self.torch_name.replace(".", "_") + VOID_SUFFIX if returns else self.torch_name

    @property
    def short_name(self) -> str:
        """Part of the name after `::`."""
        return self.name.partition("::")[2]

    @property
    def variable(self) -> str:
        """Expression for the handle: a variable of its module or of a caller; else a `find_operator` call."""
        base = self.name.removesuffix(OUT)
        form = self.name[len(base) :]
        if torch.compiler.is_dynamo_compiling():  # Dynamo traces the error of a call, and has no frames
            return f"opsmith.find_operator({base!r}){form}"
        for scope in chain([getattr(sys.modules.get(self.module), "__dict__", {})], scopes_of_callers()):
            for key, value in [*scope.items()]:
                if (
                    key.isidentifier()
                    and key != "_"
                    and getattr(type(value), "is_handle", False)
                    and value.name == base
                ):
                    return f"{key}{form}"
        return f"opsmith.find_operator({base!r}){form}"

    @property
    def _subject(self) -> tuple[str, str]:
        return self.name, self.where
