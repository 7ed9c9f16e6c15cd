"""The `vmap` method of a Function class: its own rule for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opsmith import errors
from opsmith.core.adopted import Adopted
from opsmith.core.calls import shown
from opsmith.core.outputs import MisfitError, leaves
from opsmith.core.specification import Specification


class Info(NamedTuple):
    """What a rule is told, under torch's names.

    Attributes:
        batch_size: How many examples there are.
        randomness: What `vmap` was told about random operations.
    """

    batch_size: int
    randomness: str


def has_rule(specification: Specification) -> bool:
    """Whether the operator was adopted from a class with a rule of its own."""
    return specification.adopted is not None and specification.adopted.vmap is not None


def run_rule(
    specification: Specification, info: Info, dims: Sequence[int | None], values: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Run the rule of a class.

    Args:
        specification: The operator.
        info: What the rule is told about the batch.
        dims: Batch dimension of each flat argument, or None.
        values: The arguments.

    Returns:
        The results, with a batch each or without, and where each batch lies.

    Raises:
        ResultCountError: If the rule does not return results and their dimensions.
    """
    adopted = specification.adopted
    assert adopted is not None
    assert adopted.vmap is not None
    returned = adopted.vmap(info, tuple(dims), *adopted.spread(values))
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _unfit(adopted, shown(returned))
    values, lying = returned
    if isinstance(adopted.outputs, tuple) and not isinstance(lying, tuple | list):
        lying = (lying,) * len(adopted.outputs)  # one dimension for all
    try:
        results = {i: value for i, value in leaves(adopted.outputs, values) if i is not None}
        places = {i: dim for i, dim in leaves(adopted.outputs, lying) if i is not None}
    except MisfitError as misfit:
        raise _unfit(adopted, shown(misfit.value)) from None
    order = range(len(adopted.schema.results))
    return tuple(results[i] for i in order), tuple(places[i] for i in order)


def _unfit(adopted: Adopted, got: str) -> errors.ResultCountError:
    return errors.ResultCountError(
        f"`{adopted.name}.vmap` does not return the results and their batch dimensions",
        operator=adopted.operator,
        expected="a tuple of two: what forward returns, and for each result a dimension or None",
        got=got,
        where=adopted.where,
        hint="return `(result, 0)`",
    )
