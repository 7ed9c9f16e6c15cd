"""Sizes of a decoder, from which its network and its cache are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder: each is a whole number of at least 1.

    Args:
        vocabulary: Number of tokens, V.
        width: Number of features of a token between the blocks, W.
        layers: Number of blocks.
        heads: Heads of the attention, H. Each has D = W / H features, an even number. hidden: Width in the
            second half of a block, F. positions: Maximum number of tokens of a sequence.

    Raises:
        ValueError: If a size is not a whole number of at least 1, or the width is not a multiple of twice the
            heads.

    Example:
        >>> DecoderSizes(width=32, heads=2).head_dim
        16
    """

    vocabulary: int = 256
    width: int = 96
    layers: int = 3
    heads: int = 3
    hidden: int = 192
    positions: int = 256

    def __post_init__(self) -> None:
        given: dict[str, object] = {**self.to_dict()}
        for name, size in given.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"DecoderSizes expects `{name}` to be a whole number of at least 1, got {size!r}; "
                    "choose different sizes: `DecoderSizes(width=96, layers=3, heads=3)`"
                )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"DecoderSizes expects the width to be a multiple of {2 * self.heads}, twice the heads, "
                f"got {self.width}; choose a different width: `DecoderSizes(width={32 * self.heads}, "
                f"heads={self.heads})`"
            )

    @property
    def head_dim(self) -> int:
        """Number of features of a head, D."""
        return self.width // self.heads

    def to_dict(self) -> dict[str, int]:
        """Return the sizes by name."""
        return asdict(self)
