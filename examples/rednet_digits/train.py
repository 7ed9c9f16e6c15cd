"""Train a small RedNet on handwritten digits, in one process or, by `torchrun`, in several.

python examples/rednet_digits/train.py
torchrun --nproc-per-node 2 examples/rednet_digits/train.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import checkpoint
from checkpoint import CheckpointError
from files import replacing
from needs import MissingError, refuse_missing
from options import Options, parse
from processes import Processes, connected, started
from training import DivergedError, Training

if TYPE_CHECKING:
    from progress import Voice

TARGET = 0.98
"""The accuracy on held-out images that the default options reach."""


def run(options: Options, processes: Processes, voice: Voice) -> Training:
    """Train as the options say; after every epoch there is a checkpoint on the disk.

    Raises:
        CheckpointError: If there is none to go on from, or one that would be overwritten.
        DivergedError: If the loss is no finite number any more.
    """
    configuration, last = options.configuration, options.out / "last.pt"
    state = _state(options)
    options.out.mkdir(parents=True, exist_ok=True)
    training = Training(configuration, options.device, processes)
    if state is not None:
        checkpoint.restore(last, training, state)
        voice.say(f"going on from {last}, epoch {len(training.history)} of {training.epochs}")
    with voice.bars(training.epochs, len(training.history), training.steps) as advance:
        while len(training.history) < training.epochs:
            record = training.epoch(advance)
            if processes.rank == 0:
                _write(options, training)
            voice.say(
                f"epoch {record['epoch']:>3} of {training.epochs}: "
                f"training loss {record['training_loss']:.4f}, "
                f"held-out loss {record['held_out_loss']:.4f}, accuracy {record['accuracy']:.2%}"
            )
    return training


def _state(options: Options) -> dict[str, Any] | None:
    """The state to go on from, if any. An unfinished run is not overwritten: its work would be lost."""
    last = options.out / "last.pt"
    if not options.resume and not last.exists():
        return None
    written, state = checkpoint.read(last)
    if options.resume:
        checkpoint.refuse_other(last, written, options.configuration)
        return state
    done, epochs = len(state["history"]), written["epochs"]
    if done < epochs:
        raise CheckpointError(
            f"{last} is of a run that has come to epoch {done} of {epochs}; go on from it with --resume, "
            "move it away, or name another folder with --out"
        )
    return None


def _write(options: Options, training: Training) -> None:
    """Write what there is so far; the last checkpoint at the end, as it says that the epoch is done."""
    configuration, state = options.configuration, training.state_dict()
    if training.is_best():
        checkpoint.write(options.out / "best.pt", configuration, state)
    with replacing(options.out / "history.json") as path:
        written = {"configuration": configuration.to_dict(), "history": training.history}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    checkpoint.write(options.out / "last.pt", configuration, state)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when the training is done, 1 if it diverged, 2 if it could not begin, 130 after Ctrl-C.
    """
    processes = started()
    options = parse(arguments, processes)
    try:
        refuse_missing()
        from progress import Voice

        voice = Voice(processes)
        with connected(processes):
            training = run(options, processes, voice)
    except (MissingError, CheckpointError, DivergedError) as error:
        if processes.rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, DivergedError) else 2
    except KeyboardInterrupt:
        if processes.rank == 0:
            print("train.py: interrupted; --resume goes on after the last whole epoch", file=sys.stderr)
        return 130
    if processes.rank == 0:
        from curve import draw

        draw(training.history, TARGET, options.out)
    accuracy = training.history[-1]["accuracy"]
    voice.say(f"{accuracy:.2%} of {len(training.held_out)} held-out images read right (target: {TARGET:.0%})")
    voice.say(f"results: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
