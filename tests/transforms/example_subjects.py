"""The operators of examples/, each beside a plain function: its reference, or one that torch transforms."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from transform_subjects import Subject

_FOLDER = Path(__file__).resolve().parents[2] / "examples"


def _load(stem: str) -> ModuleType:
    """An example, under the name that every test loads it by: what is declared again replaces itself."""
    specification = importlib.util.spec_from_file_location(f"example_{stem}", _FOLDER / f"{stem}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module


_add_constant = _load("add_constant").add_constant
_bessel = _load("numpy_routine").bessel
_binarize = _load("straight_through").binarize
_layer_norm = _load("layer_norm").layer_norm
_linear = _load("quick_start").linear
_transpose = _load("transpose").transpose
DROPOUT = _load("dropout").dropout
"""It draws random numbers: what is compared with it has to draw the same."""


def _bessel_series(x: Tensor) -> Tensor:
    """J0 by its power series, which converges fast for |x| < 3 (DLMF 10.2.2)."""
    term = total = torch.ones_like(x)
    for k in range(1, 25):
        term = -term * (x / (2 * k)) ** 2
        total = total + term
    return total


def _surrogate_sign(x: Tensor) -> Tensor:
    """The sign, with the gradient of `clamp`."""
    smooth = x.clamp(-1, 1)
    return smooth + (_binarize.reference(x) - smooth).detach()


EXAMPLES = [
    Subject("add_constant", lambda x: _add_constant(x, 2.0), lambda x: x + 2.0, ((2, 3),)),
    Subject("bessel", _bessel, _bessel_series, ((3,),)),
    Subject("binarize", _binarize, _surrogate_sign, ((2, 3),)),
    Subject(
        "layer_norm", _layer_norm, lambda *inputs: _layer_norm.reference(*inputs)[0], ((2, 3), (3,), (3,))
    ),
    Subject("linear", _linear, _linear.reference, ((4, 3), (2, 3), (2,))),
    Subject("transpose", lambda x: _transpose(x, 0, 1), lambda x: x.mT, ((2, 3),)),
]
