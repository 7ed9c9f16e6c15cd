"""`opsmith mcp`, driven by the client of the package `mcp` over stdin and stdout."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

import anyio
import pytest
import typer
from mcp import Client, StdioServerParameters
from mcp.server.mcpserver.exceptions import ToolError
from three_faults import FAULTS, TEXT
from typer.testing import Result

from opsmith.cli import mcp_worker
from opsmith.cli.mcp_server import check, in_child, rule, server, stop

Run = Callable[..., Result]
Write = Callable[..., Path]
Call = Callable[..., Awaitable[dict[str, Any]]]

KERNEL = '''
import opsmith, torch
from torch import Tensor

@opsmith.operator("{space}::turned")
def turned(x: Tensor) -> Tensor:
    return x.flip(0)

turned.kernel("cuda", cuda="""
__global__ void turned(Contiguous<const float> x, Contiguous<float> y) {
  __shared__ float held[64];
  held[threadIdx.x] = x[threadIdx.x];
  BARRIER
  y[threadIdx.x] = held[x.numel() - 1 - threadIdx.x];
}
""", grid=1, block="x.numel")
turned.samples(lambda make: [(torch.arange(4.0),), (torch.arange(8.0),)])
'''


def line_of(file: Path, start: str) -> int:
    return next(at for at, line in enumerate(file.read_text().splitlines(), 1) if line.startswith(start))


def conversation(steps: Callable[[Call], Awaitable[None]], folder: Path) -> None:
    """Start the server in a folder, and let a client take steps."""

    async def run() -> None:
        path = os.pathsep.join(each for each in sys.path if each)
        command = StdioServerParameters(
            command=sys.executable,
            args=["-m", "opsmith", "mcp"],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
        )
        async with Client(command) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert names == {"check", "explain", "emulate", "rule"}

            async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                answer = await client.call_tool(tool, arguments)
                assert not answer.is_error, answer.content
                assert isinstance(answer.structured_content, dict)
                return answer.structured_content

            await steps(call)

    asyncio.run(run())


@pytest.mark.slow  # several processes import torch
def test_a_client_checks_explains_and_emulates(write: Write, space: str, tmp_path: Path) -> None:
    faulty = write(TEXT, "faulty.py")
    write("import torch, opsmith\n\nx = 1 +\n", "broken.py")
    write(KERNEL.replace("BARRIER", "__syncthreads();"), "right.py")
    racing_file = write(KERNEL.replace("BARRIER", "").replace("turned", "racing"), "racing.py")

    async def steps(call: Call) -> None:
        broken = await call("check", target="broken.py")
        (finding,) = broken["findings"]
        assert (broken["passed"], finding["file"], finding["line"]) == (False, str(tmp_path / "broken.py"), 3)
        assert "SyntaxError" in finding["message"]
        checked = await call("check", target="faulty.py", only=["forward", "gradient"])
        assert checked["passed"] is False
        assert {(each["file"], each["line"], each["cause"]) for each in checked["findings"]} == {
            (str(faulty), line, cause) for line, cause in FAULTS.values()
        }
        assert len(checked["verdicts"]) == 3
        explained = await call("explain", target="right.py:turned", sample=1)
        assert explained["explanation"].startswith(f"{space}::turned\n  forward: reference")
        racing = await call("emulate", target="racing.py:racing", order="backward")
        assert "the CUDA kernel is faulty: race" in racing["error"]
        assert f"racing.py:{line_of(racing_file, '  held[threadIdx.x]')}" in racing["error"]

    conversation(steps, tmp_path)


HOLDS = """
import os, subprocess, sys, time
held = open({fifo!r}, "w")
subprocess.Popen(["sleep", "1000000"], pass_fds=[held.fileno()])
held.write("begun\\n")
held.flush()
time.sleep(10**6)
"""
"""A program that starts another one; a pipe is open for writing until both have ended."""


@pytest.fixture
def held(tmp_path: Path) -> Path:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    return fifo


def test_a_process_that_does_not_end_is_stopped() -> None:
    sleeps = "import time; time.sleep(10**6)"
    answer = asyncio.run(in_child(["-c", sleeps], 0.5))
    assert answer == {"error": "it did not finish within 0.5 s, and was stopped"}


def test_a_cancelled_process_is_stopped_with_what_it_has_started(held: Path) -> None:
    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(in_child, ["-c", HOLDS.format(fifo=str(held))], 10.0**6)
            pipe = await anyio.open_file(held)
            assert await pipe.readline() == "begun\n"
            group.cancel_scope.cancel()
        assert pipe.wrapped.read() == ""
        pipe.wrapped.close()

    anyio.run(run)


def test_a_process_that_ignores_ctrl_c_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.cli.mcp_server.GRACE_S", 0)
    deaf = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); "
        "time.sleep(10**6)"
    )

    async def run() -> int | None:
        command = [sys.executable, "-c", deaf]
        async with await anyio.open_process(command, start_new_session=True) as process:
            assert process.stdout is not None
            await process.stdout.receive()
            await stop(process)
        return process.returncode

    assert anyio.run(run) == -signal.SIGKILL


def test_a_process_that_crashes_is_described() -> None:
    answer = asyncio.run(in_child(["-c", "import os; os.abort()"], 60))
    assert "the process dies of SIGABRT" in answer["error"]


def test_a_process_that_prints_no_answer_is_described() -> None:
    found = asyncio.run(in_child(["-c", "import sys; sys.stderr.write('words'); sys.exit(3)"], 60))
    assert found == {"error": "the operator ends the process with status 3, instead of returning\nwords"}


def message(method: str, *number: int, **parameters: Any) -> bytes:
    found = {"jsonrpc": "2.0", "method": method, "params": parameters}
    return json.dumps(found | ({"id": number[0]} if number else {})).encode() + b"\n"


ENDS: dict[str, Callable[["subprocess.Popen[bytes]"], object]] = {
    "cancelled": lambda server: pipe_of(server).write(message("notifications/cancelled", requestId=1)),
    "closed": lambda server: pipe_of(server).close(),
    "terminated": lambda server: server.terminate(),
    "killed": lambda server: server.kill(),
}


def pipe_of(server: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert server.stdin is not None
    return server.stdin


@pytest.mark.slow  # two processes import torch
@pytest.mark.parametrize("end", ENDS)
def test_a_check_ends_with_its_call_or_its_server(end: str, held: Path, write: Write) -> None:
    """The pipe reaches its end when the check and the process that its file has started have ended."""
    if end in ("terminated", "killed") and sys.platform != "linux":
        pytest.skip("a request of Linux")
    holding = HOLDS.replace('"1000000"]', '"1000000"], preexec_fn=ends')  # as a child of a check ends
    ends = "import ctypes, signal\ndef ends():\n    ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    file = write(ends + holding.format(fifo=str(held)))
    who = {"name": "test", "version": "0"}
    said = [
        message("initialize", 0, protocolVersion="2025-06-18", capabilities={}, clientInfo=who),
        message("notifications/initialized"),
        message("tools/call", 1, name="check", arguments={"target": str(file)}),
    ]
    command = [sys.executable, "-m", "opsmith", "mcp"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, bufsize=0, env=env, **pipes) as server:
        pipe_of(server).write(b"".join(said))
        with held.open() as pipe:
            assert pipe.readline() == "begun\n"
            ENDS[end](server)
            assert pipe.read() == ""
        pipe_of(server).close()
        server.wait()


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("check", {"effort": "fast"}, "'quick', 'default' or 'thorough'"),
        ("emulate", {"order": "sideways"}, "forward|backward|alternating|random"),
        ("explain", {"limit_s": 0.0}, "greater than 0"),
        ("check", {"limit_s": -1.0}, "greater than 0"),
        ("check", {"limit_s": float("nan")}, "finite number"),
        ("emulate", {"limit_s": float("inf")}, "finite number"),
    ],
)
def test_an_argument_that_no_call_takes_is_refused_before_a_process_starts(
    tool: str, arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opsmith.cli.mcp_server.in_child", None)
    with pytest.raises(ToolError, match=re.escape(says)):
        asyncio.run(server().call_tool(tool, {"target": "some.py", **arguments}))


def answered(monkeypatch: pytest.MonkeyPatch, opsmith: Run, target: str) -> dict[str, Any]:
    """The answer of `check`, whose process is this one."""

    async def here(arguments: list[str], limit_s: float) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(opsmith(*arguments[arguments.index("check") :]).stdout)
        return found

    monkeypatch.setattr("opsmith.cli.mcp_server.in_child", here)
    return asyncio.run(check(target))


def test_a_target_is_no_option(opsmith: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answered(monkeypatch, opsmith, "--help")
    (finding,) = answer["findings"]
    assert "`--help` names neither a file nor a module" in finding["message"]


def test_an_operator_without_samples_is_a_finding_at_its_line(
    opsmith: Run, write: Write, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(BARE)
    (finding,) = answered(monkeypatch, opsmith, str(file))["findings"]
    place = (finding["subject"], finding["file"], finding["line"], finding["cause"])
    assert place == (f"{space}::bare", str(file), line_of(file, "@opsmith"), None)
    assert "opsmith rule MissingSamplesError" in finding["message"]


def test_a_name_that_a_file_lacks_is_a_finding_in_the_file(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(BARE)
    (finding,) = answered(monkeypatch, opsmith, f"{file}:other")["findings"]
    assert (finding["file"], finding["line"]) == (str(file), 1)


def test_a_rule_is_answered_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.cli.mcp_server.in_child", None)
    assert rule("sign")["text"].startswith("# sign\n")
    assert "there is no rule `sgn`" in rule("sgn")["error"]


BARE = """
import opsmith
from torch import Tensor

@opsmith.operator("{space}::bare")
def bare(x: Tensor) -> Tensor:
    return x + 1
"""

ODD = """

@opsmith.operator("{space}::bare")
def bare(x: Tensor) -> Tensor:
    return x + 1

@opsmith.operator("{space}::raising")
def raising(x: Tensor) -> Tensor:
    return x / (1 // 0)

raising.samples(lambda make: [(make(3),)])
"""


@pytest.mark.parametrize(
    ("task", "target", "more", "says"),
    [
        ("explain", "", ("0",), ("has 5 operators", "`{space}::square`, ", "name it: ")),
        ("explain", ":square", ("7",), ("has 1 samples, but no sample 7", "expected: 0 to 0")),
        ("emulate", ":raising", ("0", "forward"), ("raises ZeroDivisionError: ", "got: return x / (1 // 0)")),
        (
            "explain",
            ":bare",
            ("0",),
            ("it is explained with the arguments of its first sample, but it has no samples",),
        ),
    ],
)
def test_what_cannot_be_explained_or_emulated_is_an_answer(
    write: Write, space: str, task: str, target: str, more: tuple[str, ...], says: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = write(TEXT + ODD)
    monkeypatch.setattr(sys, "argv", ["worker", task, f"{file}{target}", *more])
    with pytest.raises(typer.Exit) as ended:
        mcp_worker.main()
    assert ended.value.exit_code == 2
    out = capsys.readouterr().out
    for words in says:
        assert words.format(space=space) in out


def test_an_operator_is_emulated_beside_its_reference(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(KERNEL.replace("BARRIER", "__syncthreads();"))
    monkeypatch.setattr(sys, "argv", ["worker", "emulate", str(file), "0", "forward"])
    mcp_worker.main()
    results = "tensor([3., 2., 1., 0.])"
    assert json.loads(capsys.readouterr().out) == {"results": results, "reference": results}


IN_PLACE = '''
import opsmith, torch
from torch import Tensor

@opsmith.operator("{space}::twice_", mutates=["x"])
def twice_(x: Tensor) -> None:
    x.mul_(2)

twice_.kernel("cuda", cuda="""
__global__ void twice_(Contiguous<float> x) { x[threadIdx.x] *= 2; }
""", grid=1, block="x.numel")
twice_.samples(lambda make: [(torch.arange(4.0),)])
'''


def test_what_an_operator_writes_is_emulated_beside_its_reference(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["worker", "emulate", str(write(IN_PLACE)), "0", "forward"])
    mcp_worker.main()
    written = "tensor([0., 2., 4., 6.])"
    assert json.loads(capsys.readouterr().out) == {"results": written, "reference": written}


def test_without_the_package_the_command_says_what_to_install(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "opsmith.cli.mcp_server", raising=False)
    for name in [each for each in sys.modules if each == "mcp" or each.startswith("mcp.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    done = opsmith("mcp")
    assert done.exit_code == 2
    assert "opsmith: the server for agents needs the package `mcp`" in done.stderr
    assert "hint: pip install '.[mcp]' in a checkout of opsmith" in done.stderr
