"""Decompositions of composite torch operations, so that their terms can be distinguished.

Each formula is the textbook's. It is used only where it equals the operation on the given arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.judging.compare import all_close

NAMED = 1e-9
"""Relative difference up to which a number has a name, or an operation a formula."""


def decomposition(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Tensor] | None:
    """Return a composite operation's formula on its arguments; None where none applies.

    Args:
        operation: Operation as a function of torch.
        args: Positional arguments.
        kwargs: Keyword arguments. An in-place operation has no formula, since it would write into the
            arguments.
    """
    formula = FORMULAS.get(operation)
    if formula is None:
        return None
    given = {
        name: value
        for name, value in kwargs.items()
        if value is not None and name != "_stacklevel" and (name, value) != ("inplace", False)
    }
    ready = partial(formula, *args, **given)
    try:
        with torch.no_grad():
            composed = ready()  # first: if it rejects the arguments, an operation in place is not run
            right = operation(*args, **kwargs)
            same = all_close(composed, right, NAMED * right.abs())
    except (TypeError, RuntimeError):  # arguments that the formula does not support
        return None
    return ready if same else None


def _softmax(x: Tensor, dim: int) -> Tensor:
    e = (x - x.detach().amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int) -> Tensor:
    return x - torch.logsumexp(x, dim, keepdim=True)


def _var(
    x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1
) -> Tensor:
    centred = x - (x.mean() if dim is None else x.mean(dim, keepdim=True))
    total = (centred * centred).sum() if dim is None else (centred * centred).sum(dim, keepdim=keepdim)
    return total / (x.numel() / total.numel() - (correction if unbiased else 0))


def _std(
    x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: int = 1
) -> Tensor:
    return _var(x, dim, unbiased, keepdim, correction=correction).sqrt()


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    rstd = ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()
    return _affine(centred * rstd, weight, bias)


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = ((x * x).mean(dims, keepdim=True) + small).rsqrt()
    return _affine(x * rstd, weight, None)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    rstd = ((centred * centred).mean(-1, keepdim=True) + eps).rsqrt()
    channels = [-1, *[1] * (x.dim() - 2)]
    scaled = (centred * rstd).reshape(x.shape)
    return _affine(scaled, *(None if each is None else each.reshape(channels) for each in (weight, bias)))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner: Tensor = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + inner.tanh())
    return 0.5 * x * (1 + (x / 2**0.5).erf())


def _mish(x: Tensor) -> Tensor:
    gate: Tensor = F.softplus(x).tanh()
    return x * gate


def _normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, p, dim, keepdim=True)
    return x / norm.clamp_min(eps)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    product = (x1 * x2).sum(dim)
    norms: Tensor = torch.linalg.vector_norm(x1, dim=dim) * torch.linalg.vector_norm(x2, dim=dim)
    return product / norms.clamp_min(eps)


def _square(x: Tensor) -> Tensor:
    return x * x


def _lerp(start: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    return start + weight * (end - start)


def _attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return _softmax(scores, -1) @ value


FORMULAS: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        F.softmax: _softmax,
        torch.softmax: _softmax,
        Tensor.softmax: _softmax,
        F.log_softmax: _log_softmax,
        torch.log_softmax: _log_softmax,
        Tensor.log_softmax: _log_softmax,
        torch.var: _var,
        Tensor.var: _var,
        torch.std: _std,
        Tensor.std: _std,
        F.layer_norm: _layer_norm,
        F.rms_norm: _rms_norm,
        F.group_norm: _group_norm,
        F.silu: _silu,
        F.gelu: _gelu,
        F.mish: _mish,
        F.normalize: _normalize,
        F.cosine_similarity: _cosine_similarity,
        torch.square: _square,
        Tensor.square: _square,
        torch.lerp: _lerp,
        Tensor.lerp: _lerp,
        F.scaled_dot_product_attention: _attention,
    }
)
"""Formula of each composite operation, with parameters of the same names."""
