"""How an operator's results lie in memory, known before a kernel writes them: as the reference's would."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith import errors
from opsmith.build.form import Form
from opsmith.core.calls import tensors_in
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.distributed import mapped
from opsmith.torch_library.effects import run_pure
from opsmith.torch_library.shape_rules import fake_by_shapes

SMALL = 2**16
"""Elements up to which the reference may run on the data themselves, instead of on `meta` tensors: the first
of those has torch import what takes it one to two seconds."""
_READS = frozenset(("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage"))
"""Methods that hand out what is in a tensor, past torch's operations."""
_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def forms_of(specification: Specification, values: Sequence[Any]) -> tuple[Form, ...]:
    """The forms of the results for these argument values, by the fake kernel, `shapes=` or the reference.

    They run on `meta` tensors, and on torch's stand-ins where they make tensors of their own: those know
    of devices, and take seconds to import. Where nothing has imported them yet, small tensors serve
    themselves, as long as what is in them is not asked.

    Raises:
        MissingFakeError: If the forms depend on what is in the tensors.
        Exception: What the reference itself raises, of arguments that it refuses.
    """
    if specification.opaque and specification.fake is None:
        by_shapes = fake_by_shapes(specification, list(values))
        if by_shapes is not None:
            return tuple(map(_form, by_shapes))
    on_data = _on_data(specification, values)
    if on_data is not None:
        return on_data
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
        except Exception as again:
            if type(again) is type(error) and str(again) == str(error) and not _of_meta(error):
                raise
            raise errors.MissingFakeError(
                "what its results are like cannot be told before a native kernel runs: the reference "
                f"needs data for it ({type(error).__name__})",
                operator=specification.name,
                where=specification.where,
                hint="write `@op.fake` over a function that returns `x.new_empty(shape)` for each result",
            ) from error


def _of_meta(error: Exception) -> bool:
    """Whether torch says that tensors on `meta` have no data.

    Its stand-ins have other words for that. Without them the same words come twice, and tell nothing.
    """
    return isinstance(error, RuntimeError) and re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None


def _on_data(specification: Specification, values: Sequence[Any]) -> tuple[Form, ...] | None:
    """The forms by a run on the tensors themselves; None where that is not to be, or does not tell."""
    large = sum(tensor.numel() for tensor in tensors_in(list(values))) > SMALL
    untold = specification.random or (specification.opaque and specification.fake is None)
    if large or untold or specification.adopted is not None or capabilities.tracing_imported():
        return None
    reads: list[Any] = []

    def see(operator: Any, _keywords: dict[str, Any]) -> None:
        if any(tag in operator.tags for tag in _DEPENDS):
            reads.append(operator)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with capabilities.watching(see), _Reads(reads):
            return _computes(specification)(*args, **kwargs)

    with torch.no_grad():
        results = run_pure(specification, watched, list(values))
    return None if reads else tuple(map(_form, results))


class _Reads(TorchFunctionMode):
    """Notes who hands out what is in a tensor."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _READS:
            self._seen.append(function)
        return function(*args, **(kwargs or {}))


def _run(
    specification: Specification, values: Sequence[Any], stand_in: Callable[[Tensor], Tensor]
) -> tuple[Form, ...]:
    with torch.no_grad():
        results = run_pure(specification, _computes(specification), mapped(stand_in, values))
    return tuple(map(_form, results))


def _computes(specification: Specification) -> Callable[..., Any]:
    return specification.fake or specification.computed_by


def _form(result: Tensor) -> Form:
    return Form(tuple(result.shape), result.stride(), result.dtype)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
