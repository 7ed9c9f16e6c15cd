"""Adopting existing code: `autograd.Function` classes, and operators of torch.library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from opsmith import errors
from opsmith.adopting.class_samples import Samples
from opsmith.adopting.function_class import adopt_function, is_function_class
from opsmith.adopting.registered import adopt_registered, is_operator
from opsmith.adopting.signature import Signature
from opsmith.core.call_arguments import shown
from opsmith.core.location import call_site
from opsmith.core.operator import Operator

if TYPE_CHECKING:
    from opsmith.adopting.class_types import (
        AdoptOptions,
        ClassOptions,
        ResultTyped,
        SignatureText,
        Untyped,
        WithContext,
        WithSetup,
    )

P = ParamSpec("P")
R = TypeVar("R")

_ORIGINS: tuple[tuple[Callable[[Any], bool], Callable[..., Operator[..., Any]]], ...] = (
    (is_function_class, adopt_function),
    (is_operator, adopt_registered),
)
"""Kinds of subjects that can be adopted: a test of the subject, and the function that adopts it."""


@overload
def adopt(
    subject: Any, name: str, *, signature: Callable[P, R], **options: Unpack[ClassOptions]
) -> Operator[P, R]: ...
@overload
def adopt(subject: type[Untyped], name: str, **options: Unpack[SignatureText]) -> Operator[..., Any]: ...
@overload
def adopt(
    subject: type[WithContext[P, R]], name: str, *, signature: None = None, **options: Unpack[ClassOptions]
) -> Operator[P, R]: ...
@overload
def adopt(
    subject: type[ResultTyped[R]], name: str, *, signature: None = None, **options: Unpack[ClassOptions]
) -> Operator[..., R]: ...
@overload
def adopt(
    subject: type[WithSetup[P, R]], name: str, *, signature: None = None, **options: Unpack[ClassOptions]
) -> Operator[P, R]: ...
@overload
def adopt(
    subject: Any, name: str | None = None, *, reference: Callable[..., R], **options: Unpack[AdoptOptions]
) -> Operator[..., R]: ...
@overload
def adopt(subject: Any, name: str | None = None, **options: Unpack[SignatureText]) -> Operator[..., Any]: ...
def adopt(
    subject: Any,
    name: str | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    samples: Samples = None,
    signature: Signature = None,
    kind: str | Iterable[str] = "true",
    opaque: bool = False,
    deterministic: bool = True,
    accept: Mapping[tuple[str, ...], str] | None = None,
    mutates: str | Iterable[str] | None = None,
) -> Operator[..., Any]:
    """Make an operator of an `autograd.Function` class, or of an operator of torch.library.

    The class is not changed. An operator of torch.library keeps its name, kernels and rules. The missing
    rules are derived from a reference; calls of `torch.ops.ns.name` use them, too.

    Args:
        subject: The class: old style, with `setup_context`, or with methods that take `self`. Or an operator:
            `torch.ops.ns.name`, one of its overloads, a `torch.library.custom_op`.
        name: `namespace::name` of the operator that a class becomes.
        reference: The same mathematics in plain PyTorch, with the arguments of `forward` by position. It is
            used where the class cannot be, as in some transforms and second-order gradients.
        samples: A function that returns a list of argument tuples. `check` runs on them, and types are
            inferred from them if there are no annotations.
        signature: Signature of `forward`, as a function with annotations or as text. Without it a type comes
            from the annotation, else from default and samples, else it is Tensor.
        kind: Kind of its backward: `"true"` (the derivative), `"surrogate"`, `"approximate"`,
            `"nonlinear"` in grad_output, `"stochastic"` or `"float32"`; or several of them.
        opaque: True if its code is not made of torch operations, so that it is never run on fake tensors.
        deterministic: False if its rounding differs from run to run, as for sums with atomics: a call raises
            an error under `torch.use_deterministic_algorithms(True)`. An operator of torch.library has a tag.
        accept: Findings of `check` to accept: the reason by `(property, cause)`, as `("vmap", "raises")`.
        mutates: Names of the arguments that the class marks as dirty and the operator writes into. By default
            its code, samples and calls show them. Arguments left out are copied: `()` makes an operator that
            writes nothing.

    Raises:
        NameFormatError, NameTakenError, UsageError, UnknownInputError: If an argument is invalid.
        ParameterKindError, MissingAnnotationError, UnsupportedTypeError, NotAFunctionError: If the class is
            invalid.
        SignatureMismatchError, CapturedTensorError: If the reference is invalid.

    Example:
        >>> import torch, opsmith
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad * ctx.saved_tensors[0]
        >>> square = opsmith.adopt(Square, "demo::adopted_square")
        >>> torch.func.vmap(torch.func.grad(square))(torch.tensor([1.0, 3.0]))
        tensor([2., 6.])
    """
    frame = inspect.currentframe()
    module = call_site(frame and frame.f_back).module
    for takes, adopt_subject in _ORIGINS:
        if takes(subject):
            return adopt_subject(
                subject,
                name,
                reference=reference,
                samples=samples,
                signature=signature,
                kind=kind,
                opaque=opaque,
                deterministic=deterministic,
                accept=accept,
                mutates=mutates,
                module=module,
            )
    raise errors.UsageError(
        "only a Function class, or an operator that torch knows, can be adopted",
        operator=name,
        argument="subject",
        expected="a class derived from torch.autograd.Function, or `torch.ops.ns.name`",
        got=shown(subject),
        hint='give the class, not its `apply`; declare a function with `@opsmith.operator("mylib::name")`',
    )
