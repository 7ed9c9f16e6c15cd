"""Tools for agents; each runs code in a child process, and returns a fault of the code as a finding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Annotated, Any, Literal

import anyio
from anyio.abc import Process
from mcp.server import MCPServer
from pydantic import Field

from opsmith import __version__, errors, rules
from opsmith.checking.output.annotations import Annotation, Unchecked, annotated
from opsmith.checking.processes.child import describe_exit
from opsmith.checking.report import Report, plain, read_reports
from opsmith.targets import Target

LIMIT_S = 600.0
"""Time limit of a call of a tool."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Order = Annotated[str, Field(pattern=r"^(forward|backward|alternating|random(\(\d+\))?)$")]

GRACE_S = 10.0
"""Time between Ctrl-C and the kill; in this time a check ends its child processes."""

LAST_LINES = 5
"""Number of lines of stderr in the message about a process that died."""

INSTRUCTIONS = (
    "opsmith checks custom PyTorch operators. After each change of an operator, an `autograd.Function` or a "
    "kernel, call `check` on its file. Correct each finding at the line that it names, until the check "
    "passes. A target is FILE.py, FILE.py:NAME or a module."
)


def server() -> MCPServer:
    """Return the server with its tools."""
    made = MCPServer("opsmith", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for tool in (check, explain, emulate, rule):
        made.add_tool(tool)
    return made


async def check(
    target: str,
    effort: Literal["quick", "default", "thorough"] = "quick",
    only: list[str] | None = None,
    samples: str | None = None,
    limit_s: Seconds = LIMIT_S,
) -> dict[str, Any]:
    """Check operators, `autograd.Function` classes or custom ops: results, gradients, kernels, side effects.

    Args:
        target: `FILE.py`, `FILE.py:NAME`, a module or a folder (`kernels/`).
        effort: `quick`, `default` or `thorough`.
        only: Names of the properties to check, such as `forward` and `gradient`; all by default.
        samples: Name of a list of tuples of arguments in the file, for a target with one NAME.
        limit_s: Time limit in seconds.

    Returns:
        `passed`, a verdict for each operator, and findings: file, line, severity, cause (null if the operator
        could not be checked), message, and a script that reproduces the failure.
    """
    options = [] if effort == "default" else [f"--{effort}"]
    options += ["--only", ",".join(only)] if only else []
    options += ["--samples", samples] if samples else []
    found = await _in_worker(limit_s, "check", "--isolate", "--json", *options, "--", target)
    if "error" in found:
        file = target
        with suppress(errors.UsageError):  # a folder, or nothing
            file = Target.of(target).source
        unchecked = [Unchecked(None, file, found["error"])]
        return {"passed": False, "verdicts": [], "findings": _findings([], unchecked)}
    reports = list(read_reports(json.dumps(found)).values()) if found["reports"] else []
    unchecked = [Unchecked(**each) for each in found["unchecked"]]
    return {
        "passed": found["passed"],
        "verdicts": [report.verdict() for report in reports],
        "findings": _findings(reports, unchecked),
    }


async def explain(target: str, sample: int = 0, limit_s: Seconds = LIMIT_S) -> dict[str, Any]:
    """Explain a call of an operator: its kernel, why other kernels are not used, formulas, saved tensors.

    Args:
        target: `FILE.py:NAME` of an operator of opsmith that has samples.
        sample: Position of the sample with the arguments of the call.
        limit_s: Time limit in seconds.
    """
    return await _in_worker(limit_s, "explain", target, str(sample))


async def emulate(
    target: str, sample: int = 0, order: Order = "forward", limit_s: Seconds = LIMIT_S
) -> dict[str, Any]:
    """Run an operator's CUDA C++ kernel on the CPU, and check every memory access and every barrier.

    Args:
        target: `FILE.py:NAME` of an operator that has a kernel in CUDA C++ and samples.
        sample: Position of the sample on which it runs.
        order: Order of the threads: `forward`, `backward`, `alternating`, `random` or `random(7)`.
        limit_s: Time limit in seconds.

    Returns:
        `results`, and the results of the reference; or `error`: the race, overrun or barrier, with its line.
    """
    return await _in_worker(limit_s, "emulate", target, str(sample), order)


def rule(name: str) -> dict[str, Any]:
    """Explain an error, a cause or a property of opsmith: why it matters, an example, how to correct it.

    Args:
        name: The name as in messages: `missing-term`, `CapturedTensorError`.
    """
    try:
        found = rules.rule(name)
    except errors.UsageError as error:
        return {"error": str(error)}
    return {**found.to_dict(), "text": found.text}


async def _in_worker(limit_s: float, *words: str) -> dict[str, Any]:
    return await in_child(["-m", "opsmith.cli.mcp_worker", str(os.getpid()), *words], limit_s)


async def in_child(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Run Python in a child process, and return the JSON object that it prints.

    Args:
        arguments: Arguments of Python.
        limit_s: Time limit in seconds.

    Returns:
        The object; if the process prints none, an object whose `error` is a sentence.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as words:
        process = await anyio.open_process(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,  # stdin of this process has the messages of the client
            stdout=out,
            stderr=words,
            start_new_session=True,
        )
        try:
            with anyio.move_on_after(limit_s) as limit:
                await process.wait()
        finally:
            await stop(process)
        if limit.cancelled_caught:
            return {"error": f"it did not finish within {limit_s:g} s, and was stopped"}
        out.seek(0)
        words.seek(0)
        try:
            answer: dict[str, Any] = json.load(out)
        except ValueError:
            code = process.returncode or 0
            how = describe_exit(-code if code < 0 else code << 8)[0]
            last = "\n".join(words.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:])
            return {"error": f"{how}\n{last}".strip()}
        return answer


async def stop(process: Process) -> None:
    """End a process and its child processes with Ctrl-C; if it ignores this, with a kill."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with anyio.move_on_after(GRACE_S):
                await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _findings(reports: list[Report], unchecked: list[Unchecked]) -> list[dict[str, Any]]:
    return [_finding(each) for each in annotated(reports, unchecked)]


def _finding(found: Annotation) -> dict[str, Any]:
    file, line = found.line or (None, None)
    finding = {
        "subject": found.subject,
        "file": file,
        "line": line,
        "severity": found.severity,
        "cause": None if found.failure is None else found.failure.cause,
        "title": found.title,
        "message": found.message,
    }
    if found.failure is not None:
        evidence = plain(found.failure.evidence)
        finding |= {"accepted": found.failure.accepted, "evidence": evidence, "replay": found.failure.replay}
    return finding
