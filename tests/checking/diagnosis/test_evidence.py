"""Guesses at a cause: each is made where the numbers bear it out, and not where they nearly do."""

import pytest
import torch
from torch import Tensor

from opsmith.checking.diagnosis import Observation, diagnose


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


A = numbers(4, 4)
B = numbers(3, 5)
Z = numbers(4, dtype=torch.complex128)


@pytest.mark.parametrize(
    ("got", "expected", "cause", "evidence"),
    [
        (None, A, "missing-gradient", "it is None"),
        (torch.zeros_like(A), A, "missing-gradient", "it is zero everywhere"),
        (-A, A, "sign", "it is the right tensor times -1"),
        (2 * A, A, "scale", "it is the right tensor times 2"),
        (A / 3, A, "scale", "it is the right tensor times 1/3"),
        (A * 2.71828, A, "scale", "it is the right tensor times 2.71828"),
        (-2 * A, A, "scale", "it is the right tensor times -2"),
        (1j * Z, Z, "scale", "it is the right tensor times 0+1j"),
        (Z.conj(), Z, "sign", "it is the complex conjugate of the right tensor"),
        (A.mT, A, "transposed", "it is the transpose of the right tensor (relative error 0 after"),
        (B.mT.reshape(3, 5), B, "transposed", "it is laid out as if dimensions 0 and 1 were swapped"),
        (A.flip(0), A, "unknown", "in the reverse order along dimension 0"),
        (A / 0, A, "nan", "it is infinite everywhere"),
        (
            A.float().to(torch.bfloat16).float(),
            A,
            "precision",
            "it consists of bfloat16 numbers, so it was computed in bfloat16",
        ),
        (A + 0.1, A, "unknown", ""),
        (A * torch.linspace(1, 2, 16, dtype=torch.float64).view(4, 4), A, "unknown", ""),
        (A * (1 + 1e-9), A, "unknown", ""),  # so near that every guess would hold
        (torch.tensor([3.7]), torch.tensor([1.3]), "unknown", ""),  # any number is a multiple of any other
        (torch.tensor([2.6]), torch.tensor([1.3]), "scale", "it is the right tensor times 2"),
    ],
)
def test_a_cause_is_what_the_numbers_bear_out(
    got: Tensor | None, expected: Tensor, cause: str, evidence: str
) -> None:
    found = diagnose(Observation(got, expected))
    assert (found.cause, evidence in found.reason) == (cause, True), found


def test_a_symmetric_matrix_is_no_evidence_for_a_transpose() -> None:
    symmetric = A + A.mT
    assert diagnose(Observation(symmetric + 1, symmetric)).cause == "unknown"
