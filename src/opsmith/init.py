"""Initialisers of parameters: short forms of `torch.nn.init`, as values that can be compared and printed.

An initialiser is any callable that fills a given tensor in place: a function of this module, a function of
`torch.nn.init` whose name ends in `_`, a `functools.partial` of such a function, or your own function.

Example:
    >>> import torch
    >>> opsmith.init.constant(2.0)(torch.empty(3))
    tensor([2., 2., 2.])
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from opsmith import errors

__all__ = [
    "Initializer",
    "constant",
    "kaiming_normal",
    "kaiming_uniform",
    "normal",
    "ones",
    "orthogonal",
    "trunc_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]


@dataclass(frozen=True, slots=True)
class Initializer:
    """A function of `torch.nn.init` and its arguments; a call fills a tensor in place, and returns it.

    Args:
        function: The function's name, without its last `_`.
        arguments: Names and values of its arguments, in order.

    Example:
        >>> opsmith.init.Initializer("constant", (("val", 1.5),))(torch.empty(2))
        tensor([1.5000, 1.5000])
    """

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fill a tensor."""
        filled: Tensor = getattr(torch.nn.init, f"{self.function}_")(tensor, **dict(self.arguments))
        return filled

    def __repr__(self) -> str:
        if not self.arguments:
            return self.function
        return f"{self.function}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"


def _of(function: str, **arguments: Any) -> Initializer:
    """Make an initialiser.

    Raises:
        UsageError: If an argument has the wrong type: a name must be a string, any other argument a number.
    """
    for name, value in arguments.items():
        is_name = name in ("mode", "nonlinearity")
        if isinstance(value, Tensor):
            continue  # `init.uniform` without a call got the parameter: the module refuses that
        if isinstance(value, bool) or not isinstance(value, str if is_name else Real):
            raise errors.UsageError(
                f"`init.{function}` takes a {'name' if is_name else 'number'} as `{name}`",
                argument=name,
                expected="a string" if is_name else "a number",
                got=repr(value),
                hint=f"leave `{name}` out, or give a {'string' if is_name else 'number'}",
            )
    return Initializer(function, tuple(arguments.items()))


zeros = _of("zeros")
ones = _of("ones")


def constant(val: float) -> Initializer:
    """Fill with one number.

    Example:
        >>> opsmith.init.constant(0.5)
        constant(val=0.5)
    """
    return _of("constant", val=val)


def uniform(a: float = 0.0, b: float = 1.0) -> Initializer:
    """Fill with numbers from the uniform distribution on [a, b).

    Example:
        >>> opsmith.init.uniform(-0.1, 0.1)
        uniform(a=-0.1, b=0.1)
    """
    return _of("uniform", a=a, b=b)


def normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Fill with numbers from the normal distribution.

    Example:
        >>> opsmith.init.normal(std=0.02)
        normal(mean=0.0, std=0.02)
    """
    return _of("normal", mean=mean, std=std)


def trunc_normal(mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Initializer:
    """Fill with numbers from the normal distribution, drawn again until they are in [a, b].

    Example:
        >>> opsmith.init.trunc_normal(std=0.02)
        trunc_normal(mean=0.0, std=0.02, a=-2.0, b=2.0)
    """
    return _of("trunc_normal", mean=mean, std=std, a=a, b=b)


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Fill from a uniform distribution scaled by the number of inputs and outputs; two dimensions or more.

    Source: X. Glorot, Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010, equation 16.

    Example:
        >>> opsmith.init.xavier_uniform()
        xavier_uniform(gain=1.0)
    """
    return _of("xavier_uniform", gain=gain)


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Fill from the normal distribution with the variance of `xavier_uniform`.

    Example:
        >>> opsmith.init.xavier_normal(gain=2.0)
        xavier_normal(gain=2.0)
    """
    return _of("xavier_normal", gain=gain)


def kaiming_uniform(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Fill from a uniform distribution scaled by the number of inputs and the activation that follows.

    Source: K. He et al., "Delving Deep into Rectifiers", arXiv:1502.01852, equation 15.

    Args:
        a: Slope of a leaky ReLU for negative numbers.
        mode: `fan_in` keeps the variance in the forward, `fan_out` in the backward.
        nonlinearity: Name of the activation, as `torch.nn.init.calculate_gain` takes it.

    Example:
        >>> opsmith.init.kaiming_uniform(nonlinearity="relu")
        kaiming_uniform(a=0.0, mode='fan_in', nonlinearity='relu')
    """
    return _of("kaiming_uniform", a=a, mode=mode, nonlinearity=nonlinearity)


def kaiming_normal(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Fill from the normal distribution with the variance and the arguments of `kaiming_uniform`.

    Example:
        >>> opsmith.init.kaiming_normal(mode="fan_out")
        kaiming_normal(a=0.0, mode='fan_out', nonlinearity='leaky_relu')
    """
    return _of("kaiming_normal", a=a, mode=mode, nonlinearity=nonlinearity)


def orthogonal(gain: float = 1.0) -> Initializer:
    """Fill with a matrix whose rows or columns are orthogonal; two dimensions or more.

    Example:
        >>> opsmith.init.orthogonal()
        orthogonal(gain=1.0)
    """
    return _of("orthogonal", gain=gain)
