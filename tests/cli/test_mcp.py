"""`opsmith mcp`, driven by the client of the package `mcp` over stdin and stdout."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from mcp import Client, StdioServerParameters
from three_faults import FAULTS, TEXT
from typer.testing import Result

from opsmith.cli import mcp_worker
from opsmith.cli.mcp_server import in_child

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


def test_a_process_that_does_not_end_is_stopped() -> None:
    sleeps = "import time; time.sleep(10**6)"
    assert in_child(["-c", sleeps], 0.5) == {"error": "it did not finish within 0.5 s, and was stopped"}


def test_a_process_that_ignores_ctrl_c_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.cli.mcp_server.GRACE_S", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(10**6)"
    assert "was stopped" in in_child(["-c", deaf], 2.0)["error"]


def test_a_process_that_crashes_is_described() -> None:
    assert "the process dies of SIGABRT" in in_child(["-c", "import os; os.abort()"], 60)["error"]


def test_a_process_that_prints_no_answer_is_described() -> None:
    found = in_child(["-c", "import sys; sys.stderr.write('words'); sys.exit(3)"], 60)
    assert found == {"error": "it ends the process, with status 3, instead of returning\nwords"}


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
        ("explain", ":square", ("7",), ("has 1 samples, and not number 7", "expected: 0 to 0")),
        ("emulate", ":raising", ("0", "forward"), ("raises ZeroDivisionError: ", "got: return x / (1 // 0)")),
        (
            "explain",
            ":bare",
            ("0",),
            ("it is explained with the arguments of its first sample, but has none",),
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
