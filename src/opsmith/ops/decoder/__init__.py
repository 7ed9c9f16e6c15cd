"""Decoder: a small language model made of the in-place operators, with a paged cache.

Source: H. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971,
section 2.2.
"""

from __future__ import annotations

from opsmith.ops.decoder.cache import PagedCache
from opsmith.ops.decoder.generation import generate, pad, sample
from opsmith.ops.decoder.network import Decoder
from opsmith.ops.decoder.sizes import DecoderSizes

__all__ = ["Decoder", "DecoderSizes", "PagedCache", "generate", "pad", "sample"]
