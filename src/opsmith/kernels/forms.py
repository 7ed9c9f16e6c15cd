"""How an operator's results lie in memory, known before a kernel writes them: as the reference's would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.effects import run_pure


@dataclass(frozen=True, slots=True)
class Form:
    """How a result lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def forms_of(specification: Specification, values: Sequence[Any]) -> tuple[Form, ...]:
    """The forms of the results for these argument values, by the fake kernel or the reference.

    They run on `meta` tensors, and on torch's stand-ins where they make tensors of their own: those know
    of devices, and take seconds to import.

    Raises:
        MissingFakeError: If the forms depend on what is in the tensors.
    """
    try:
        return _run(specification, values, _meta)
    except errors.OpsmithError:
        raise
    except Exception as error:
        mode = capabilities.fake_mode()
        try:
            with mode:
                return _run(specification, values, mode.from_tensor)
        except errors.OpsmithError:
            raise
        except Exception:
            raise errors.MissingFakeError(
                "what its results are like cannot be told before a kernel in C++ runs: the reference "
                f"needs data for it ({type(error).__name__})",
                operator=specification.name,
                where=specification.where,
                mend="write `@op.fake` over a function that returns `x.new_empty(shape)` for each result",
            ) from error


def _run(
    specification: Specification, values: Sequence[Any], stand_in: Callable[[Tensor], Tensor]
) -> tuple[Form, ...]:
    def formed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [formed(item) for item in value]
        return stand_in(value) if isinstance(value, Tensor) else value

    with torch.no_grad():
        results = run_pure(
            specification, specification.fake or specification.computed_by, [formed(each) for each in values]
        )
    return tuple(Form(tuple(each.shape), each.stride(), each.dtype) for each in results)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
