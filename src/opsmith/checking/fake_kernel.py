"""The fake kernel tells the form of the real results: tracing, compiling and exporting build on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.checking.difference import form_fault
from opsmith.checking.property import Findings, Note, raised
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject, WrongCountError
from opsmith.core.location import where
from opsmith.torch_library import capabilities


def compare_fake(
    check: str,
    subject: Subject,
    sample: Sample,
    flat: Sequence[Any],
    results: Sequence[Tensor | None],
    case: str,
) -> Findings:
    """Run the operator on fake tensors; hold shape, dtype, stride and device to those of the real results.

    Args:
        check: Name of the property that asks.
        subject: What is under check.
        sample: The sample.
        flat: Its arguments.
        results: What the operator returned for them.
        case: Sample, dtype and device, in words.
    """
    specification = subject.specification
    own = specification.own is not None and specification.own.fake
    place = "its own fake kernel" if own else where(specification.fake or specification.reference)
    on_meta = not capabilities.on("fake_tensors")  # there, no device is told
    mode = capabilities.fake_mode()
    faked = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in flat]
    try:
        with mode:
            fakes = subject.call(sample, faked)
    except errors.MissingFakeError as error:
        yield Note(f"the fake kernel was left out, since there is none: {error.mend}")
        return
    except WrongCountError as error:
        message = f"on fake tensors {error}: code compiled for these would be wrong for the real ones"
        yield Failure(check, error.result, "fake-mismatch", message, place, {"sample": case})
        return
    except Exception as error:
        if on_meta and "not an accelerator" in str(error):  # torch, of a generator for this device
            yield Note("the fake kernel was left out: it makes a generator, and the device `meta` has none")
            return
        failure = raised(check, subject, error, case)
        message = f"on fake tensors, where there is a form and no data, it raises {failure.message}"
        yield replace(failure, cause="fake-mismatch", message=message)
        return
    for fake, real, result in zip(fakes, results, subject.results(sample), strict=True):
        if real is None and fake is None:
            continue
        if real is None or fake is None:
            words = "None" if fake is None else "a tensor"
            yield Failure(
                check,
                result.name,
                "fake-mismatch",
                f"on fake tensors `{result.name}` is {words}, and on real ones it is not",
                place,
                {"sample": case},
            )
            continue
        fault = form_fault(fake, real.to("meta") if on_meta else real, strides=True)
        if fault is None:
            continue
        aspect, mine, right = fault
        yield Failure(
            check,
            result.name,
            "fake-mismatch",
            f"the fake kernel gives `{result.name}` the {aspect} {mine}, and the real one {right}: "
            "code compiled for the one would be wrong for the other",
            place,
            {"sample": case, "fake": mine, "real": right},
        )
