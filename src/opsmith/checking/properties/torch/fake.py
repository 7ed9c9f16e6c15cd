"""Fake kernel: its shapes, dtypes and strides are those of the real results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import WrongCountError, WrongFormError, refuse_own
from opsmith.checking.numerics.compare import metadata_difference
from opsmith.checking.properties.torch.frozen_sizes import frozen
from opsmith.checking.property import Findings, Note, Property, each_sample, first_line, innermost, raised
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import ALWAYS_CHECKED, LOW_PRECISION, case_name, dtype_name
from opsmith.checking.samples.sample import Sample, replica
from opsmith.checking.samples.variations import form_of
from opsmith.checking.side_effects.global_settings import without_logs
from opsmith.checking.subject import Subject
from opsmith.core.location import where
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import NO_ACCELERATOR, NO_SIZES_ON_META, has_message

NAME = "fake"


def run(subject: Subject) -> Findings:
    """Compare fake results with real ones: in each dtype, transposed, at symbolic sizes."""
    forms: set[tuple[Any, ...]] = set()

    def check_sample(subject: Subject, sample: Sample) -> Findings:
        form = form_of(sample)
        if not sample.origin or form not in forms:  # other numbers alone do not change fake results
            yield from _sample(subject, sample)
        forms.add(form)

    with without_logs():
        yield from each_sample(NAME, check_sample, subject)


def _sample(subject: Subject, sample: Sample) -> Findings:
    for what, case, flat in _cases(subject, sample):
        try:
            results = subject.call(sample, flat)
        except Exception as error:
            refuse_own(error)
            yield Note(f"{what} was left out, since it does not run there: {first_line(error)}")
            continue
        found = [*compare_fake(subject, sample, flat, results, case)]
        yield from found
        if any(isinstance(finding, Failure) for finding in found):
            return  # other cases would report the same
    if subject.rank(sample) < subject.effort.transform_samples:
        flat = sample.at()
        try:
            results = subject.call(sample, flat)
        except Exception as error:
            refuse_own(error)
            return  # reported above
        yield from compare_symbolic(subject, sample, flat, results, str(sample))


def _cases(subject: Subject, sample: Sample) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield cases: a short name, the whole case in words, and the arguments.

    All dtypes are tried on the first sample alone, since other samples depend on them likewise.
    """
    every = subject.effort.exhaustive or not subject.rank(sample)
    for device in subject.devices:
        for dtype in _dtypes(subject) if sample.inexact and every else ():
            if sample.takes(dtype):
                yield dtype_name(dtype), case_name(sample, dtype, device), sample.at(dtype, device)
        if not (sample.inexact and every):
            yield str(sample), f"{sample} on {device.type}", sample.at(device=device)
    if sample.origin or (subject.rank(sample) > 1 and not every):
        return
    flat = [_turned(value) for value in sample.at()]
    yield f"{sample} transposed in memory", f"{sample}, transposed in memory", flat


def _dtypes(subject: Subject) -> tuple[torch.dtype, ...]:
    if subject.single_precision:
        return (torch.float32,)
    return (
        (*ALWAYS_CHECKED, *LOW_PRECISION) if subject.effort.fake_dtypes else (torch.float32, torch.bfloat16)
    )


def _turned(value: Any) -> Any:
    """Lay the same numbers out in another order in memory."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


FAKE = Property(
    NAME,
    "the fake kernel gives the shapes, dtypes and strides of the real results",
    run,
    varied=True,
    about_gradients=False,
    transforms=True,
    given="undeclared",
)


def compare_fake(
    subject: Subject, sample: Sample, flat: Sequence[Any], results: Sequence[Tensor | None], case: str
) -> Findings:
    """Run the operator on fake tensors; hold shape, dtype, stride and device to those of the real results.

    Args:
        subject: The subject of the check.
        sample: The sample.
        flat: Its arguments.
        results: Results of the operator for them.
        case: Sample, dtype and device, in words.
    """
    location = fake_location(subject)
    symbolic = capabilities.symbolic_mode(inputs=False)
    on_meta = symbolic is None  # devices are unknown there
    mode = capabilities.fake_mode() if on_meta else symbolic
    faked = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in flat]
    try:
        with without_logs(), mode:
            fakes = subject.call(sample, faked)
    except (WrongCountError, WrongFormError) as error:
        message = f"on fake tensors {error}: code compiled for these would be wrong for the real ones"
        yield Failure(NAME, error.result, "fake-mismatch", message, location, {"sample": case})
        return
    except Exception as error:
        refuse_own(error)
        if on_meta and has_message(error, NO_ACCELERATOR):  # torch, of a generator for this device
            yield Note("the fake kernel was left out: it makes a generator, and the device `meta` has none")
            return
        if on_meta and has_message(error, NO_SIZES_ON_META):
            yield Note("sizes that depend on data were left out: they need the capability `fake_tensors`")
            return
        reason = _no_fake(subject, error)
        if reason is not None:
            yield Note(reason)
            return
        failure = raised(NAME, subject, error, case)
        message = f"on fake tensors, where there is a form and no data, it raises {failure.message}"
        # The reference may look at data, as in `if x.sum() > 0`; an author's own fake kernel may not.
        cause = "fake-mismatch" if has_own_fake(subject) else failure.cause
        yield replace(failure, cause=cause, message=message)
        return
    for fake, real, result in zip(fakes, results, subject.results(sample), strict=True):
        if real is None and fake is None:
            continue
        if real is None or fake is None:
            words = "None" if fake is None else "a tensor"
            yield Failure(
                NAME,
                result.name,
                "fake-mismatch",
                f"on fake tensors `{result.name}` is {words}, and on real ones it is not",
                location,
                {"sample": case},
            )
            continue
        sizes = [*fake.shape] if on_meta else [mode.size(size) for size in fake.shape]
        if None in sizes:
            fault = _difference_by_data(fake, real, sizes)
        else:
            fault = metadata_difference(fake, real.to("meta") if on_meta else real, strides=True)
        if fault is None:
            continue
        aspect, actual, right = fault
        if aspect == "stride" and _by_torch(subject, sample, flat, result.name, real):
            yield Note(
                f"torch gives `{result.name}` other strides on fake tensors: {actual}, and {right} really"
            )
            continue
        yield Failure(
            NAME,
            result.name,
            "fake-mismatch",
            f"the fake kernel gives `{result.name}` the {aspect} {actual}, and the real one {right}: "
            "code compiled for the one would be wrong for the other",
            location,
            {"sample": case, "fake": actual, "real": right},
        )


def _difference_by_data(
    fake: Tensor, real: Tensor, sizes: Sequence[int | None]
) -> tuple[str, str, str] | None:
    """The first difference of a fake result some of whose sizes (None) depend on data, and may be any.

    The names are those of `metadata_difference`; strides follow from sizes, and are not compared.
    """
    if not _fits(sizes, real):
        return "shape", str([*sizes]).replace("None", "any"), str([*real.shape])
    with_sizes = torch.empty(real.shape, dtype=fake.dtype, device="meta")
    found = metadata_difference(with_sizes, real.to("meta"), strides=False)
    if found is None and fake.device.type != real.device.type:
        return "device", str(fake.device), str(real.device)
    return found


def _fits(sizes: Sequence[int | None], real: Tensor) -> bool:
    """True if the known sizes of a fake result are those of the real one."""
    pairs = zip(sizes, real.shape, strict=False)
    return len(sizes) == real.dim() and all(size in (None, right) for size, right in pairs)


def has_own_fake(subject: Subject) -> bool:
    """True if the author wrote the fake kernel, here or for torch.library."""
    return subject.specification.fake is not None or subject.specification.origin.registered


def _by_torch(subject: Subject, sample: Sample, flat: Sequence[Any], name: str, real: Tensor) -> bool:
    """True if torch itself computes other strides on fake tensors, for operations inside the operator."""
    if subject.torch_operator is None:
        return True
    if has_own_fake(subject):
        return False
    names = [each.name for each in subject.results(sample)]
    alone = subject.plain(sample)([replica(value) for value in flat])[names.index(name)]
    return metadata_difference(alone, real, strides=True) is None


def compare_symbolic(
    subject: Subject, sample: Sample, flat: Sequence[Any], results: Sequence[Tensor | None], case: str
) -> Findings:
    """Run the operator on fake tensors whose sizes are symbols; hold sizes of results to the real ones.

    An operator that fixes a size, or does not run on symbols, is right, but compiled anew for each size.

    Args:
        subject: The subject of the check.
        sample: The sample.
        flat: Its arguments.
        results: Results of the operator for them.
        case: Sample, dtype and device, in words.
    """
    mode = capabilities.symbolic_mode()
    if mode is None:
        yield Note("sizes that are symbols were left out: they need the capability `fake_tensors`")
        return
    faked = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in flat]
    try:
        with without_logs(), mode:
            fakes = subject.call(sample, faked)
    except Exception as error:
        refuse_own(error)
        message = "it does not run where sizes are symbols, so that code is compiled for each size: "
        message += f"{type(error).__name__}: {first_line(error)}"
        location = innermost(error, fake_location(subject))
        yield Failure(NAME, None, "recompiles", message, location, {"sample": case})
        return
    for fake, real, result in zip(fakes, results, subject.results(sample), strict=True):
        if real is None or fake is None:
            continue
        sizes = [mode.size(size) for size in fake.shape]
        if not _fits(sizes, real):
            yield Failure(
                NAME,
                result.name,
                "fake-mismatch",
                f"where sizes are symbols, as in code that is compiled for any size, `{result.name}` has the "
                f"shape {sizes}, and really {list(real.shape)}",
                fake_location(subject),
                {"sample": case, "fake": str(sizes), "real": str(list(real.shape))},
            )
    for label, fake in zip(sample.labels, faked, strict=True):
        if not isinstance(fake, Tensor):
            continue
        fixed = [dim for dim, size in enumerate(fake.shape) if mode.fixed(size)]
        if not has_own_fake(subject):
            for dim in list(fixed):
                failure = _frozen(label, dim, mode.where_fixed(fake.shape[dim]), case)
                if failure is not None:
                    fixed.remove(dim)
                    yield failure
        if fixed:
            dimensions = ", ".join(f"{dim}" for dim in fixed)
            yield Failure(
                NAME,
                label,
                "recompiles",
                f"it fixes the size of `{label}` in dimension {dimensions}: code is compiled anew for each "
                "other size",
                fake_location(subject),
                {"sample": case},
            )


def _frozen(label: str, dim: int, place: tuple[str, int, str] | None, case: str) -> Failure | None:
    """The failure of a line that turns a size into a number, where another expression would not."""
    found = None if place is None else frozen(*place)
    if place is None or found is None:
        return None
    call, instead = found
    message = (
        f"`{call}` makes a number of the size of `{label}` in dimension {dim}, so that code is compiled anew "
        f"for each other size: {instead}"
    )
    return Failure(NAME, label, "frozen-size", message, f"{place[0]}:{place[1]}", {"sample": case})


def fake_location(subject: Subject) -> str:
    """Location of the fake kernel, or of what it is derived from."""
    specification = subject.specification
    if specification.origin.own("fake"):
        return "its own fake kernel"
    itself = subject.kind.in_library or not (specification.origin.referenced or specification.fake)
    return specification.where if itself else where(specification.fake or specification.reference)


def _no_fake(subject: Subject, error: Exception) -> str | None:
    """The reason why it need not run on fake tensors; None if it must."""
    if isinstance(error, errors.MissingFakeError):
        return f"the fake kernel was left out, since there is none: {error.hint}"
    if isinstance(error, errors.TransformError):
        return f"it is refused on fake tensors: {first_line(error)}"
    if subject.lacks("fake"):
        return (
            "the fake kernel was left out, since there is none: `torch.library.register_fake` gives it one; "
            f"without, {type(error).__name__}: {first_line(error)}"
        )
    if subject.torch_operator is None:
        return (
            "its forward does not run on fake tensors, where there is a form and no data, so that it cannot "
            f"be traced: {type(error).__name__}: {first_line(error)}"
        )
    return None
