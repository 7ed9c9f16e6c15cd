"""Origin of an operator: the interface for other modules, with the values for a declared operator."""

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
SECOND = "in a second-order gradient"
"""Circumstances in which an author's code may not work."""


@dataclass(frozen=True)
class Own:
    """A part that an operator had before it was adopted, and that opsmith does not derive.

    Args:
        label: Its name, such as "backward of `Relu`".
        function: The function, if it is known.
        where: `file:line` of the function; empty if it is not known.
    """

    label: str
    function: Callable[..., Any] | None = None
    where: str = ""

    def __str__(self) -> str:
        return self.label.replace("`", "")


class Origin:
    """Origin of an operator: where its code comes from. Base class, with the values for a declared operator.

    Attributes:
        kind: Name of the origin.
        subject: The object that was adopted: a class, or an operator of torch; None if none was.
        claims: Claims of the author of a class, keys of `KINDS`.
        devices: Device types for which it already had kernels.
        outputs: Structure of the results of the author's own call; None if the schema has it.
        registered: True if torch knew it before it was adopted, with its own kernels.
        casts: True if autocast follows the operator's rule; False if its own code handles autocast.
        computes_by: Name, for messages, of the code that computes it.
        declares_random: Code by which its author declares that it draws random numbers.
        takes_samples: Hint on where to give samples; empty if they are attached to the handle.
        rule: Kind of rule that its nodes have; None for the rule of formulas.
        routes: Makes, from a registration, the choice of routes for known calls; None if the kernels and the
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
        """True if its author declares that its gradients cannot be differentiated."""
        return False

    def own(self, part: Part, device: str = "") -> Own | None:
        """Return a part that it already had; None if it had none, or none for this type of device."""
        return None

    def compute(self, reference: Callable[..., Any], *, in_place: bool) -> Callable[..., Any]:
        """Return the function for calls that no kernel takes, which writes in place or returns new values."""
        return reference

    def functional(self, schema: Schema, reference: Callable[..., Any], *, faked: bool) -> dict[str, Any]:
        """Return the fields of a specification that differ in the functional form of an in-place operator.

        Args:
            schema: Schema of the in-place operator.
            reference: Its reference.
            faked: True if its author gave a fake kernel.
        """
        return {}

    def states_type(self, argument: str) -> bool:
        """Return True if its author has written the type of an argument; calls may have shown another."""
        return True

    def runs(self, circumstance: str, *, suspected: bool = False) -> bool:
        """Return False if calls have shown that its forward fails in a circumstance, without a replacement.

        Args:
            circumstance: A circumstance, such as `TRACED`.
            suspected: True if one exception is enough, although it may have had a different reason.
        """
        return True

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of the author's own call, from the operator's arguments."""
        return list(values)

    def structured(self, results: Sequence[Any]) -> Any:
        """Return the results in the structure of the author's own call."""
        return results[0] if len(results) == 1 else tuple(results)

    def sources(self) -> tuple[Any, ...]:
        """Return the functions and classes that it already had."""
        return ()

    def methods(self, names: Sequence[str]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return the functions that it already had, under the names of the methods of a Function class.

        Args:
            names: Names of the operator's arguments.

        Returns:
            The methods, and the name of the argument for each parameter of forward. Forward also takes a
            context if `setup_context` is not among them.
        """
        return {}, names

    def notes(self, *, in_place: bool) -> Sequence[str]:
        """Return facts that calls have shown about the in-place operator, or about its functional form."""
        return ()


@dataclass(frozen=True)
class Declared(Origin):
    """Origin of an operator that was declared with opsmith."""


DECLARED = Declared()
