"""Why torch does not trace an operator: a clear refusal, or none, and then it is a fault."""

from __future__ import annotations

from collections.abc import Iterator

from opsmith import errors
from opsmith.checking.subject import Subject


def refused(subject: Subject, error: BaseException) -> str | None:
    """Why torch, or opsmith, does not take it; None where it should."""
    for each in chain(error):
        if isinstance(each, errors.MissingFakeError):
            return f"there is no fake kernel: {each.mend}"
        if isinstance(each, errors.TransformError) or "TransformError" in str(each):
            return reason_of(each)
        if type(each).__name__ in ("InternalTorchDynamoError", "InvalidCxxCompiler", "NotImplementedError"):
            return f"{type(each).__name__}: {reason_of(each)}"
    if _of_symbol(error):  # a whole number that is given may be any, where sizes may
        return f"it does not take a symbol for a whole number: {reason_of(error)}"
    own = subject.specification.own
    if subject.foreign and (own is None or not own.fake):
        return f"there is no fake kernel: {reason_of(error)}"
    if subject.torch_operator is None:  # torch promises to compile few of the classes that people write
        return f"{type(error).__name__}: {reason_of(error)}"
    return None


def _of_symbol(error: BaseException) -> bool:
    """Whether it is about a symbol; a schema names their type too, in an error about anything."""
    return any("SymInt" in line and "::" not in line for line in str(error).splitlines())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reason_of(error: BaseException) -> str:
    """The lines of an error of torch that say what it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Explanation: ")]
    return " ".join([lines[0], *told[:1]]) if lines else type(error).__name__
