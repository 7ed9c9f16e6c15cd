"""A Function class under check: it is adopted under a name of its own, for the check alone."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.functions import adopt_function
from opsmith.core.location import where
from opsmith.core.operator import Operator

NAMESPACE = "checked"


def as_operator(
    function_class: type[torch.autograd.Function], samples: Callable[[], Iterable[Any]] | Iterable[Any] | None
) -> Operator[..., Any]:
    """The operator that a class is checked as; checking the class again replaces it.

    Args:
        function_class: The class.
        samples: Tuples of arguments as `apply` takes them, or a function that returns them.

    Raises:
        MissingSamplesError: If there are none.
        UsageError, ParameterKindError, UnsupportedTypeError: As of `opsmith.adopt`.
    """
    given = samples if callable(samples) else list(samples or ())
    if not given:
        name = function_class.__qualname__
        raise errors.MissingSamplesError(
            f"there are no samples to check `{name}` on",
            operator=throwaway_name(NAMESPACE, function_class),
            where=where(function_class.forward),
            mend=f"call `opsmith.check({name}, samples=[(x, 2.0)])`; `opsmith adopt FILE` guesses some",
        )
    return adopt_function(
        function_class,
        throwaway_name(NAMESPACE, function_class),
        reference=None,
        samples=given if callable(given) else lambda: given,
        signature=None,
        kind="true",
        opaque=False,
        module=__name__,
    )


def throwaway_name(namespace: str, function_class: type) -> str:
    """An operator's name for a class that is adopted for a while, the same each time.

    Example:
        >>> throwaway_name("checked", torch.autograd.Function)
        'checked::torch_autograd_function_Function_85d5be5a'
    """
    full = f"{function_class.__module__}.{function_class.__qualname__}"
    plain = re.sub(r"\W+", "_", full, flags=re.ASCII).strip("_")
    return f"{namespace}::{plain}_{zlib.crc32(full.encode()):08x}"
