"""The digits of the example that trains a RedNet: their split, their batches and their shifts."""

from __future__ import annotations

import pytest
import torch
from rednet_digits_run import module

pytestmark = pytest.mark.usefixtures("on_the_path")


@pytest.mark.slow
def test_the_held_out_images_are_a_fifth_of_each_digit_and_not_trained_on() -> None:
    training, held_out = module("data").digits(0)
    assert (len(training), len(held_out)) == (module("options").TRAINING_IMAGES, 360)
    counts = training.labels.bincount() / len(training), held_out.labels.bincount() / len(held_out)
    assert (counts[0] - counts[1]).abs().max() < 0.01
    known = {tuple(image.flatten().tolist()) for image in training.pixels}
    assert not any(tuple(image.flatten().tolist()) in known for image in held_out.pixels)
    assert held_out.pixels.shape == (360, 1, 8, 8)
    assert (training.pixels.min(), training.pixels.max()) == (0, 1)
    assert not torch.equal(module("data").digits(1)[1].labels, held_out.labels)


def test_shifted_images_are_moved_by_one_pixel_at_most() -> None:
    data = module("data")
    pixels = torch.zeros(600, 1, 8, 8)
    pixels[:, 0, 3, 4] = torch.arange(600) + 1  # each image keeps its own
    moved = data.shifted(pixels, torch.Generator().manual_seed(0))
    images, _, rows, columns = moved.nonzero(as_tuple=True)
    assert torch.equal(images, torch.arange(600))
    assert torch.equal(moved[images, 0, rows, columns], images + 1.0)
    assert (set(rows.tolist()), set(columns.tolist())) == ({2, 3, 4}, {3, 4, 5})
    still = ((rows == 3) & (columns == 4)).float().mean().item()
    assert still == pytest.approx(1 - data.SHIFTED * 8 / 9, abs=0.06)


def test_batches_are_full_and_the_same_for_the_same_numbers() -> None:
    data = module("data")
    images = data.Images(torch.rand(70, 1, 8, 8), torch.arange(70))
    first, again = (list(data.batches(images, 32, torch.Generator().manual_seed(3))) for _ in range(2))
    assert [len(batch) for batch in first] == [32, 32]
    assert len({*torch.cat([batch.labels for batch in first]).tolist()}) == 64
    for ours, theirs in zip(first, again, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.pixels, theirs.pixels)
