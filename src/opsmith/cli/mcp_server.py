"""Tools for agents; each runs code in a child process, and answers a fault of the code as a finding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from mcp.server import MCPServer

from opsmith import __version__
from opsmith.checking.output.annotations import Annotation, Unchecked, annotated
from opsmith.checking.processes.child import describe_exit
from opsmith.checking.report import Report, plain, read_reports

LIMIT_S = 600.0
"""Time limit of a call of a tool."""

GRACE_S = 10.0
"""Time between Ctrl-C, after which a check ends its own child processes, and the kill."""

LAST_LINES = 5
"""Number of lines of stderr in the message on a process that died."""

INSTRUCTIONS = (
    "opsmith checks custom PyTorch operators. After each change of an operator, an `autograd.Function` or a "
    "kernel, call `check` on its file, and correct what it finds at the line that it names, until it passes. "
    "A target is FILE.py, FILE.py:NAME or a module."
)


def server() -> MCPServer:
    """Return the server with its tools."""
    made = MCPServer("opsmith", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for tool in (check, explain, emulate, rule):
        made.add_tool(tool)
    return made


def check(
    target: str,
    effort: str = "quick",
    only: list[str] | None = None,
    samples: str | None = None,
    limit_s: float = LIMIT_S,
) -> dict[str, Any]:
    """Check operators, `autograd.Function` classes or custom ops: results, gradients, kernels, side effects.

    Args:
        target: `FILE.py`, `FILE.py:NAME`, a module or a folder (`kernels/`).
        effort: `quick`, `default` or `thorough`.
        only: Names of the properties to check, as `forward` and `gradient`; all by default.
        samples: Name of a list of tuples of arguments in the file, for a target with one NAME.
        limit_s: Time limit in seconds.

    Returns:
        `passed`, a verdict for each operator, and findings: file, line, severity, cause, message, and a
        script that shows the failure again.
    """
    options = [] if effort == "default" else [f"--{effort}"]
    options += ["--only", ",".join(only)] if only else []
    options += ["--samples", samples] if samples else []
    found = in_child(["-m", "opsmith", "check", target, "--isolate", "--json", *options], limit_s)
    if "error" in found:
        return {
            "passed": False,
            "verdicts": [],
            "findings": _findings([], [Unchecked(None, target, found["error"])]),
        }
    reports = list(read_reports(json.dumps(found)).values()) if found["reports"] else []
    unchecked = [Unchecked(each["operator"], each["file"], each["message"]) for each in found["unchecked"]]
    return {
        "passed": found["passed"],
        "verdicts": [report.verdict() for report in reports],
        "findings": _findings(reports, unchecked),
    }


def explain(target: str, sample: int = 0, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Say what computes a call of an operator: the kernel, why others do not, the formulas, what is saved.

    Args:
        target: `FILE.py:NAME` of an operator of opsmith that has samples.
        sample: Position of the sample whose arguments are the call's.
        limit_s: Time limit in seconds.
    """
    return in_child([*_WORKER, "explain", target, str(sample)], limit_s)


def emulate(target: str, sample: int = 0, order: str = "forward", limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run an operator's kernel in CUDA C++ on the CPU, with every access to memory and every barrier checked.

    Args:
        target: `FILE.py:NAME` of an operator that has a kernel in CUDA C++ and samples.
        sample: Position of the sample that it runs on.
        order: Order of the threads: `forward`, `backward`, `alternating`, `random` or `random(7)`.
        limit_s: Time limit in seconds.

    Returns:
        `results` and those of the reference; or `error`: the race, overrun or barrier, with its line.
    """
    return in_child([*_WORKER, "emulate", target, str(sample), order], limit_s)


def rule(name: str) -> dict[str, Any]:
    """Explain an error, a cause or a property of opsmith: why it matters, an example, how to correct it.

    Args:
        name: The name, as a message has it: `missing-term`, `CapturedTensorError`.
    """
    return in_child(["-m", "opsmith", "rule", name, "--json"], LIMIT_S)


_WORKER = ("-m", "opsmith.cli.mcp_worker")


def in_child(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Run Python in a process of its own, and return the JSON object that it prints.

    Args:
        arguments: Arguments of Python.
        limit_s: Time limit in seconds.

    Returns:
        The object; `error` has a sentence if there is none.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,  # that of this process has the messages of the client
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, words = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        return {"error": f"it did not finish within {limit_s:g} s, and was stopped"}
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError:
        code = process.returncode
        how = describe_exit(-code if code < 0 else code << 8)[0]
        last = "\n".join(words.strip().splitlines()[-LAST_LINES:])
        return {"error": f"{how}\n{last}".strip()}
    return answer


def _stop(process: subprocess.Popen[str]) -> None:
    """End a process and those that it has started: by Ctrl-C, and if it ignores that by a kill."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _findings(reports: list[Report], unchecked: list[Unchecked]) -> list[dict[str, Any]]:
    return [_finding(each) for each in annotated(reports, unchecked)]


def _finding(found: Annotation) -> dict[str, Any]:
    file, line = found.line or (None, None)
    finding = {
        "subject": found.subject,
        "file": file,
        "line": line,
        "severity": found.severity,
        "cause": found.rule,
        "title": found.title,
        "message": found.message,
    }
    if found.failure is not None:
        evidence = plain(found.failure.evidence)
        finding |= {"accepted": found.failure.accepted, "evidence": evidence, "replay": found.failure.replay}
    return finding
