"""Breaches of the contract as rows: each begins after calls that kept it, and is one of a known call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith import errors

Function = Callable[..., Any]


@dataclass
class Switch:
    """Switch between a function that keeps the contract and one that breaks it, and a record of its runs."""

    on: bool = False
    ran: int = 0
    raised: str = ""

    def either(self, right: Function, wrong: Function) -> Function:
        def function(*args: Any) -> Any:
            if not self.on:
                return right(*args)
            self.ran += 1
            try:
                return wrong(*args)
            except Exception as error:
                self.raised = str(error).partition("\n")[0]
                raise

        return function


@dataclass(frozen=True)
class Declared:
    """An operator whose function may break the contract.

    Args:
        operator: The handle.
        switch: The switch of the function that may.
        call: A call as a function of two tensors alone.
        plain: Plain torch that computes the same while the contract is kept.
        instead: Plain torch that computes a right answer to the breach; None where there is only the refusal.
    """

    operator: opsmith.Operator[..., Any]
    switch: Switch
    call: Function
    plain: Function
    instead: Function | None = None


@dataclass(frozen=True)
class Breach:
    """One breach by one kind of function.

    Args:
        name: Name of the row.
        error: The error that each executor raises; None for a result that is made right.
        declare: Declares an operator of a name.
        shape: Shape of the tensors that it is called with.
        differentiated: True if the backward breaks it.
        modes: Modes of calls in which it is one.
        argument: Name of the argument in the error; empty where it has none, or any.
    """

    name: str
    error: type[errors.OpsmithError] | None
    declare: Callable[[str], Declared]
    shape: tuple[int, ...] = (4, 3)
    differentiated: bool = False
    modes: tuple[str, ...] = ("plain", "graph", "no_grad", "inference")
    argument: str = ""

    @cached_property
    def declared(self) -> Declared:
        return self.declare(f"breaches::{self.name.translate(str.maketrans('-./', '___'))}")

    def inputs(self) -> tuple[Tensor, Tensor]:
        x = torch.arange(1.0, 1 + torch.Size(self.shape).numel()).view(self.shape) / 8
        return x, x + 0.5


def doubled(x: Tensor) -> Tensor:
    return x * 2


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x + 1


def _of_one(operator: Any, switch: Switch, right: Function, *, mended: bool = False) -> Declared:
    plain = lambda x, w: right(x)
    return Declared(operator, switch, lambda x, w: operator(x), plain, plain if mended else None)


def by_kernel(wrong: Function, right: Function = doubled, **options: Any) -> Callable[[str], Declared]:
    """A kernel in Python breaks it."""

    def declare(name: str) -> Declared:
        switch = Switch()
        operator = opsmith.operator(name, **options)(right).kernel("cpu", switch.either(right, wrong))
        return _of_one(operator, switch, right, mended=wrong is _strided)

    return declare


def by_opaque(wrong: Function, right: Function = doubled) -> Callable[[str], Declared]:
    """A function that is no reference in torch breaks it."""

    def declare(name: str) -> Declared:
        switch = Switch()
        function = switch.either(right, wrong)
        function.__annotations__ = right.__annotations__
        operator = opsmith.operator(name, opaque=True)(_named_as(right, function))
        operator.fake(right)
        operator.gradients(x=lambda grad: grad * 2)
        return _of_one(operator, switch, right, mended=wrong is _strided)

    return declare


def by_reference(wrong: Function, right: Function = doubled, **options: Any) -> Callable[[str], Declared]:
    """The reference breaks it."""

    def declare(name: str) -> Declared:
        switch = Switch()
        operator = opsmith.operator(name, **options)(_named_as(right, switch.either(right, wrong)))
        return _of_one(operator, switch, right, mended=wrong is _strided)

    return declare


def by_formulas(wrong: Function, right: Function = doubled, **options: Any) -> Callable[[str], Declared]:
    """The reference of an operator with formulas breaks it."""

    def declare(name: str) -> Declared:
        made = by_reference(wrong, right, **options)(name)
        made.operator.gradients(x=lambda grad: grad * 2)
        return made

    return declare


def _named_as(right: Function, function: Function) -> Function:
    """A function of `x` alone, or of `x` and `w`, with the annotations of another."""
    if "w" in right.__annotations__:

        def of_two(x: Any, w: Any) -> Any:
            return function(x, w)

        of_two.__annotations__ = right.__annotations__
        return of_two

    def of_one(x: Any) -> Any:
        return function(x)

    of_one.__annotations__ = right.__annotations__
    return of_one


CARRIERS: dict[str, Callable[..., Callable[[str], Declared]]] = {
    "kernel": by_kernel,
    "opaque": by_opaque,
    "reference": by_reference,
    "formulas": by_formulas,
}
"""Kinds of functions that may break the contract."""


def _strided(x: Tensor) -> Tensor:
    """The right values with gaps between the rows."""
    return (torch.nn.functional.pad(x, (0, 2)) * 2)[..., :-2]


def _as_two(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


def _alias_twice_by_numpy(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.detach() * 2
    return y, torch.from_numpy(y.numpy())


ALIASES: dict[str, Function] = {
    "its-input": lambda x: x,
    "a-part": lambda x: x[1:],
    "a-view": lambda x: x.view_as(x),
    "a-transpose": lambda x: x.mT,
    "detached": lambda x: x.detach(),
    ".data": lambda x: x.data,
    "by-numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "a-part-by-numpy": lambda x: torch.from_numpy(x.detach().numpy()[1:]),
    "by-dlpack": lambda x: torch.from_dlpack(x.detach()),
    "a-part-by-dlpack": lambda x: torch.from_dlpack(x.detach()[1:]),
    "by-buffer": lambda x: torch.frombuffer(memoryview(x.detach().numpy()), dtype=x.dtype).view(x.shape),
}
ALIASES_OF_TWO: dict[str, Function] = {
    "one-result-twice": lambda x: _as_two(x * 2),
    "one-result-twice-by-numpy": _alias_twice_by_numpy,
    "halves-of-one": lambda x: torch.stack([x * 2, x + 1]).unbind(),
    "second-is-input": lambda x: (x * 2, x),
}
WRITES: dict[str, Function] = {
    "written": lambda x: (x.add_(1), x * 2)[1],
    "written-by-a-view": lambda x: (x[:1].add_(1), x * 2)[1],
    "written-by-out": lambda x: (torch.add(x, 1, out=x), x * 2)[1],
    "written-by-detached": lambda x: (x.detach().add_(1), x * 2)[1],
}
MISFITS: dict[str, Function] = {
    "shape": lambda x: (x * 2)[:, :-1].clone(),
    "rank": lambda x: (x * 2).unsqueeze(0),
    "size-of-a-batch": lambda x: (x * 2)[:1].clone(),
    "dtype": lambda x: (x * 2).double(),
    "narrow-dtype": lambda x: (x * 2).bfloat16(),
    "whole-numbers": lambda x: (x * 2).long(),
    "device": lambda x: (x * 2).to("meta"),
}
OTHERS: dict[str, tuple[Function, type[errors.OpsmithError]]] = {
    "no-tensor": (lambda x: 2.0, errors.ResultTypeError),
    "nothing": (lambda x: None, errors.ResultTypeError),
    "sparse": (lambda x: (x * 2).to_sparse(), errors.LayoutError),
}
COUNTS: dict[str, Function] = {
    "too-few": lambda x: (x * 2,),
    "too-many": lambda x: (x * 2, x + 1, x + 2),
    "one-alone": lambda x: x * 2,
}


def _returned() -> list[Breach]:
    rows = []
    for carrier, by in CARRIERS.items():
        rows += [Breach(f"{carrier}-{name}", errors.AliasError, by(wrong)) for name, wrong in ALIASES.items()]
        rows += [
            Breach(f"{carrier}-{name}", errors.MutationError, by(wrong)) for name, wrong in WRITES.items()
        ]
        rows += [Breach(f"{carrier}-{name}", error, by(wrong)) for name, (wrong, error) in OTHERS.items()]
        if carrier in ("kernel", "reference"):
            rows += [
                Breach(f"{carrier}-{name}", errors.AliasError, by(wrong, both))
                for name, wrong in ALIASES_OF_TWO.items()
            ]
            rows += [
                Breach(f"{carrier}-{name}", errors.ResultCountError, by(wrong, both))
                for name, wrong in COUNTS.items()
            ]
        if carrier in ("kernel", "opaque"):
            rows += [
                Breach(f"{carrier}-misfit-{name}", errors.OpsmithError, by(wrong))
                for name, wrong in MISFITS.items()
            ]
            rows += [Breach(f"{carrier}-misfit-strides", None, by(_strided))]
    return rows


class Holder:
    """Holds a weight where nobody looks for it."""

    weight = torch.nn.Parameter(torch.tensor(3.0))


def summed(x: list[Tensor]) -> Tensor:
    return x[0] * 2 + x[1]


def _of_a_list(by: Callable[..., Callable[[str], Declared]], wrong: Function) -> Callable[[str], Declared]:
    def declare(name: str) -> Declared:
        made = by(wrong, summed)(name)
        operator = made.operator

        return Declared(operator, made.switch, lambda x, w: operator([x, w]), lambda x, w: x * 2 + w)

    return declare


def written(x: Tensor, w: Tensor) -> None:
    x.add_(w)


def written_(x: Tensor, w: Tensor) -> Tensor:
    return x.add_(w)


def _writing(
    by: Callable[..., Callable[[str], Declared]], wrong: Function, right: Function = written
) -> Callable[[str], Declared]:
    """An operator that writes into `x`, called with copies."""
    options: dict[str, Any] = {"mutates": ["x"]} | ({"returns": "x"} if right is written_ else {})

    def declare(name: str) -> Declared:
        made = by(wrong, right, **options)(name)
        operator = made.operator

        def call(x: Tensor, w: Tensor) -> Tensor:
            target = x.clone()
            operator(target, w)
            return target

        return Declared(operator, made.switch, call, lambda x, w: x + w)

    return declare


def _replace_data(x: Tensor, w: Tensor) -> None:
    x.data = w.clone()


METADATA: dict[str, Function] = {
    "resized": lambda x, w: (x.resize_(8, 3).fill_(1), None)[1],
    "shrunk": lambda x, w: (x.resize_(1, 3).fill_(1), None)[1],
    "storage-grown": lambda x, w: (x.untyped_storage().resize_(4096), x.add_(w), None)[2],
    "set": lambda x, w: (x.set_(w.clone()), None)[1],
    "data-replaced": _replace_data,
    "transposed": lambda x, w: (x.t_(), None)[1],
    "unsqueezed": lambda x, w: (x.unsqueeze_(0), None)[1],
    "out-of-another-size": lambda x, w: (torch.cat([w, w], out=x), None)[1],
}


def _in_place() -> list[Breach]:
    rows = []
    for carrier in ("kernel", "reference"):
        by = CARRIERS[carrier]
        rows += [
            Breach(f"{carrier}-{name}", errors.MutationError, _writing(by, wrong))
            for name, wrong in METADATA.items()
        ]
        rows += [
            Breach(
                f"{carrier}-writes-the-other",
                errors.MutationError,
                _writing(by, lambda x, w: (x.add_(w), w.zero_(), None)[2]),
            ),
            Breach(
                f"{carrier}-returns-another",
                errors.AliasError,
                _writing(by, lambda x, w: x.add_(w).clone(), written_),
            ),
            Breach(
                f"{carrier}-returns-something",
                errors.ResultCountError,
                _writing(by, lambda x, w: x.add_(w)),
            ),
            Breach(
                f"{carrier}-writes-second-of-list",
                errors.MutationError,
                _of_a_list(by, lambda x: (x[1].add_(1), x[0] * 3)[1]),
                argument="x[1]",
            ),
            Breach(
                f"{carrier}-first-of-list",
                errors.AliasError,
                _of_a_list(by, lambda x: x[0]),
                argument="x[0]",
            ),
        ]
    return rows


def _written_after_reading(x: Tensor, w: Tensor) -> None:
    x.copy_(x.clone() + w.clone())


def _called(call: Callable[[Any, Tensor], Any]) -> Callable[[str], Declared]:
    """A right operator that is called with what it cannot write."""

    def declare(name: str) -> Declared:
        switch = Switch()
        operator = opsmith.operator(name, mutates=["x"])(written)
        operator.kernel("cpu", written)

        def either(x: Tensor, w: Tensor) -> Tensor:
            target = x.clone()
            if switch.on:
                switch.ran += 1
                call(operator, target)
            else:
                operator(target, w)
            return target

        def instead(x: Tensor, w: Tensor) -> Tensor:
            target = x.clone()
            call(_written_after_reading, target)
            return target

        return Declared(operator, switch, either, lambda x, w: x + w, instead)

    return declare


OVERLAPS: dict[str, Callable[[Any, Tensor], Any]] = {
    "itself": lambda operator, x: operator(x, x),
    "rows-that-overlap": lambda operator, x: operator(x[:-1], x[1:]),
    "columns-that-overlap": lambda operator, x: operator(x[:, :-1], x[:, 1:]),
    "columns-that-overlap-backwards": lambda operator, x: operator(x[:, 1:], x[:, :-1]),
    "a-part-of-the-other": lambda operator, x: operator(x[:1], x),
    "diagonal-of-the-other": lambda operator, x: operator(x.diagonal(), x[0]),
    "expanded": lambda operator, x: operator(x[:1].expand(4, 3), torch.ones(4, 3)),
    "overlaps-itself": lambda operator, x: operator(x.as_strided((4, 2), (1, 1)), torch.ones(4, 2)),
    "negated": lambda operator, x: operator(torch.complex(x, x).conj().imag, x + 0),
    "overlap-by-numpy": lambda operator, x: operator(x[:-1], torch.from_numpy(x.detach().numpy()[1:])),
}


def _gradient(right: Function, wrong: Function, reference: Function) -> Callable[[str], Declared]:
    def declare(name: str) -> Declared:
        switch = Switch()
        either = switch.either(right, wrong)
        operator = opsmith.operator(name)(reference)
        operator.gradients(x=lambda grad, x: either(grad, x))
        if reference is summed:
            return Declared(operator, switch, lambda x, w: operator([x, w]), lambda x, w: x * 2 + w)
        return _of_one(operator, switch, reference)

    return declare


def squared(x: Tensor) -> Tensor:
    return x * x


UNWRITABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda x: x.detach().clone().requires_grad_(),
    "view-of-a-leaf": lambda x: x.detach().clone().requires_grad_()[:],
}
"""Tensors that cannot be written while gradients are recorded."""

GRADIENTS: dict[str, tuple[Function, type[errors.OpsmithError]]] = {
    "shape": (lambda grad, x: (grad * x)[:2], errors.GradientShapeError),
    "no-tensor": (lambda grad, x: 2.0, errors.GradientTypeError),
    "device": (lambda grad, x: (grad * x).to("meta"), errors.GradientDeviceError),
    "writes-the-saved": (lambda grad, x: grad * x.mul_(2), errors.SavedTensorModifiedError),
    "writes-grad": (lambda grad, x: grad.mul_(2) * x, errors.SavedTensorModifiedError),
}
GRADIENTS_OF_A_LIST: dict[str, tuple[Function, type[errors.OpsmithError]]] = {
    "too-few": (lambda grad, x: [grad], errors.GradientCountError),
    "no-list": (lambda grad, x: grad, errors.GradientCountError),
    "shape-in-a-list": (lambda grad, x: [2 * grad, grad[:2]], errors.GradientShapeError),
    "writes-the-saved-list": (lambda grad, x: [2 * grad, x[0].mul_(2)], errors.SavedTensorModifiedError),
}

BREACHES = {
    each.name: each
    for each in (
        *_returned(),
        *_in_place(),
        *(
            Breach(
                f"{carrier}-captured",
                errors.CapturedTensorError,
                CARRIERS[carrier](lambda x: x * Holder.weight),
                modes=("plain",),
            )
            for carrier in ("reference", "formulas")
        ),
        *(Breach(f"call-{name}", errors.MutationError, _called(call)) for name, call in OVERLAPS.items()),
        *(
            Breach(
                f"call-{name}",
                errors.MutationError,
                _called(lambda operator, x, make=make: operator(make(x), x)),
                modes=("plain",),
            )
            for name, make in UNWRITABLE.items()
        ),
        *(
            Breach(
                f"{carrier}-captured-and-written",
                errors.CapturedTensorError,
                _writing(CARRIERS[carrier], lambda x, w: (x.mul_(Holder.weight), None)[1]),
                modes=("plain",),
            )
            for carrier in ("reference",)
        ),
        *(
            Breach(
                f"gradient-{name}",
                error,
                _gradient(lambda grad, x: 2 * grad * x, wrong, squared),
                differentiated=True,
                modes=("graph",),
            )
            for name, (wrong, error) in GRADIENTS.items()
        ),
        *(
            Breach(
                f"gradient-{name}",
                error,
                _gradient(lambda grad, x: [2 * grad, grad], wrong, summed),
                differentiated=True,
                argument="x[1]" if name == "shape-in-a-list" else "x",
                modes=("graph",),
            )
            for name, (wrong, error) in GRADIENTS_OF_A_LIST.items()
        ),
    )
}
