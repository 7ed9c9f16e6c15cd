"""Functions of the kinds that public code has get the verdict that their authors would call right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wild_kinds import CASES

import opsmith


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_right(name: str) -> None:
    function_class, sample, adopted, errors, _ = CASES[name]
    torch.manual_seed(0)
    subject: Any = function_class
    if adopted is not None:
        called = f"wild_kinds::{name.replace('-', '_')}"
        subject = opsmith.adopt(function_class, called, samples=lambda: [sample()], **adopted)
    report = opsmith.check(subject, samples=[sample()])
    found = {
        word for each in report.failures if each.severity == "error" for word in (each.property, each.cause)
    }
    assert found & {*errors} if errors else not found, report
