"""Contexts around a call change nothing: its values and gradients are those of the plain function."""

from __future__ import annotations

import pytest
import torch
from context_cases import CONTEXTS, DERIVATIVES, values_and_gradients
from matrices import diagonal
from transform_cases import SUBJECTS
from transform_subjects import Subject


# Anomaly detection warns that it is slow, for aten operators too.
@pytest.mark.every(8)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize(("subject", "context"), diagonal(SUBJECTS, CONTEXTS, every=8))
def test_context(subject: Subject, context: str) -> None:
    inputs = subject.inputs()
    if subject.writes and context == "checkpoint-that-recomputes-ours":
        for function in (subject.operator, subject.plain):  # torch refuses it of its own operations, too
            with pytest.raises(RuntimeError, match="has been mutated"):
                CONTEXTS[context](function, inputs)
        return
    expected = values_and_gradients(subject.plain, inputs)
    # A second call may take the fast path, whose guard must see the context too.
    for _ in range(2):
        torch.testing.assert_close(CONTEXTS[context](subject.operator, inputs), expected)


@pytest.mark.every(8)
@pytest.mark.parametrize(("subject", "derivative"), diagonal(SUBJECTS, DERIVATIVES, every=8))
def test_derivative(subject: Subject, derivative: str) -> None:
    inputs = subject.inputs()
    found, expected = (DERIVATIVES[derivative](f, inputs) for f in (subject.operator, subject.plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "subject",
    [subject for subject in SUBJECTS if subject.name != "binarize"],  # its gradient is wrong on purpose
    ids=lambda subject: subject.name,
)
def test_finite_differences(subject: Subject) -> None:
    """torch's own checks, with forward mode and batched gradients."""
    leaves = tuple(tensor.requires_grad_() for tensor in subject.inputs())
    options = {"fast_mode": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(subject.operator, leaves, check_forward_ad=True, **options)
    assert torch.autograd.gradgradcheck(subject.operator, leaves, **options)
