"""Errors for a forward whose results or writes differ from those that its class was adopted with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opsmith import errors
from opsmith.core.call_arguments import shown
from opsmith.core.origins.function_class import AdoptedFunction, StructureMismatchError


def late_structure(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that returns a new structure after it has written."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` wrote into `{name}` and then returned results that "
        f"differ from the results of earlier runs",
        argument=name,
        hint='declare the possible results: `signature="(x: Tensor) -> tuple[Tensor, Tensor | None]"`',
    )


def other_marks(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that marks an argument in some calls, although no flag decides it."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` marks `{name}` as dirty in some calls but not in others, and no flag "
        "decides this",
        argument=name,
        hint="let a bool or a string argument decide this; or let the operator work on copies: `mutates=()`",
    )


def unmarked_write(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that writes into an argument but no longer marks it."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` wrote into `{name}` but did not mark it as dirty, unlike in earlier runs",
        argument=name,
        hint=f"let forward call `ctx.mark_dirty({name})` in each call that writes into `{name}`",
    )


def late_write(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that writes into an input into which earlier runs did not write."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` wrote into an input, but earlier runs did not write into this input",
        argument=name,
        hint="let forward always write, or never: `x = x.clone()` before the first in-place operation",
    )


def other_count(adopted: AdoptedFunction, mismatch: StructureMismatchError) -> errors.ResultCountError:
    """Return the error for a forward that returns a different number of results."""
    value, outputs = mismatch.value, mismatch.outputs
    return adopted.error(
        errors.ResultCountError,
        f"`{adopted.name}.forward` returned a different number of results than when it was adopted",
        expected=f"a tuple of {len(outputs) if isinstance(outputs, tuple) else 1}",
        got=f"{len(value)}" if isinstance(value, tuple | list) else shown(value),
        hint='declare its results: `adopt(..., signature="(x: Tensor) -> tuple[Tensor, Tensor]")`',
    )


def other_write(
    adopted: AdoptedFunction, name: str | None, written: str | None, marked: Collection[str]
) -> errors.ResultTypeError:
    """The error for a class whose written arguments differ from those it was adopted with.

    Args:
        adopted: The class.
        name: Name of the argument that it returned as a result, marked as dirty.
        written: Name of the argument that it should have returned there.
        marked: Names of all arguments that it marked as dirty.
    """
    new, copies = adopted.schema.new_values, "or let the operator work on copies: `mutates=()`"
    moved = next((each for each in (written, name) if each in marked and each in new), None)
    if moved is not None:
        problem = f"returns `{moved}` at a different position than when it was adopted"
        hint = f"let forward return `{moved}` at one position for all flags; {copies}"
    else:
        problem = "marks different arguments as dirty than when it was adopted: this needs a declaration"
        if name is not None and not set(new) <= set(marked):
            hint = (
                "a flag can decide whether an argument is written, but it cannot decide which argument is "
                "written: adopt two classes; " + copies
            )
        elif name is not None:
            hint = f'call it once before it is traced, or declare it: `adopt(..., mutates=("{name}",))`'
        else:
            hint = "call it once before it is traced, or call `.functional` if it does not write"
    return adopted.error(
        errors.ResultTypeError,
        f"`{adopted.name}.forward` {problem}",
        argument=moved or name or written,
        expected="a new tensor" if written is None else f"`{written}`, marked as dirty",
        got="a new tensor" if name is None else f"`{name}`, marked as dirty",
        hint=hint,
    )


def other_result(adopted: AdoptedFunction, position: int | None, value: Any) -> errors.ResultTypeError:
    """Return the error for a forward that returns a value of a different type."""
    return adopted.error(
        errors.ResultTypeError,
        f"`{adopted.name}.forward` returned a different result than when it was adopted",
        argument=None if position is None else adopted.schema.results[position].name,
        expected="None" if position is None else "Tensor",
        got=shown(value),
        hint='show its results: `samples=`, or `signature="(x: Tensor) -> tuple[Tensor, Tensor | None]"`; '
        "results must be tensors: for a number, return `torch.as_tensor(...)`",
    )
