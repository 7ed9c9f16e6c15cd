"""Guesses at a cause: each is made where the numbers bear it out, and not where they nearly do."""

import pytest
import torch
from torch import Tensor

from opsmith.checking.hypotheses import explain_difference


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


A = numbers(4, 4)
B = numbers(3, 5)
Z = numbers(4, dtype=torch.complex128)


@pytest.mark.parametrize(
    ("got", "expected", "cause", "evidence"),
    [
        (None, A, "missing-gradient", "there is none (None)"),
        (torch.zeros_like(A), A, "missing-gradient", "it is zero everywhere"),
        (-A, A, "sign", "it is the right one times -1"),
        (2 * A, A, "scale", "it is the right one times 2"),
        (A / 3, A, "scale", "it is the right one times 1/3"),
        (A * 2.71828, A, "scale", "it is the right one times 2.71828"),
        (-2 * A, A, "scale", "it is the right one times -2"),
        (1j * Z, Z, "scale", "it is the right one times 0+1j"),
        (Z.conj(), Z, "conjugate", "it is the complex conjugate of the right one"),
        (A.mT, A, "transposed", "dimensions 0 and 1 are swapped"),
        (B.mT.reshape(3, 5), B, "transposed", "it is laid out as if dimensions 0 and 1 were swapped"),
        (A.flip(0), A, "permuted", "it has the right values in another order"),
        (A / 0, A, "nan", "16 of 16 elements are nan or infinite"),
        (
            A.float().to(torch.bfloat16).float(),
            A,
            "precision",
            "every element is a bfloat16 number, so it was computed in bfloat16",
        ),
        (A + 0.1, A, "unknown", ""),
        (A * torch.linspace(1, 2, 16, dtype=torch.float64).view(4, 4), A, "unknown", ""),
        (A * (1 + 1e-9), A, "unknown", ""),  # so near that every guess would hold
        (torch.tensor([3.7]), torch.tensor([1.3]), "unknown", ""),  # any number is a multiple of any other
        (torch.tensor([2.6]), torch.tensor([1.3]), "scale", "it is the right one times 2"),
    ],
)
def test_a_cause_is_what_the_numbers_bear_out(
    got: Tensor | None, expected: Tensor, cause: str, evidence: str
) -> None:
    assert explain_difference(got, expected) == (cause, evidence)


def test_a_symmetric_matrix_is_no_evidence_for_a_transpose() -> None:
    symmetric = A + A.mT
    assert explain_difference(symmetric + 1, symmetric)[0] == "unknown"
