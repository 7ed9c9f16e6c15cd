"""Train a small language model on the documentation of Python, which comes with Python.

python examples/decoder/train.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import checkpoint
import torch
from files import replacing
from options import parser, real, whole
from progress import Voice
from training import DivergedError, Plan, Training

from opsmith.ops.decoder import DecoderSizes

TESTS = 10
"""Number of tests on the held-out text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when the training is done, 1 if it diverged, 130 after Ctrl-C.
    """
    options = parser("train.py", "Train a small language model on the documentation of Python.")
    options.add_argument("--steps", type=whole(1), default=350, metavar="N", help="batches to learn from")
    options.add_argument("--batch", type=whole(1), default=8, metavar="N", help="pieces of text in a batch")
    options.add_argument(
        "--lr", type=real(0, included=False), default=0.006, metavar="RATE", help="highest learning rate"
    )
    for name, size in DecoderSizes().to_dict().items():
        if name != "vocabulary":  # bytes
            options.add_argument(
                f"--{name}", type=whole(1), default=size, metavar="N", help="size of the network"
            )
    options.add_argument(
        "--weights", type=Path, metavar="FILE", help="also write the weights in float16, as the tour has them"
    )
    given = options.parse_args(arguments)
    sizes = {name: getattr(given, name, size) for name, size in DecoderSizes().to_dict().items()}
    try:
        plan = Plan(given.steps, given.batch, given.lr, given.seed, DecoderSizes(**sizes))
    except ValueError as error:
        options.error(str(error))
    torch.set_num_threads(given.threads)
    words = sys.argv[1:] if arguments is None else arguments
    voice = Voice()
    try:  # before the training, whose weights would be lost
        for folder in (given.out, *([] if given.weights is None else [given.weights.parent])):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        options.error(f"{error.filename} cannot be made: {error.strerror}")
    try:
        training, history = run(plan, voice)
    except DivergedError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        return 130
    about = {
        "command": " ".join(["python examples/decoder/train.py", *words]),
        "text": "pydoc_data.topics of Python " + sys.version.split()[0],
        "torch": str(torch.__version__),
        "steps": plan.steps,
        "held_out_bits_per_byte": history[-1]["held_out"],
    }
    checkpoint.write(given.out / "last.pt", training.network, about)
    if given.weights is not None:
        checkpoint.write(given.weights, training.network, about, torch.float16)
    with replacing(given.out / "history.json") as path:
        path.write_text(json.dumps({**about, "history": history}, indent=2) + "\n", encoding="utf-8")
    voice.say(f"results: {given.out}; to write text: python examples/decoder/generate.py --out {given.out}")
    return 0


def run(plan: Plan, voice: Voice) -> tuple[Training, list[dict[str, float]]]:
    """Train as the plan says, and test now and then.

    Raises:
        DivergedError: If the loss is no finite number any more.
    """
    training = Training(plan)
    history: list[dict[str, float]] = []
    losses: list[float] = []
    every = max(1, plan.steps // TESTS)
    with voice.bar("training", plan.steps) as advance:
        while training.done < plan.steps:
            losses.append(training.step())
            advance()
            if training.done % every == 0 or training.done == plan.steps:
                record = {
                    "step": training.done,
                    "training": sum(losses) / len(losses),
                    "held_out": training.test(),
                }
                history.append(record)
                losses = []
                voice.say(
                    f"step {training.done:>5} of {plan.steps}: training {record['training']:.3f}, "
                    f"held out {record['held_out']:.3f} bits per byte"
                )
    return training, history


if __name__ == "__main__":
    sys.exit(main())
