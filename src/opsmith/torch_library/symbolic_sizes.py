"""Code of the author on symbolic sizes: values that Python computes from a symbol stay symbolic.

`torch.compile` interprets a plain function, and records `math.sqrt(n)`, `len(x)` or `float(n)` as an
operation on the symbol. But Python runs the code of an operator, with symbols in place of numbers. It would
turn symbols into numbers, so that compiled code would work for only one size, and `isinstance(n, int)` would
be false.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.core.call_arguments import tensors_in
from opsmith.torch_library import capabilities

if TYPE_CHECKING:  # imported with the first symbol
    from opsmith.core.substitution import Substitution

_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""Type of the number that a symbol represents."""


def for_symbolic_sizes(function: Callable[..., Any], values: Iterable[Any]) -> Callable[..., Any]:
    """The author's function, or, if it is traced, a copy that keeps symbols.

    Args:
        function: A reference, fake kernel, formula, or method of an adopted class.
        values: The values that it will be called with.
    """
    if torch.compiler.is_dynamo_compiling() or not _traced(list(values)):
        return function
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return _substitution("" if package == "opsmith" else package).copy(function)


def _traced(values: list[Any]) -> bool:
    return any(type(value) in _KINDS for value in values) or capabilities.traced(tensors_in(values))


@functools.lru_cache(maxsize=64)
def _substitution(package: str) -> Substitution:
    from opsmith.core.substitution import Substitution

    values: dict[Any, Any] = {
        math.fabs: _of_number(math.fabs, lambda number: abs(torch.sym_float(number))),
        math.pow: _power,
        len: _length,
        isinstance: _is_instance,
        divmod: _divmod,
        max: _extreme(max, torch.sym_max),
        min: _extreme(min, torch.sym_min),
        repr: _of_number(repr, lambda number: repr(_number(number))),
        torch.tensor: _tensor(torch.tensor),
        torch.as_tensor: _tensor(torch.as_tensor),
    }
    for name, symbolic in capabilities.symbolic_functions().items():
        values[getattr(math, name)] = _of_number(getattr(math, name), symbolic)
    called: dict[Any, Any] = {
        int: _of_number(int, torch.sym_int),
        float: _of_number(float, torch.sym_float),
        str: _of_number(str, lambda number: str(_number(number))),
        type: _type,
        map: lambda function, *rest: map(_substitution(package).of(function, called=True), *rest),
    }
    return Substitution(
        {id(each): replacement for each, replacement in values.items()},
        {id(each): replacement for each, replacement in called.items()},
        (math, torch),
        package,
    )


def _of_number(function: Callable[..., Any], symbolic: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function with a separate implementation for symbols."""

    def either(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) in (torch.SymInt, torch.SymFloat):
            return symbolic(args[0])
        return function(*args, **kwargs)

    return either


def _number(symbol: Any) -> Any:
    """The number of a symbol, which makes the trace constant: as text, a symbol would be its name."""
    return _KINDS[type(symbol)](symbol)


def _length(value: Any, /) -> Any:
    is_array = isinstance(value, Tensor) and value.dim() and type(value).__len__ is Tensor.__len__
    return value.shape[0] if is_array else len(value)


def _type(*args: Any, **kwargs: Any) -> Any:
    kind = _KINDS.get(type(args[0])) if len(args) == 1 and not kwargs else None
    return type(*args, **kwargs) if kind is None else kind


def _is_instance(value: Any, kinds: Any, /) -> bool:
    kind = _KINDS.get(type(value))
    return isinstance(value, kinds) or (kind is not None and issubclass(kind, kinds))


def _divmod(number: Any, divisor: Any, /) -> Any:
    if type(number) in _KINDS or type(divisor) in _KINDS:
        return number // divisor, number % divisor
    return divmod(number, divisor)


def _power(base: Any, exponent: Any, /) -> Any:
    if type(base) in _KINDS or type(exponent) in _KINDS:
        return torch.sym_float(base) ** torch.sym_float(exponent)
    return math.pow(base, exponent)


def _extreme(function: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`max` or `min` without a comparison of symbols, on which the trace would depend."""

    def extreme(*args: Any, **kwargs: Any) -> Any:
        numbers = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
        kinds = {_KINDS.get(type(number), type(number)) for number in numbers}
        symbols = any(type(number) in _KINDS for number in numbers)
        if kwargs or not symbols or not kinds <= {int, float}:
            return function(*args, **kwargs)
        return functools.reduce(symbolic, numbers)

    return extreme


def _tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor`, with a symbol as a scalar of the graph."""

    def tensor(data: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if type(data) in (torch.SymInt, torch.SymFloat) and not args:
            inferred = torch.int64 if type(data) is torch.SymInt else torch.get_default_dtype()
            return torch.scalar_tensor(data, dtype=dtype or inferred, **kwargs)
        if isinstance(data, tuple | list) and data and not args and _holds_symbol(data):
            rows = [tensor(each, **kwargs) for each in data]
            stacked = torch.stack(
                [row.to(functools.reduce(torch.promote_types, [r.dtype for r in rows])) for row in rows]
            )
            return stacked if dtype is None else stacked.to(dtype)
        return make(data, *args, dtype=dtype, **kwargs)

    return tensor


def _holds_symbol(data: Any) -> bool:
    if isinstance(data, tuple | list):
        return any(map(_holds_symbol, data))
    return type(data) in _KINDS
