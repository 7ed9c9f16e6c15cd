"""Decompositions of composite torch operations, so that their terms can be distinguished.

Each formula is from textbooks. It is used only if it equals the operation on the given arguments.
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
"""Largest relative difference between a number and a named constant, or an operation and its formula."""


def decomposition(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Tensor] | None:
    """Return a composite operation's formula on its arguments; None if there is none.

    Args:
        operation: Operation as a function of torch.
        args: Positional arguments.
        kwargs: Keyword arguments. An in-place operation has no formula, since it would write into the
            arguments.
    """
    formula = FORMULAS.get(getattr(operation, "__name__", ""))
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
            composed = ready()  # first: it may reject the arguments
            right = operation(*args, **kwargs)
            same = all_close(composed, right, NAMED * right.abs())
    except (TypeError, RuntimeError):  # the formula does not support the arguments
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
    centred = x - x.mean(dim, keepdim=True)
    total = (centred * centred).sum(dim, keepdim=keepdim)
    return total / (x.numel() / total.numel() - (correction if unbiased else 0))


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    return _affine(_standardised(x - x.mean(dims, keepdim=True), dims, eps), weight, bias)


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    return _affine(_standardised(x, dims, torch.finfo(x.dtype).eps if eps is None else eps), weight, None)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    scaled = _standardised(grouped - grouped.mean(-1, keepdim=True), (-1,), eps).reshape(x.shape)
    channels = [-1, *[1] * (x.dim() - 2)]
    return _affine(scaled, *(None if each is None else each.reshape(channels) for each in (weight, bias)))


def _standardised(centred: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    rstd = ((centred * centred).mean(dims, keepdim=True) + eps).rsqrt()
    return centred * rstd


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, p, dim, keepdim=True)
    return x / norm.clamp_min(eps)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    product = (x1 * x2).sum(dim)
    norms: Tensor = torch.linalg.vector_norm(x1, dim=dim) * torch.linalg.vector_norm(x2, dim=dim)
    return product / norms.clamp_min(eps)


def _attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return _softmax(scores, -1) @ value


FORMULAS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "softmax": _softmax,
        "log_softmax": _log_softmax,
        "var": _var,
        "std": lambda *args, **kwargs: _var(*args, **kwargs).sqrt(),
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "group_norm": _group_norm,
        "silu": lambda x: x * x.sigmoid(),
        "gelu": lambda x: 0.5 * x * (1 + (x / 2**0.5).erf()),
        "mish": lambda x: x * F.softplus(x).tanh(),
        "normalize": _normalize,
        "cosine_similarity": _cosine_similarity,
        "square": lambda x: x * x,
        "lerp": lambda start, end, weight: start + weight * (end - start),
        "scaled_dot_product_attention": _attention,
    }
)
"""Formula of each composite operation, by its name in torch, with parameters of the same names."""
