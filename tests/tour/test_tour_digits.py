"""The network that reads handwritten digits."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith import ops
from opsmith.tour import TourContext, digits
from opsmith.tour.digits import DigitNetwork


def context(out: Path, epochs: int) -> TourContext:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TourContext(out, device, Console(file=io.StringIO()), digits_epochs=epochs)


@pytest.mark.slow
def test_learns(tmp_path: Path) -> None:
    result = digits.run(context(tmp_path, 4))
    assert result.details["accuracy"] > 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.json", "digits.pt"]
    written = json.loads((tmp_path / "digits.json").read_text())
    assert written["curve"]["epoch"] == [1, 2, 3, 4]
    assert written["curve"]["accuracy"][-1] == written["accuracy"]
    matrix = torch.tensor(written["confusion_matrix"])
    assert matrix.sum().item() == written["test_images"] == 360
    assert matrix.diagonal().sum().item() / 360 == written["accuracy"]
    network = DigitNetwork()
    network.load_state_dict(torch.load(tmp_path / "digits.pt"))
    assert torch.equal(digits.confusion_matrix(network, digits.split_digits(0)[1]), matrix)


@pytest.mark.slow
def test_reaches_its_target(tmp_path: Path) -> None:
    result = digits.run(context(tmp_path, TourContext.digits_epochs))
    assert result.passed
    assert result.details["accuracy"] >= 0.97


@pytest.mark.slow
def test_an_accuracy_that_is_too_low_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "ACCURACY", 1.01)
    assert not digits.run(context(tmp_path, 1)).passed


def test_split_is_stratified_and_disjoint() -> None:
    training, test = digits.split_digits(0)
    assert len(training) + len(test) == 1797
    counts = training.labels.bincount(), test.labels.bincount()
    assert torch.all((counts[0] / len(training) - counts[1] / len(test)).abs() < 0.01)
    known = {tuple(image.flatten().tolist()) for image in training.pixels}
    assert not any(tuple(image.flatten().tolist()) in known for image in test.pixels)
    assert training.pixels.shape[1:] == (1, 8, 8)
    assert 0 <= training.pixels.min() < training.pixels.max() == 1
    again, _ = digits.split_digits(0)
    assert torch.equal(training.pixels, again.pixels)


def test_shifted_images_are_shifted() -> None:
    pixels = torch.zeros(200, 1, 8, 8)
    pixels[:, 0, 3, 4] = 1
    images = digits.Images(pixels, torch.zeros(200, dtype=torch.int64))
    (batch,) = images.batches(200, torch.Generator().manual_seed(0))
    _, _, rows, columns = batch.pixels.nonzero(as_tuple=True)
    assert len(rows) == 200
    assert set(rows.tolist()) == {2, 3, 4}
    assert set(columns.tolist()) == {3, 4, 5}
    still = ((rows == 3) & (columns == 4)).float().mean()
    assert still == pytest.approx(1 - digits.SHIFTED * 8 / 9, abs=0.1)


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(func.name())
        return func(*args, **kwargs or {})


def test_the_network_is_made_of_our_operators() -> None:
    images: Tensor = torch.rand(2, 1, 8, 8)
    with Names() as names, torch.no_grad():
        assert DigitNetwork()(images).shape == (2, 10)
    assert names.seen >= {"opsmith::involution", "opsmith::linear", "opsmith_tour::swish"}
    assert not names.seen & {"aten::addmm", "aten::silu"}


def test_says_what_computes_involution(tmp_path: Path) -> None:
    given = context(tmp_path, 1)
    result = digits.run(given)
    images = torch.rand(2, 32, 8, 8, device=given.device)
    kernels = torch.rand(2, 4, 3, 3, 8, 8, device=given.device)
    expected = ops.involution.explain(images, kernels, 1, 1)
    computed = result.details["computed_by"]
    assert list(computed) == [
        "opsmith::involution",
        "opsmith::involution_input_gradient",
        "opsmith::involution_weight_gradient",
    ]
    (way,) = computed["opsmith::involution"]
    assert way.startswith(expected.forward)
    assert way.startswith("kernel") or all(reason in way for reason in expected.rejected)
    assert all(computed.values())
    assert isinstance(given.console.file, io.StringIO)
    printed = given.console.file.getvalue()
    assert all(f"{name}: {', '.join(ways)}\n" in printed for name, ways in computed.items())


def test_looking_at_what_computes_leaves_the_network_as_it_was() -> None:
    torch.manual_seed(0)
    network = DigitNetwork()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    digits.training_implementations(network, digits.Images(torch.rand(4, 1, 8, 8), torch.arange(4)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
