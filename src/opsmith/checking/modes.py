"""Why a result is another one in a mode without gradients, though no other call came before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.checking.agreement import differ, what_differs
from opsmith.checking.alive import Answer, alive, copies
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample, replica
from opsmith.checking.scenes import MINE, Heard, Stage
from opsmith.checking.subject import Subject

BESIDE_GRADIENTS = "That with gradients is taken as right"


def by_mode(check: str, stage: Stage, heard: Heard, position: int) -> Failure:
    """The failure for a result that a mode alone has changed.

    It is not the mode that changes it, but that no input requires a gradient, where it changes with gradients
    enabled as well. Else it is a kernel's or another part's own, where the reference stays as it is.

    Args:
        check: Name of the property.
        stage: The calls.
        heard: The call in that mode.
        position: Which visible result is another one.
    """
    assert isinstance(heard.given, Answer)
    subject, sample = stage.subject, stage.mine.sample
    right = stage.right[MINE].results[position]
    given = heard.given.results[position]
    name = subject.results(sample)[position].name
    evidence = {"sample": str(sample), "mode": heard.when.removeprefix("under ").strip("`")}
    where = subject.runs_at(stage.mine.make())
    plain = _requiring(stage, (), position)
    if plain is not None and differ(right, plain):
        needed = [at for at in stage.mine.places if not differ(right, _requiring(stage, (at,), position))]
        labels = " and ".join(f"`{sample.labels[at]}`" for at in needed)
        which = f"where {labels} requires no gradient" if len(needed) == 1 else "where no input requires one"
        message = (
            f"`{name}` is another one {which}, with gradients enabled as well as {heard.when}: "
            f"{what_differs(right, plain)}. {BESIDE_GRADIENTS}: what a call returns must not depend on what "
            "requires a gradient"
        )
        label = sample.labels[needed[0]] if len(needed) == 1 else name
        return Failure(check, label, "input-needs-grad", message, where, evidence)
    changed = f"`{name}` of a call that is made {heard.when} is another one"
    off = f"{what_differs(right, given)}. {BESIDE_GRADIENTS}; inputs that require none make no difference"
    if _reference_stays(stage, heard, position):
        message = f"{changed}, and the reference's is not: {off}. What computes it asks for the mode"
        return Failure(check, name, "kernel-mismatch", message, where, evidence)
    return Failure(check, name, "unknown", f"{changed}: {off}, so that the mode decides", where, evidence)


def _requiring(stage: Stage, places: tuple[int, ...], position: int) -> Tensor | None:
    """The result where these inputs alone require a gradient, with gradients enabled; None if it raises."""
    stage.memory.forget()
    made = stage.mine

    def run() -> Answer:
        return Answer(copies(alive(stage.subject, made.sample, made.make(), places).results))

    heard = stage.heard(MINE, "", run)
    return None if isinstance(heard.given, BaseException) else heard.given.results[position]


def result_by_need(
    subject: Subject, sample: Sample, places: Sequence[int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """In what a result is another one where inputs require a gradient, each time that it is computed.

    Args:
        subject: What is under check.
        sample: The sample.
        places: The inputs that require a gradient, or do not.
        dtype: dtype of floating inputs.
        device: Where they lie.
    """
    needed, plain = (
        [copies(alive(subject, sample, sample.at(dtype, device), some).results) for _ in range(2)]
        for some in (places, ())
    )
    for described, *each in zip(subject.results(sample), *needed, *plain, strict=False):
        with_one, again, without, once_more = each
        if differ(without, with_one) and not differ(with_one, again) and not differ(without, once_more):
            return f"`{described.name}` is another one then: {what_differs(without, with_one)}"
    return None


def _reference_stays(stage: Stage, heard: Heard, position: int) -> bool:
    """Whether there is a reference apart from what ran, and the mode does not change its result."""
    subject, made = stage.subject, stage.mine
    if subject.apply is not None or subject.specification.opaque or heard.mode is None:
        return False
    plain = subject.plain(made.sample)
    with heard.mode():
        inside = plain([replica(value) for value in made.make()])[position].clone()
    return not differ(plain([replica(value) for value in made.make()])[position].detach(), inside)
