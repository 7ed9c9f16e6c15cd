"""Write text with a trained network, and measure it with and without the bundled operators.

python examples/decoder/generate.py --prompt "The class statement"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import checkpoint
import torch
from checkpoint import CheckpointError
from options import parser, real, whole
from plain import PlainDecoder
from progress import Voice
from speed import contender, decode_rates, lines

from opsmith.ops.decoder import Decoder, PagedCache, generate

PROMPTS = ("The `", "A class is ", "import ", "If the ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when it is done, 2 if there is no checkpoint to use or a prompt does not fit, 130 after Ctrl-C.
    """
    options = parser("generate.py", "Write text with the network that train.py has trained.")
    options.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what to continue; several are continued together"
    )
    options.add_argument("--tokens", type=whole(1), default=200, metavar="N", help="bytes to write")
    options.add_argument(
        "--temperature",
        type=real(0, included=True),
        default=0.6,
        metavar="T",
        help="0 takes the likeliest byte",
    )
    options.add_argument(
        "--compile", action="store_true", help="compile the decode step, which takes seconds once"
    )
    options.add_argument(
        "--speed",
        action="store_true",
        help="measure tokens per second with and without the bundled operators",
    )
    given = options.parse_args(arguments)
    torch.set_num_threads(given.threads)
    voice = Voice()
    try:
        network, _ = checkpoint.read(given.out / "last.pt")
        prompts = given.prompt or list(PROMPTS)
        step = torch.compile(network.decode, fullgraph=True) if given.compile else network.decode
        cache = PagedCache(network.sizes, len(prompts))
        tokens = generate(
            network,
            cache,
            [list(prompt.encode(errors="surrogateescape")) for prompt in prompts],
            given.tokens,
            temperature=given.temperature,
            generator=torch.Generator().manual_seed(given.seed),
            decode=step,
        )
        with voice.bar("writing", given.tokens) as advance:
            written = []
            for each in tokens:
                written.append(each)
                advance()
    except (CheckpointError, ValueError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("generate.py: interrupted", file=sys.stderr)
        return 130
    for prompt, row in zip(prompts, torch.stack(written, 1).tolist(), strict=True):
        voice.say(f"--- {prompt!r}")
        voice.say(prompt + bytes(row).decode(errors="replace"))
    if given.speed:
        voice.say("--- decode steps: tokens per second, and the ratio to plain PyTorch")
        for line in measured(network, len(prompts), given.compile):
            voice.say(line)
    return 0


def measured(network: Decoder, sequences: int, also_compiled: bool) -> list[str]:
    """Lines with the rates of this network, and of the same one in torch's own operations."""
    networks = {"plain PyTorch": PlainDecoder.of(network), "bundled operators": network}
    contenders = [
        contender(name, each, sequences, compiled=compiled)
        for compiled in ((False, True) if also_compiled else (False,))
        for name, each in networks.items()
    ]
    half = network.sizes.positions // 2
    return lines(decode_rates(contenders, half, min(32, half), 5), "plain PyTorch")


if __name__ == "__main__":
    sys.exit(main())
