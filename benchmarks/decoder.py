"""Tokens per second of a small language model, with and without the bundled operators, in one run.

The model is that of examples/decoder, with the weights that the tour ships. The other has the same weights,
and torch's own operations. Both are measured in prefill and decode steps, eager and compiled, in turns within
each round. A figure is the median over rounds, a ratio that of the ratios to plain PyTorch, eager, within
each round. Then come the bytes that a decode step allocates, beside those of its logits, its buffers and the
cache.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "decoder"))

from plain import PlainDecoder
from speed import allocations, contender, decode_rates, lines, prefill_rates

from opsmith.tour.decoder import load_decoder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=64, help="decode steps in a round")
    parser.add_argument("--length", type=int, default=128, help="tokens before them, and in a prefill")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    network, _ = load_decoder()
    networks = {"plain PyTorch": PlainDecoder.of(network), "bundled operators": network}
    print(f"torch {torch.__version__}, {given.threads} threads, {given.rounds} rounds, {network.sizes}")
    for sequences in given.sequences:
        torch.compiler.reset()
        contenders = [
            contender(name, each, sequences, compiled=compiled)
            for compiled in (False, True)
            for name, each in networks.items()
        ]
        print(f"decode, {sequences} sequences after {given.length} tokens")
        rates = decode_rates(contenders, given.length, given.steps, given.rounds)
        print(*lines(rates, "plain PyTorch"), sep="\n")
        print(f"prefill, {sequences} sequences of {given.length} tokens")
        print(*lines(prefill_rates(contenders, given.length, given.rounds), "plain PyTorch"), sep="\n")
        tokens = torch.zeros(sequences, dtype=torch.int64)
        for each in contenders:
            each.cache.lengths.fill_(given.length)
            logits = each.step(tokens, each.cache)
            sizes = allocations(partial(each.step, tokens, each.cache))
            print(f"{each.name:34s} a decode step allocates {len(sizes):3d} times, {sum(sizes):9d} bytes")
        cache = contenders[-1].cache
        buffers = sum(buffer.nbytes for buffer in cache.buffers.tensors())
        print(
            f"logits {logits.nbytes} bytes, buffers of a step {buffers} bytes, "
            f"cache {cache.keys.nbytes + cache.values.nbytes} bytes"
        )


if __name__ == "__main__":
    main()
