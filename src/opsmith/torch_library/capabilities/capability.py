"""Table of the uses of torch's private names, and the decision about each for the installed torch."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from opsmith import config, errors
from opsmith.core.forked_locks import lock_of
from opsmith.torch_library.capabilities.private import steady_device_guard

TESTED = ("2.11", "2.13", "2.14", "2.15")
"""Versions of torch on which the whole test suite passes."""


@dataclass(frozen=True)
class Capability:
    """A use of torch's private names.

    Args:
        name: Name; its functions are in the module of this name in `private`, and in `public`.
        purpose: Purpose.
        instead: Behaviour if it is off; None if opsmith requires it.
        provides: Names of its functions and values.
    """

    name: str
    purpose: str
    instead: str | None
    provides: tuple[str, ...]


@dataclass(frozen=True)
class CapabilityStatus:
    """The decision about a capability for the installed torch.

    Args:
        capability: The capability.
        on: True if its private names are used.
        why: Short reason why they are not used; empty if it is on.
    """

    capability: Capability
    on: bool
    why: str = ""

    @property
    def fatal(self) -> bool:
        """Return True if opsmith does not work without it."""
        return not self.on and self.capability.instead is None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {
            "name": self.capability.name,
            "purpose": self.capability.purpose,
            "on": self.on,
            "why": self.why or None,
            "instead": None if self.on else self.capability.instead,
            "required": self.capability.instead is None,
        }


_decided: dict[str, CapabilityStatus] = {}
_deciding = lock_of(sys.modules[__name__], "_deciding")


class _SelfTest(threading.Thread):
    """Thread that runs a self-test; its starter waits for it, and holds the lock `_deciding` meanwhile."""


def decide(capability: Capability) -> CapabilityStatus:
    """Decide whether a capability is on; the first time, run its self-test if torch is untested.

    Warns:
        UserWarning: Once, with the replacement behaviour, if it is off.
    """
    # A self-test may need another capability. Such needs must not form a cycle: each starts a thread.
    in_self_test = isinstance(threading.current_thread(), _SelfTest)
    with nullcontext() if in_self_test else _deciding:
        known = _decided.get(capability.name)
        if known is not None:
            return known
        by_config = capability.instead is not None and config.conservative()
        decision = (
            CapabilityStatus(capability, False, f"{config.CONSERVATIVE}=1")
            if by_config
            else examine(capability, self_test=not _is_tested(torch.__version__))
        )
        _decided[capability.name] = decision
    if not decision.on and not by_config and capability.instead is not None:
        warnings.warn(
            f"opsmith: with torch {torch.__version__}, the capability `{capability.name}` "
            f"({capability.purpose}) is off, because its self-test failed: {decision.why}. "
            f"Instead: {capability.instead}. `opsmith doctor` lists all capabilities; "
            f"opsmith is tested with torch {describe_tested_versions('and')}.",
            stacklevel=4,
        )
    return decision


def implementation(capability: Capability) -> ModuleType:
    """The module that implements a capability: by private names if it is on, else by public names.

    Raises:
        UnsupportedTorchError: If it is off and has no replacement.
    """
    decision = decide(capability)
    if not decision.on and capability.instead is None:
        raise errors.UnsupportedTorchError(
            f"opsmith cannot work with torch {torch.__version__}: {capability.purpose}",
            expected=f"torch {describe_tested_versions('or')}, which opsmith is tested with",
            got=decision.why,
            hint=f"pip install 'torch=={TESTED[-1]}.*'; `opsmith doctor` lists what works here",
        )
    module = f"private.{capability.name}" if decision.on else "public"
    return importlib.import_module(f"{__package__}.{module}")


def describe_tested_versions(conjunction: str) -> str:
    """Return the versions of torch on which the suite passes, as text.

    Example:
        >>> describe_tested_versions("or")
        '2.11, 2.13, 2.14 or 2.15'
    """
    return f"{', '.join(TESTED[:-1])} {conjunction} {TESTED[-1]}"


def _is_tested(version: str) -> bool:
    """Return True if the suite passes on this release of torch."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release is not None and release[1] in TESTED


def examine(capability: Capability, *, self_test: bool = True) -> CapabilityStatus:
    """Examine whether a capability works, independently of the decision.

    Args:
        capability: The capability.
        self_test: True to run its self-test; otherwise only its private names are looked up.
    """
    try:
        private = importlib.import_module(f"{__package__}.private.{capability.name}")
    except Exception as error:  # a future torch may raise any exception
        return CapabilityStatus(capability, False, _first_line(error))
    why = _self_test_failure(private) if self_test else ""
    return CapabilityStatus(capability, not why, why)


def _self_test_failure(private: ModuleType) -> str:
    """Run a self-test in a thread, without the caller's modes and transforms; return its failure."""
    failures: list[Exception] = []
    steady_device_guard()

    def run() -> None:
        try:
            private.self_test()
        except Exception as error:
            failures.append(error)

    thread = _SelfTest(target=run, name=f"self-test of {private.__name__}")
    thread.start()
    thread.join()
    return _first_line(failures[0]) if failures else ""


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


CAPABILITIES = {
    each.name: each
    for each in (
        Capability(
            name="dispatch",
            purpose="compute below autograd, see writes, replace an operator",
            instead=None,
            provides=(
                "above_autograd",
                "below_autograd",
                "counting_writes",
                "resolving_bits",
                "redispatch_below_autograd",
                "without_modes",
                "seen_by_modes",
                "without_data",
                "fresh_symbols",
                "is_a_size",
                "marks",
                "states",
                "version",
                "version_counter",
                "versions",
                "viewed",
                "operator_exists",
                "destroy",
            ),
        ),
        Capability(
            name="known_calls",
            purpose="fast calls of known signatures, with one call through the dispatcher; compiled code "
            "with a graph break under a transform of `torch.func`",
            instead="every call is validated in full, and takes longer; a graph break under a transform "
            "raises an error of torch",
            provides=(
                "any_autocast",
                "call_keys",
                "direct_apply",
                "direct_backward",
                "direct_call",
                "frame_callback",
                "nothing_active",
                "recorder",
            ),
        ),
        Capability(
            name="calls_in_cpp",
            purpose="calls and autograd nodes in C++, if they are built for this Python and this torch",
            instead="Python does the same work, and takes longer",
            provides=("calls_in_cpp", "unwatched"),
        ),
        Capability(
            name="torch_func",
            purpose="transforms of `torch.func`, level by level",
            instead="`grad`, `vjp`, and `vmap` of the reference use `torch.autograd.Function`; "
            "forward mode, autocast, `functionalize`, and `vmap` of an opaque operator or over no examples "
            "are refused; a compiled `vmap` of `grad` with hidden results raises an error of torch",
            provides=(
                "Transform",
                "innermost_transform",
                "is_mapped",
                "SingleLevelFunction",
                "single_level_nodes",
                "unwrap_dead",
                "innermost_value",
                "is_functional",
                "below_transforms",
                "over_examples",
                "reduce_to_dim",
                "transform_kernel",
                "is_gradient_batch",
            ),
        ),
        Capability(
            name="forward_mode",
            purpose="tangents at the current level of forward mode, also in compiled code",
            instead="tangents only in eager code, by `torch.autograd.forward_ad`, which takes longer",
            provides=(
                "forward_mode_active",
                "forward_mode_allowed",
                "forward_mode_on",
                "primal_of",
                "outside_graph",
                "unpack_dual",
                "make_dual",
            ),
        ),
        Capability(
            name="autocast",
            purpose="autocast's dispatch keys, also in a trace",
            instead="`torch.autocast(..., enabled=False)` around the operator",
            provides=("autocast_key", "without_autocast", "serve_autocast_while_tracing"),
        ),
        Capability(
            name="inlining",
            purpose="compiled code that contains the reference instead of the operator, and fuses it",
            instead="the operator is opaque in compiled code, and runs as a whole",
            provides=(
                "FUNCTIONALIZATION",
                "copy_in_trace",
                "exporting",
                "only_stand_ins",
                "run_in_traces",
                "source_in_trace",
                "symbolic_functions",
                "traced",
            ),
        ),
        Capability(
            name="compiled_code",
            purpose="an operator's sources in the keys of the caches of compiled code",
            instead="torch's caches on disk are turned off in a process that compiles an operator",
            provides=("mark_compiled_code", "compiler_imported"),
        ),
        Capability(
            name="sharding",
            purpose="operators on the shards of DTensors, and writes into them, if a trial proves "
            "that the result is right",
            instead="the reference computes an operator on DTensors, and an in-place operator writes only "
            "into replicated DTensors; an implicit replication that the caller has requested is ignored",
            provides=(
                "replicates_implicitly",
                "implicit_replication",
                "observe_shards",
                "shard_of",
                "shard_key",
                "placed_like",
            ),
        ),
        Capability(
            name="fake_tensors",
            purpose="the check of fake kernels, including devices",
            instead="the check uses tensors on the device `meta`, and does not notice a wrong device, or a "
            "constant size in a fake kernel",
            provides=("fake_mode", "symbolic_mode"),
        ),
        Capability(
            name="dispatch_mode",
            purpose="the check's list of random operations of a reference, and of low-precision operations "
            "of a backward; the refusal to trace a reference that writes into its argument; in-place "
            "operators of other libraries under selective checkpoints",
            instead="the check finds undeclared randomness only if two runs differ, and finds no float32 "
            "constant in a class's backward; compiled code with a reference that writes into its argument "
            "also writes; an operator of another library under a selective checkpoint does not write again",
            provides=("tracing_imported", "observe_operators", "observe_writes", "operators_behind_modes"),
        ),
        Capability(
            name="library_operators",
            purpose="operators of other libraries: their schemas, kernels and rules",
            instead="`opsmith.adopt` refuses operators of `torch.ops`; a derivative through an operator "
            "without autograd may be zero",
            provides=(
                "MISSING",
                "ArgumentSchema",
                "OperatorSchema",
                "overloads_of",
                "signature_of",
                "registers_kernel",
                "kernel_at",
                "registrations",
                "CustomParts",
                "custom_parts",
                "has_derivative",
                "around_operators",
                "shards_itself",
            ),
        ),
        Capability(
            name="fake_registration",
            purpose="an operator's fake kernel, with the place of its declaration for torch's messages, or "
            "instead of an existing fake kernel",
            instead="`torch.library.register_fake`; a declaration takes longer, and the fake kernel of an "
            "adopted operator may outlive the adoption",
            provides=("add_fake",),
        ),
        Capability(
            name="fused_graphs",
            purpose="kernels that are derived from the reference, with a backward of their own",
            instead="the reference computes in place of these kernels",
            provides=("FusedGraphs", "compile_graph", "fused_graphs", "load_graph"),
        ),
        Capability(
            name="onnx_registry",
            purpose="a shared registry of translations for the model and the bodies of an export to ONNX",
            instead="torch makes the registry twice, and an export takes longer",
            provides=("onnx_translator",),
        ),
        Capability(
            name="autograd_graph",
            purpose="pictures of autograd's graph: shapes and dtypes of results, and saved values without "
            "unpacking them; the many small backwards of a check",
            instead="nodes are drawn without the shapes and dtypes of their results, values packed by hooks "
            "are unpacked, and keyword arguments of TorchScript are not shown; checks take longer",
            provides=(
                "forward_class",
                "result_metadata",
                "saved_tensors",
                "overwritten",
                "after_modules",
                "differentiated",
            ),
        ),
    )
}
"""Capabilities by name; `instead` is None if opsmith requires the capability."""

PROVIDERS = {name: each for each in CAPABILITIES.values() for name in each.provides}
"""The capability of each name that this package provides."""


def capability_statuses() -> list[CapabilityStatus]:
    """Examine every capability now, with its self-test, also on a tested torch."""
    conservative = config.conservative()
    rows = []
    with _deciding:
        for capability in CAPABILITIES.values():
            if conservative and capability.instead is not None:
                rows.append(CapabilityStatus(capability, False, f"{config.CONSERVATIVE}=1"))
            else:
                rows.append(examine(capability))
    return rows
