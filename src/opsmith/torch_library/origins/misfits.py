"""Errors for a forward that returns or writes something else than its class was adopted with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opsmith import errors
from opsmith.core.call_arguments import shown
from opsmith.core.origins.function_class import AdoptedFunction, StructureMismatchError


def late_structure(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that returns another structure after it has written."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` returned something else than in earlier runs, after it had written into "
        f"`{name}`",
        argument=name,
        hint='declare what it may return: `signature="(x: Tensor) -> tuple[Tensor, Tensor | None]"`',
    )


def other_marks(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that marks an argument in some calls, chosen by no flag."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` marks `{name}` as dirty in some calls and not in others, and no flag "
        "chooses it",
        argument=name,
        hint="let a bool or a text among the arguments choose it; or let it work on copies: `mutates=()`",
    )


def unmarked_write(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that writes into an argument and does not mark it any more."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` wrote into `{name}` and did not mark it as dirty, as in earlier runs",
        argument=name,
        hint=f"let it call `ctx.mark_dirty({name})` wherever it writes into it",
    )


def late_write(adopted: AdoptedFunction, name: str) -> errors.MutationError:
    """Return the error for a forward that writes where earlier runs did not."""
    return adopted.error(
        errors.MutationError,
        f"`{adopted.name}.forward` wrote into an input into which earlier runs did not write",
        argument=name,
        hint="let it write in every call or in none: `x = x.clone()` before the first in-place operation",
    )


def other_count(adopted: AdoptedFunction, mismatch: StructureMismatchError) -> errors.ResultCountError:
    """Return the error for a forward that returns another number of results."""
    value, outputs = mismatch.value, mismatch.outputs
    return adopted.error(
        errors.ResultCountError,
        f"`{adopted.name}.forward` returned another number of results than it was adopted with",
        expected=f"a tuple of {len(outputs) if isinstance(outputs, tuple) else 1}",
        got=f"{len(value)}" if isinstance(value, tuple | list) else shown(value),
        hint='say what it returns: `adopt(..., signature="(x: Tensor) -> tuple[Tensor, Tensor]")`',
    )


def other_write(
    adopted: AdoptedFunction, name: str | None, written: str | None, marked: Collection[str]
) -> errors.ResultTypeError:
    """The error for a class that writes into other arguments than it was adopted with.

    Args:
        adopted: The class.
        name: Name of the argument that it returned as a result, marked as dirty.
        written: Name of the argument that it should have returned there.
        marked: Names of all arguments that it marked as dirty.
    """
    new, copies = adopted.schema.new_values, "or let it work on copies: `mutates=()`"
    moved = next((each for each in (written, name) if each in marked and each in new), None)
    if moved is not None:
        problem = f"returns `{moved}` at another position than it was adopted with"
        hint = f"let it return `{moved}` at one position, whatever its flags are; {copies}"
    else:
        problem = "marks other arguments as dirty than it was adopted with: this needs a declaration"
        if name is not None and not set(new) <= set(marked):
            hint = (
                "a flag chooses whether an argument is written, not which: adopt one class for each; "
                + copies
            )
        elif name is not None:
            hint = f'call it once before it is traced, or declare it: `adopt(..., mutates=("{name}",))`'
        else:
            hint = "call it once before it is traced, or call its form `.functional` where it does not write"
    return adopted.error(
        errors.ResultTypeError,
        f"`{adopted.name}.forward` {problem}",
        argument=moved or name or written,
        expected="a new tensor" if written is None else f"`{written}`, marked as dirty",
        got="a new tensor" if name is None else f"`{name}`, marked as dirty",
        hint=hint,
    )


def other_result(adopted: AdoptedFunction, position: int | None, value: Any) -> errors.ResultTypeError:
    """Return the error for a forward that returns a value of another type."""
    return adopted.error(
        errors.ResultTypeError,
        f"`{adopted.name}.forward` returned something else than it was adopted with",
        argument=None if position is None else adopted.schema.results[position].name,
        expected="None" if position is None else "Tensor",
        got=shown(value),
        hint='say what it returns: `samples=`, or `signature="(x: Tensor) -> tuple[Tensor, Tensor | None]"`; '
        "results are tensors: of a number, return `torch.as_tensor(...)`",
    )
