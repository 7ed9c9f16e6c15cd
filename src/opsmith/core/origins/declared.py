"""Origin of an operator: the questions that other modules ask, and the answers of a declared operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opsmith.core.schema import Schema

Part = Literal["forward", "gradient", "tangent", "vmap", "fake", "autocast", "onnx"]
"""Part of an operator."""

TRACED = "while tracing"
TRANSFORMED = "under a transform"
MAPPED = "under vmap"
SECOND = "in a second order"
"""Circumstances in which code of an author may not run."""


@dataclass(frozen=True)
class Own:
    """A part that an operator brought along, which opsmith does not derive.

    Args:
        label: Its name, as "backward of `Relu`".
        function: The function, where it is known.
        where: `file:line` of the function; empty where it is not known.
    """

    label: str
    function: Callable[..., Any] | None = None
    where: str = ""

    def __str__(self) -> str:
        return self.label.replace("`", "")


class Origin:
    """Origin of an operator, where its code comes from: base of all, with the answers of a declared operator.

    Attributes:
        kind: Name of the origin.
        subject: The object that was adopted: a class, or an operator of torch; None if none was.
        claims: Claims of an author of a class, keys of `KINDS`.
        devices: Device types for which it brought kernels along.
        outputs: Structure of the results of the author's own call; None if the schema has it.
        registered: True if torch knew it before it was adopted, with kernels of its own.
        casts: True if autocast follows the operator's rule; False if its own code handles autocast.
        computes_by: Name of what computes it, in messages.
        declares_random: Code by which its author declares that it draws random numbers.
        takes_samples: Hint at where samples are given; empty if they are attached to the handle.
        rule: Kind of rule that its nodes have; None for the rule of formulas.
        routes: Chooses the routes of known calls, made of a registration; None where the kernels and the
            reference compute them.
    """

    kind: Literal["declared", "class", "library"] = "declared"
    subject: Any = None
    claims: frozenset[str] = frozenset()
    devices: tuple[str, ...] = ()
    outputs: Any = None
    registered: bool = False
    casts: bool = True
    computes_by: str = "the reference"
    declares_random: str = "random=True"
    takes_samples: str = ""
    rule: Any = None
    routes: Any = None

    @property
    def referenced(self) -> bool:
        """True if a reference defines the right results."""
        return True

    @property
    def once_differentiable(self) -> bool:
        """True if its author says that its gradients have no derivative."""
        return False

    def own(self, part: Part, device: str = "") -> Own | None:
        """Return a part that it brought along; None if it has none, or none for this type of device."""
        return None

    def compute(self, reference: Callable[..., Any], *, in_place: bool) -> Callable[..., Any]:
        """Return the function for calls that no kernel takes, which writes in place or returns new values."""
        return reference

    def functional(self, schema: Schema, reference: Callable[..., Any], *, faked: bool) -> dict[str, Any]:
        """Return the fields of a specification that differ in the functional form of an operator that writes.

        Args:
            schema: Schema of the operator that writes.
            reference: Its reference.
            faked: True if its author gave a fake kernel.
        """
        return {}

    def states_type(self, argument: str) -> bool:
        """Return True if its author has written the type of an argument; calls may have shown another."""
        return True

    def runs(self, circumstance: str, *, suspected: bool = False) -> bool:
        """Return False if calls have shown that its forward does not run there, and nothing stands in.

        Args:
            circumstance: As `TRACED`.
            suspected: True if one exception is enough, which may have had another reason.
        """
        return True

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of the author's own call, from those of the operator."""
        return list(values)

    def structured(self, results: Sequence[Any]) -> Any:
        """Return the results in the structure of the author's own call."""
        return results[0] if len(results) == 1 else tuple(results)

    def sources(self) -> tuple[Any, ...]:
        """Return the functions and classes that it brought along."""
        return ()

    def methods(self, names: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return the functions that it brought along, under the names of the methods of a Function class.

        Args:
            names: Names of the operator's arguments.

        Returns:
            The methods, and the name of the argument for each parameter of forward. Forward takes a context,
            too, where `setup_context` is not among them.
        """
        return {}, names

    def notes(self, *, in_place: bool) -> Sequence[str]:
        """Return facts that calls have shown: of the operator in place, or of its functional form."""
        return ()


@dataclass(frozen=True)
class Declared(Origin):
    """Origin of an operator that was declared with opsmith."""


DECLARED = Declared()
