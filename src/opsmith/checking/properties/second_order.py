"""Second order is right: the derivatives of the gradients, against finite differences of the gradients."""

from __future__ import annotations

import torch
from torch.autograd import gradgradcheck

from opsmith import errors
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.differentiated import rule_place
from opsmith.checking.differentiating import each_subset
from opsmith.checking.numerical import numerical_fault
from opsmith.checking.property import Findings, Property
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

NAME = "second_order"


def run(subject: Subject) -> Findings:
    """Check the gradients of the gradients of every sample, by each input alone and by all together."""
    yield from each_subset(NAME, subject, _check)


def _check(subject: Subject, sample: Sample, places: tuple[int, ...], fast: bool) -> Failure | None:
    names = ", ".join(sample.labels[place] for place in places)
    where = rule_place(subject, sample.names[places[0]])
    evidence = {"sample": f"{sample} in float64"}
    for device in subject.devices_with(torch.float64):
        try:
            text = numerical_fault(
                gradgradcheck,
                subject,
                sample,
                places,
                device,
                gen_non_contig_grad_outputs=True,
                fast_mode=fast,
            )
        except errors.GraphCutError as error:
            return Failure(NAME, error.argument, "second-order", str(error), error.where, evidence)
        if text is not None:
            message = (
                f"the second order by `{names}` is not what finite differences of the gradients say: "
                f"something that the gradient depends on is hidden from autograd. gradgradcheck: {text}"
            )
            return Failure(NAME, names, UNKNOWN, message, where, {**evidence, "gradgradcheck": text})
    return None


SECOND_ORDER = Property(NAME, "the gradients can be differentiated again, and are right", run)
