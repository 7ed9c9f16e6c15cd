"""Adopting what people have: `autograd.Function` classes, and operators that torch.library knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.function_class import Samples, adopt_function
from opsmith.adopting.library_operator import adopt_registered, is_operator, refuse_options
from opsmith.adopting.signature import Signature
from opsmith.core.call_arguments import shown
from opsmith.core.location import call_site
from opsmith.core.operator import Operator


def adopt(
    subject: Any,
    name: str | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    samples: Samples = None,
    signature: Signature = None,
    kind: str | Iterable[str] = "true",
    opaque: bool = False,
) -> Operator[..., Any]:
    """Make an operator of an `autograd.Function` class, or of an operator of torch: each gains what it lacks.

    A class is left as it is. An operator keeps its name and what it has, and calls of `torch.ops.ns.name`
    gain the rest; it asks for a reference, and takes samples.

    Args:
        subject: The class: old style, with `setup_context`, or with methods that take `self`. Or an operator:
            `torch.ops.ns.name`, one of its overloads, a `torch.library.custom_op`.
        name: `namespace::name` of the operator that a class becomes.
        reference: The same mathematics in plain PyTorch, with the arguments of `forward` by position. What
            the class's own code cannot do, under a transform or in a second order, follows from it.
        samples: A function that returns a list of argument tuples, from which types are told where nothing
            else says them, and on which `check` runs.
        signature: What `forward` takes and returns, as a function with type hints or as text. Without it a
            type is what an annotation says, else what default and samples show, else Tensor.
        kind: What its backward gives: `"true"` (the derivative), `"surrogate"`, `"approximate"`,
            `"nonlinear"` in the incoming gradient, `"stochastic"` or `"float32"`; or several of them.
        opaque: Its code is not made of torch operations, and is not tried on what stands for tensors.

    Raises:
        NameFormatError, NameTakenError, UsageError, ParameterKindError, MissingAnnotationError,
        UnsupportedTypeError, NotAFunctionError, SignatureMismatchError, CapturedTensorError: As their names
        say.

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
    if isinstance(subject, type) and issubclass(subject, torch.autograd.Function):
        named: Any = name  # what is none is refused there
        return adopt_function(
            subject,
            named,
            reference=reference,
            samples=samples,
            signature=signature,
            kind=kind,
            opaque=opaque,
            module=module,
        )
    if is_operator(subject):
        refuse_options(
            subject,
            name=(name, None),
            signature=(signature, None),
            kind=(kind, "true"),
            opaque=(opaque, False),
        )
        return adopt_registered(subject, reference=reference, samples=samples, module=module)
    raise errors.UsageError(
        "only a Function class, or an operator that torch knows, can be adopted",
        operator=name,
        argument="subject",
        expected="a class derived from torch.autograd.Function, or `torch.ops.ns.name`",
        got=shown(subject),
        hint='give the class, not its `apply`; declare a function with `@opsmith.operator("mylib::name")`',
    )
