"""One use of torch's private names, and the decision whether it can be made with the torch that is here.

The decision is made once in a process, when the use is first needed: by a self-test, which computes a tiny
case by the private names and looks at the answer. Where the suite has passed on this torch, that is known and
only the names are looked for: `torch.func.grad` alone makes torch import a second's worth of modules.
"""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch

from opsmith import config, errors
from opsmith.torch_library.capabilities.private import steady_device_guard

TESTED = ("2.11", "2.13")
"""The versions of torch that the whole suite passes on."""


@dataclass(frozen=True)
class Capability:
    """A use of torch's private names.

    Args:
        name: What it is called; its functions are in the module of this name in `private`, and in `public`.
        purpose: What it is for.
        instead: What happens where it is off; None where opsmith cannot do without it.
        provides: Names of its functions and values.
    """

    name: str
    purpose: str
    instead: str | None
    provides: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """Whether a capability is on.

    Args:
        on: Whether its private names are used.
        why: Why not, in a few words; empty where it is on.
    """

    on: bool
    why: str = ""


_decided: dict[str, Decision] = {}
_deciding = threading.RLock()


def decide(capability: Capability) -> Decision:
    """Whether a capability is on; the first time, its self-test is run on an untested torch.

    Warns:
        UserWarning: Once, saying what happens instead.
    """
    with _deciding:
        known = _decided.get(capability.name)
        if known is not None:
            return known
        asked_for = capability.instead is not None and config.conservative()
        decision = (
            Decision(False, f"{config.CONSERVATIVE}=1")
            if asked_for
            else examine(capability, self_test=not _is_tested(torch.__version__))
        )
        _decided[capability.name] = decision
    if not decision.on and not asked_for and capability.instead is not None:
        warnings.warn(
            f"opsmith: with torch {torch.__version__}, the capability `{capability.name}` "
            f"({capability.purpose}) is off, since its self-test failed: {decision.why}. "
            f"Instead: {capability.instead}. `opsmith doctor` lists all capabilities; "
            f"opsmith is tested with torch {' and '.join(TESTED)}.",
            stacklevel=4,
        )
    return decision


def means(capability: Capability) -> ModuleType:
    """The module with the functions of a capability: by private names where it is on, else by public ones.

    Raises:
        UnsupportedTorchError: Where it is off, and opsmith cannot do without it.
    """
    decision = decide(capability)
    if not decision.on and capability.instead is None:
        raise errors.UnsupportedTorchError(
            f"opsmith cannot work with torch {torch.__version__}: {capability.purpose}",
            expected=f"torch {' or '.join(TESTED)}, which opsmith is tested with",
            got=decision.why,
            hint=f"pip install 'torch=={TESTED[-1]}.*'; `opsmith doctor` lists what works here",
        )
    return _module("private" if decision.on else "public", capability)


def _module(kind: str, capability: Capability) -> ModuleType:
    return importlib.import_module(f"{__package__}.{kind}.{capability.name}")


def _is_tested(version: str) -> bool:
    """Whether a version of torch is a release that the suite passes on."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release is not None and release[1] in TESTED


def examine(capability: Capability, *, self_test: bool = True) -> Decision:
    """Look whether a capability works, whatever was decided.

    Args:
        capability: What to look at.
        self_test: Whether its self-test is run; else its private names are looked for, no more.
    """
    try:
        private = _module("private", capability)
    except Exception as error:  # whatever a future torch does where a name was
        return Decision(False, _in_words(error))
    return _run_self_test(private) if self_test else Decision(True)


def _run_self_test(private: ModuleType) -> Decision:
    """Run a self-test, in a thread: no mode, transform or region of the one who asks reaches into that."""
    failures: list[Exception] = []
    steady_device_guard()

    def run() -> None:
        try:
            private.self_test()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=f"self-test of {private.__name__}")
    thread.start()
    thread.join()
    return Decision(False, _in_words(failures[0])) if failures else Decision(True)


def _in_words(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
