"""Causes of failures: the name of each, its meaning, and which failures follow from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from opsmith.checking.report import Failure

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    """One word for what is wrong.

    Args:
        name: The word, as it stands in `Failure.cause`.
        meaning: What is wrong, in a sentence.
        decided: The evidence that it takes.
    """

    name: str
    meaning: str
    decided: str


_TABLE = (
    Cause("raises", "It raises, or the process dies.", "An exception of it, or the signal."),
    Cause(
        "out-of-bounds",
        "It reads or writes memory that is not its own: beyond a tensor or an array, or that is gone.",
        "AddressSanitizer, with each argument between fences; of a kernel in Triton each pointer that the "
        "interpreter uses.",
    ),
    Cause(
        "undefined",
        "It does what C++ gives no meaning: a signed overflow, a null or misaligned pointer.",
        "UndefinedBehaviorSanitizer.",
    ),
    Cause(
        "uninitialized",
        "A result depends on what was in memory before anything was written to it.",
        "The same call with other bytes in variables and in the memory of the results.",
    ),
    Cause(
        "mutates-input",
        "It writes into an argument.",
        "The bits of every argument before and after the call and the backward.",
    ),
    Cause(
        "mutates-grad-output",
        "Its backward writes into the incoming gradient.",
        "The bits of every incoming gradient before and after the backward.",
    ),
    Cause(
        "mutates-saved",
        "Its backward writes into what was saved for it.",
        "The bits of every saved tensor before and after, and a second backward through the same graph.",
    ),
    Cause(
        "aliases-input",
        "A result shares memory with an argument, and nothing says so.",
        "The addresses of the storages.",
    ),
    Cause(
        "nondeterministic",
        "Two runs on the same bits differ, beyond the order of a sum.",
        "Two runs, from the same random state; whether it draws from a state that it does not declare.",
    ),
    Cause(
        "stale-state",
        "What it gives depends on earlier calls, or on other threads.",
        "The same call alone, and after or between calls with other arguments; the memory of two results.",
    ),
    Cause(
        "side-effect",
        "It changes something else: `.grad` of a tensor, a global, a default.",
        "The state outside before and after the call and the backward.",
    ),
    Cause(
        "gradient-count",
        "The backward returns another number of gradients than there are inputs.",
        "What it returned, counted, or what torch's engine says of it.",
    ),
    Cause("shape", "A result or gradient has the wrong shape.", "Its shape beside the right one."),
    Cause("dtype", "A result or gradient has the wrong dtype.", "Its dtype beside the right one."),
    Cause(
        "missing-gradient",
        "There is no gradient, or zeros, where there is one.",
        "None or zeros, and finite differences that are not zero.",
    ),
    Cause("nan", "It is nan or infinite where the right one is finite.", "The places of such elements."),
    Cause(
        "empty",
        "It is right but for tensors without elements.",
        "The same call on samples with and without elements.",
    ),
    Cause(
        "layout",
        "It is right for contiguous tensors and wrong for the same numbers in another layout.",
        "The same numbers, contiguous and in that layout.",
    ),
    Cause(
        "ignores-grad-output",
        "The gradient does not depend on the one that comes in.",
        "It stays as it is for other incoming gradients, and is right for ones.",
    ),
    Cause(
        "nonlinear-grad",
        "The gradient is not linear in the one that comes in.",
        "That of a u + b v beside a times that of u plus b times that of v.",
    ),
    Cause(
        "input-needs-grad",
        "It is wrong for some choices of the inputs that require a gradient, and right for others.",
        "Every choice, one after the other.",
    ),
    Cause(
        "precision",
        "It is computed in a narrower dtype than its arguments have.",
        "Its error beside that dtype's rounding, on inputs that need more digits.",
    ),
    Cause(
        "sign",
        "It is the right one with the other sign.",
        "Minus what came is the right one, on every fresh input.",
    ),
    Cause(
        "scale",
        "It is the right one times a factor.",
        "The same factor, or the same function of the sizes, on every fresh input.",
    ),
    Cause(
        "unreduced-broadcast",
        "A gradient is not summed over what was broadcast.",
        "Summing it over the broadcast dimensions gives the right one; or it is one part of that sum.",
    ),
    Cause(
        "swapped-inputs",
        "It is the gradient of another input.",
        "What came for each is the right one of the other, on every fresh input.",
    ),
    Cause(
        "transposed",
        "Two of its dimensions are swapped.",
        "With two dimensions swapped back it is the right one, on every fresh input.",
    ),
    Cause(
        "shifted",
        "Its elements stand some places further.",
        "Rolled or padded back by that many places it is the right one, on every fresh input.",
    ),
    Cause(
        "region",
        "It is right but for some indices, or where a condition holds.",
        "The wrong elements of every fresh input are those of the condition.",
    ),
    Cause(
        "missing-term",
        "A term of it is missing.",
        "It is what autograd gives if one path through the reference is cut, on every fresh input.",
    ),
    Cause(
        "second-order",
        "The gradient is right, and its own derivatives are not.",
        "Derivatives of the gradient beside finite differences of it.",
    ),
    Cause(
        "forward-mode",
        "The gradient is right, and the tangent is not.",
        "The tangent beside finite differences, and its product with the gradient.",
    ),
    Cause(
        "fake-mismatch",
        "The fake kernel tells another form than the results have.",
        "Shapes, dtypes, strides and devices of both.",
    ),
    Cause(
        "kernel-mismatch",
        "A kernel, or a rule for batches, gives other numbers than the reference, if only in some mode.",
        "Its results beside the reference's in float64, in rounding units.",
    ),
    Cause(
        "not-refused",
        "A kernel takes sizes that the reference refuses.",
        "A call that both take, and then the same with one size changed.",
    ),
    Cause(
        "leak",
        "It keeps tensors alive that nothing needs any more.",
        "Weak references after the backward, with and without the cycle collector.",
    ),
    Cause(
        "resources",
        "A kernel takes more of a GPU than its author allows, or than there is.",
        "Registers, spills and shared memory, as the assembler says, beside the limits.",
    ),
    Cause(
        "not-exercised",
        "A formula, kernel or claim was never run: no sample reaches it.",
        "None of the samples does.",
    ),
    Cause(UNKNOWN, "It is wrong, and no word above is borne out.", "None of the evidence above."),
)

CAUSES = MappingProxyType({each.name: each for each in _TABLE})
"""Every cause by its name, in the order of precedence."""


def first_of(names: set[str]) -> str:
    """The cause that names a failure, where the evidence bears out several.

    Example:
        >>> first_of({"region", "layout"})
        'layout'
    """
    return next(name for name in CAUSES if name in names)


TRACED = frozenset(
    {"fake", "vmap", "batched_gradients", "autocast", "serialization", "compile", "export", "opcheck"}
)
"""Properties whose failures may follow from those of any that stands before them."""

DIFFERENTIATED = frozenset({"gradient", "linearity", "layouts", "values", "second_order", "backward_again"})
"""Properties that hand a gradient of the right shape to every result."""

BROAD = frozenset({"raises", "unknown", "fake-mismatch", "shape", "kernel-mismatch"})
"""Causes under which they report what they do not know the reason of."""

ROOTS = frozenset(
    {
        "raises",
        "mutates-input",
        "mutates-grad-output",
        "mutates-saved",
        "aliases-input",
        "nondeterministic",
        "stale-state",
        "side-effect",
        "gradient-count",
        "shape",
        "dtype",
        "layout",
        "fake-mismatch",
    }
)
"""Causes that leave nothing right of what traces, maps or copies an operator."""


def explained_by(failure: Failure, before: Sequence[Failure]) -> str | None:
    """The property whose failure explains one of another property; None where none does.

    One of tracing, mapping or copying is explained by the first that has the same cause, then by the first
    that is about the same argument or result, then by the first that leaves nothing right. One of
    differentiating is explained by wrong results alone: where the gradient that is right for right results
    does not fit them, or where differences of wrong results contradict forward and reverse mode alike. That a
    second backward gives another gradient says nothing where each run gives another.

    Args:
        failure: The failure.
        before: Those of the properties that stand before it.
    """
    if failure.property not in TRACED:
        about = (failure.property, failure.cause) == (
            "effects",
            "mutates-saved",
        ) and failure.input is not None
        if about and any((each.cause, each.input) == ("nondeterministic", failure.input) for each in before):
            return "determinism"
        wrong = {each.cause for each in before if each.property == "forward" and each.follows is None}
        misfit = failure.cause == "raises" and "shape" in wrong
        contradicted = failure.evidence.get("reverse mode") == "wrong as well" and "kernel-mismatch" in wrong
        explained = (misfit and failure.property in DIFFERENTIATED) or contradicted
        return "forward" if explained else None
    others = [each for each in before if each.property != failure.property and each.follows is None]
    for each in others:
        if each.cause == failure.cause and each.cause != "unknown":
            return each.property
    for each in others:
        if failure.input is not None and each.input == failure.input:
            return each.property
    if failure.cause in BROAD:
        return next((each.property for each in others if each.cause in ROOTS), None)
    return None
