"""Torch's random state in a check."""

from types import SimpleNamespace

import pytest
import torch

from opsmith.checking.side_effects.global_settings import seed_torch


@pytest.mark.parametrize("name", ["manual_seed_all", "manual_seed"])
def test_the_generators_of_an_accelerator_are_seeded_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.mps` has one device, and `manual_seed` alone."""
    seeds: list[int] = []
    device = SimpleNamespace(**{"manual_seed": None, name: seeds.append})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: "mps")
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: device)
    before = torch.get_rng_state()
    seed_torch(7)
    drawn = torch.rand(3)
    torch.default_generator.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    assert seeds == [7]
    torch.set_rng_state(before)
