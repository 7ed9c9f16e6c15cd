"""Fake kernel: its shapes, dtypes and strides equal the real results'; a trace fixes no size."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import Raised, WrongFormError, attempt, first_line
from opsmith.checking.property import Finding, Findings, Note, Property
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, each_run
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, dtype_name
from opsmith.checking.samples.variations import form_of
from opsmith.checking.subject import Subject
from opsmith.core.location import innermost, where
from opsmith.core.source import file_tree
from opsmith.judging.compare import Difference, form_difference
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import NO_ACCELERATOR, NO_SIZES_ON_META, has_message

NAME = "fake"


def run(subject: Subject) -> Findings:
    """Compare fake results with real results: in each dtype, transposed, and at symbolic sizes."""
    forms: set[tuple[Any, ...]] = set()

    def check(run: Run) -> Findings:
        form = form_of(run.sample)
        if not run.sample.origin or form not in forms:  # different numbers do not change fake results
            yield from _sample(run)
        forms.add(form)

    yield from each_run(NAME, check, subject)


def _sample(run: Run) -> Findings:
    for call in _cases(run):
        results = attempt(partial(run.subject.call, run.sample, call.flat()))
        if isinstance(results, Raised):
            what = str(call) if call.dtype is None else dtype_name(call.dtype)
            yield Note(
                f"{what} was left out, because the operator does not run there: {first_line(results.error)}"
            )
            continue
        found = [*compare_fake(call, results)]
        yield from found
        if any(isinstance(finding, Failure) for finding in found):
            return  # other cases would report the same fault
    if run.subject.rank(run.sample) < run.subject.effort.transform_samples:
        results = attempt(partial(run.subject.call, run.sample, run.flat()))
        if not isinstance(results, Raised):  # it is reported above
            yield from compare_symbolic(run, results)


def _cases(run: Run) -> Iterator[Run]:
    """Yield the calls to compare.

    All dtypes are tried only on the first sample, since they have the same effect on other samples.
    """
    subject, sample = run.subject, run.sample
    every = subject.effort.exhaustive or not subject.rank(sample)
    for device in subject.devices:
        for dtype in _dtypes(subject) if sample.inexact and every else ():
            if sample.takes(dtype):
                yield replace(run, place=device, dtype=dtype)
        if not (sample.inexact and every):
            yield replace(run, place=device, words=f"{sample} on {device.type}")
    if not sample.origin and (every or subject.rank(sample) <= 1):
        yield replace(run, changed=_turned, words=f"{sample}, transposed in memory")


def _on_fakes(run: Run, mode: Any) -> tuple[list[Any], list[Any] | Raised]:
    """The arguments as fake tensors of a mode, and their results."""
    faked = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in run.flat()]

    def call() -> list[Any]:
        with mode:
            return run.subject.call(run.sample, faked)

    return faked, attempt(call)


def _dtypes(subject: Subject) -> tuple[torch.dtype, ...]:
    if subject.single_precision:
        return (torch.float32,)
    return (*ALWAYS_CHECKED, *LOW_PRECISION) if subject.effort.full else (torch.float32, torch.bfloat16)


def _turned(flat: list[Any]) -> list[Any]:
    """Store the same numbers in a different order in memory."""
    return [
        value.transpose(-1, -2).contiguous().transpose(-1, -2)
        if isinstance(value, Tensor) and value.dim() > 1
        else value
        for value in flat
    ]


def compare_fake(run: Run, results: Sequence[Tensor | None]) -> Findings:
    """Run the operator on fake tensors; compare shape, dtype, strides and device with the real results."""
    subject, mode = run.subject, capabilities.symbolic_mode(inputs=False)
    on_meta = mode is None  # devices are unknown here
    fakes = _on_fakes(run, capabilities.fake_mode() if on_meta else mode)[1]
    if isinstance(fakes, Raised):
        yield _raised(run, fakes, on_meta=on_meta)
        return
    for at, (fake, real) in enumerate(zip(fakes, results, strict=True)):
        sizes = [] if fake is None else [*fake.shape] if on_meta else [*map(mode.size, fake.shape)]
        fault, name = _fault(fake, real, sizes, on_meta=on_meta), subject.results(run.sample)[at].name
        if fault is None:
            continue
        if fault.aspect == "stride" and _by_torch(run, at, real):
            words = f"other strides on fake tensors: {fault.got}, but the real strides are {fault.expected}"
            yield Note(f"torch gives `{name}` {words}")
            continue
        message = (
            f"the fake kernel gives `{name}` the {fault.aspect} {fault.got}, but the real "
            f"{fault.aspect} is {fault.expected}: compiled code would be wrong"
        )
        if fault.aspect == "form":
            message = f"on fake tensors, `{name}` is {fault.got}, but on real tensors, it is {fault.expected}"
        evidence = {"fake": fault.got, "real": fault.expected}
        yield run.failure(name, "fake-mismatch", message, fake_location(subject), evidence)


def _raised(run: Run, raised: Raised, *, on_meta: bool) -> Finding:
    """The finding for an exception on fake tensors."""
    subject, error = run.subject, raised.error
    if isinstance(error, WrongFormError):
        message = f"on fake tensors, {error}: compiled code would be wrong"
        return run.failure(error.result, "fake-mismatch", message, fake_location(subject))
    if on_meta and has_message(error, NO_ACCELERATOR):  # torch's error for a generator on this device
        return Note("the fake kernel was left out: it makes a generator, and the device `meta` has none")
    if on_meta and has_message(error, NO_SIZES_ON_META):
        return Note("sizes that depend on data were left out: they need the capability `fake_tensors`")
    if isinstance(error, errors.MissingFakeError):
        return Note(f"there is no fake kernel to check: {error.hint}")
    if isinstance(error, errors.TransformError):
        return Note(f"the operator refuses fake tensors: {first_line(error)}")
    if subject.lacks("fake"):
        gives = "register one by `torch.library.register_fake`; without it"
        return Note(f"there is no fake kernel to check: {gives}, {raised}")
    where_form = "on fake tensors, which have a shape and a dtype but no data"
    if subject.torch_operator is None:
        return Note(f"the forward does not run {where_form}, so it cannot be traced: {raised}")
    failure = run.raised(error)
    # The reference may look at data, as in `if x.sum() > 0`; an author's own fake kernel may not.
    cause = "fake-mismatch" if has_own_fake(subject) else failure.cause
    return replace(failure, cause=cause, message=f"{where_form}, the operator raises {failure.message}")


def _fault(
    fake: Tensor | None, real: Tensor | None, sizes: Sequence[int | None], *, on_meta: bool
) -> Difference | None:
    """The difference of a fake result; sizes that depend on data are None, and match every size."""
    if fake is None or real is None:
        return form_difference(fake, real)
    if not _fits(sizes, real):
        shape = str([*sizes]).replace("None", "any")
        return Difference((), shape, str([*real.shape]), aspect="shape")
    if None not in sizes:
        return form_difference(fake, real.to("meta") if on_meta else real, strides=True)
    if fake.device.type != real.device.type:
        return Difference((), str(fake.device), str(real.device), aspect="device")
    return form_difference(torch.empty(real.shape, dtype=fake.dtype, device="meta"), real.to("meta"))


def _fits(sizes: Sequence[int | None], real: Tensor) -> bool:
    """True if the known sizes of a fake result equal the real sizes."""
    pairs = zip(sizes, real.shape, strict=False)
    return len(sizes) == real.dim() and all(size in (None, right) for size, right in pairs)


def has_own_fake(subject: Subject) -> bool:
    """True if the author wrote the fake kernel, here or for torch.library."""
    return subject.specification.fake is not None or subject.specification.origin.registered


def _by_torch(run: Run, position: int, real: Any) -> bool:
    """True if torch itself computes different strides on fake tensors, in operations of the operator."""
    if run.subject.torch_operator is None:
        return True
    if has_own_fake(run.subject):
        return False
    alone = run.subject.plain(run.sample)(run.flat())[position]
    return form_difference(alone, real, strides=True) is None


def compare_symbolic(run: Run, results: Sequence[Tensor | None]) -> Findings:
    """Run the operator on fake tensors whose sizes are symbols; compare sizes of results with real sizes.

    An operator that fixes a size, or does not run on symbols, is right, but compiled for each size.
    """
    mode, subject, sample = capabilities.symbolic_mode(), run.subject, run.sample
    if mode is None:
        yield Note("symbolic sizes were left out: they need the capability `fake_tensors`")
        return
    location = fake_location(subject)
    faked, fakes = _on_fakes(run, mode)
    if isinstance(fakes, Raised):
        message = (
            f"the operator does not run with symbolic sizes, so code is compiled again for each size: {fakes}"
        )
        yield run.failure(None, "recompiles", message, innermost(fakes.error, location))
        return
    for fake, real, result in zip(fakes, results, subject.results(sample), strict=True):
        sizes = [] if fake is None else [*map(mode.size, fake.shape)]
        if fake is not None and real is not None and not _fits(sizes, real):
            message = (
                f"with symbolic sizes, as in code that is compiled for any size, `{result.name}` has "
                f"the shape {sizes}, but the real shape is {[*real.shape]}"
            )
            shapes = {"fake": str(sizes), "real": str([*real.shape])}
            yield run.failure(result.name, "fake-mismatch", message, location, shapes)
    for label, fake in zip(sample.labels, faked, strict=True):
        fixed: list[int] = []
        for dim in (dim for dim, size in enumerate(getattr(fake, "shape", ())) if mode.fixed(size)):
            place = None if has_own_fake(subject) else mode.where_fixed(fake.shape[dim])
            found = None if place is None else frozen(*place)
            if place is None or found is None:
                fixed.append(dim)
                continue
            message = (
                f"`{found[0]}` turns the size of `{label}` in dimension {dim} into a number, so code "
                f"is compiled again for each other size: {found[1]}"
            )
            yield run.failure(label, "frozen-size", message, f"{place[0]}:{place[1]}")
        if fixed:
            message = (
                f"the operator fixes the size of `{label}` in dimension "
                f"{', '.join(map(str, fixed))}: code is compiled again for each other size"
            )
            yield run.failure(label, "recompiles", message, location)


def fake_location(subject: Subject) -> str:
    """Location of the fake kernel, or of the code from which it is derived."""
    specification = subject.specification
    if specification.origin.own("fake"):
        return "its own fake kernel"
    itself = subject.kind.in_library or not (specification.origin.referenced or specification.fake)
    return specification.where if itself else where(specification.fake or specification.reference)


_BY_METHOD = "move it to a function outside of the class: in a method, a size becomes a number"

INSTEAD = {
    "exp": "math.e ** n",
    "exp2": "2.0 ** n",
    "hypot": "math.sqrt(a * a + b * b)",
    "isqrt": "int(math.sqrt(n))",
    "log": "math.log2(n) * math.log(2)",
    "log10": "math.log2(n) * math.log10(2)",
    "log1p": "math.log2(1 + n) * math.log(2)",
}
"""Functions of `math` that turn a symbol into a number, with an expression that keeps the symbol."""

KEPT = ("sqrt", "log2", "sin", "cos", "tan", "len", "float", "int", "isinstance")
"""Functions that keep a symbol, except in a method of a class."""


def frozen(file: str, line: int, function: str) -> tuple[str, str] | None:
    """The call in an author's line that turns a size into a number, and its replacement.

    Args:
        file: The file.
        line: The line at which a trace fixed a size to a number.
        function: The name of the function around it.

    Returns:
        The source of the call, and a hint; None if no replacement keeps the symbol, as for `range(n)`.

    Example:
        >>> frozen(__file__, 1, "reference") is None
        True
    """
    tree = file_tree(file)
    if tree is None:
        return None
    at_line = [node for node in ast.walk(tree) if _holds(node, line)]
    methods = [each for node in at_line if isinstance(node, ast.ClassDef) for each in node.body]
    in_method = any(
        isinstance(each, ast.FunctionDef) and each.name == function and _holds(each, line) for each in methods
    )
    for call in (node for node in at_line if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        numbers = [each for each in call.args if not isinstance(each, ast.Constant)]
        if not numbers or (name == "log" and len(call.args) > 1):
            continue
        if name in INSTEAD:
            return ast.unparse(call), f"write `{INSTEAD[name]}`"
        if name in KEPT and in_method:
            return ast.unparse(call), _BY_METHOD
    return None


def _holds(node: Any, line: int) -> bool:
    """True if a node of the code includes a line."""
    begin: int | None = getattr(node, "lineno", None)
    return begin is not None and begin <= line <= (node.end_lineno or begin)


FAKE = Property(
    NAME,
    "the fake kernel gives the shapes, dtypes and strides of the real results",
    run,
    inputs="every",
    traits=("about-results", "transforms"),
    given="undeclared",
)
