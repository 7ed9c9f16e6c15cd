"""Numbers for the samples of the held-out corpus: the same in each run, whatever torch has drawn before."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def uniform(
    *shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers between `low` and `high`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + (high - low) * drawn).to(dtype)


def whole(*shape: int, high: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0 to below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
