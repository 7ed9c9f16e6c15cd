"""Files for tools around a check: the hook of pre-commit, the action, the task of VS Code, the skill."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from three_faults import FAST, FAULTS, TEXT
from typer.testing import Result

from opsmith.targets import Target

Run = Callable[..., Result]
Write = Callable[..., Path]

ROOT = Path(__file__).resolve().parents[2]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def hook() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_the_hook_and_the_task_show_each_fault(
    opsmith: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook names the files that change, some of which declare nothing; the task reads its lines."""
    write(TEXT, "faulty.py")
    write("import torch\n\noperator = 3\n", "plain.py")
    write('raise RuntimeError("it was imported")\n', "script.py")
    monkeypatch.chdir(tmp_path)
    command, *words = shlex.split(hook()["entry"])
    assert command == "opsmith"
    done = opsmith(*words, *FAST[1:], "faulty.py", "plain.py", "script.py")
    assert done.exit_code == 1, done.output
    assert done.stderr == ""
    (task,) = json.loads(fenced(ROOT / "docs" / "ci.md", "json")[0])["tasks"]
    assert shlex.split(task["command"])[-1] == "${file}"
    assert {*shlex.split(task["command"])[1:-1]} <= {*words}
    pattern = task["problemMatcher"]["pattern"]
    found = set()
    for line in done.stdout.splitlines():
        match = re.match(pattern["regexp"], line)
        assert match is not None, line
        named = {name: match[pattern[name]] for name in ("file", "line", "severity", "message", "code")}
        assert named["severity"] == "error"
        assert named["message"].endswith(line[-20:])
        found.add((named["file"], int(named["line"]), named["code"]))
    assert found == {("faulty.py", line, cause) for line, cause in FAULTS.values()}


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("error: demo::op: gradient of `x`: sign: it is wrong; more: opsmith rule sign", "sign"),
        ("warning: demo::op: forward: kernel-mismatch: it is wrong", "kernel-mismatch"),
        ("note: demo::op: vmap: raises: no: b.cpp:3: error: expected ';'", "raises"),
        ("error: faulty.py: could not be checked: `faulty.py` cannot be imported: SyntaxError", None),
        ("error: demo::op: not passed: NOT PASSED: gradient could not be checked", None),
    ],
)
def test_the_task_shows_each_kind_of_line(rest: str, code: str | None) -> None:
    (task,) = json.loads(fenced(ROOT / "docs" / "ci.md", "json")[0])["tasks"]
    pattern = task["problemMatcher"]["pattern"]
    match = re.match(pattern["regexp"], f"a file.py:12: {rest}")
    assert match is not None
    severity, _, message = rest.partition(": ")
    named = [match[pattern[name]] for name in ("file", "line", "severity", "message", "code")]
    assert named == ["a file.py", "12", severity, message, code]


def test_the_hook_takes_the_files_that_a_check_takes() -> None:
    """A script without an extension has the tag `python` of pre-commit, too."""
    taken = [
        name for name in ("ops.py", "kernels/ops.py", "tool", "ops.pyi") if re.search(hook()["files"], name)
    ]
    assert taken == ["ops.py", "kernels/ops.py"]
    assert "types" not in hook()
    assert all(Target.of(name).is_file for name in taken)


def test_the_hook_passes_on_files_that_declare_nothing(opsmith: Run, write: Write) -> None:
    file = write('raise RuntimeError("it was imported")\n', "script.py")
    done = opsmith(*shlex.split(hook()["entry"])[1:], str(file))
    assert (done.exit_code, done.output) == (0, "")
    assert opsmith("check", str(file)).exit_code == 2
    shown = opsmith("check", str(file), "--pass-if-none")
    assert (shown.exit_code, shown.stdout) == (0, "\n0 operators: 0 passed, 0 not passed\n")


def test_the_page_shows_the_hook() -> None:
    (local,) = [
        each for each in map(yaml.safe_load, fenced(ROOT / "docs" / "ci.md", "yaml")) if "repo" in each[0]
    ]
    (shown,) = local[0]["hooks"]
    assert shown == {name: value for name, value in hook().items() if name != "description"}


def check_of_the_action(tmp_path: Path, first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """The second step of the action, by the `python` of a folder."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert [step["shell"] for step in steps] == ["bash", "bash"]
    given = {name: each.get("default") for name, each in action["inputs"].items()} | {
        "targets": "annotated.py",
        "options": shlex.join(FAST),
        "sarif": "check.sarif",
        "junit": "check.xml",
    }
    inputs = {
        name: given[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1]]  # type: ignore[index]
        for name, value in steps[1]["env"].items()
    }
    environment = {
        **os.environ,
        **inputs,
        "PATH": f"{first_on_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", steps[1]["run"]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def assert_annotated(stdout: str, file: str, folder: Path) -> None:
    """The annotations of GitHub and the two files name each fault."""
    found = re.findall(r"^::error file=([^,]+),line=(\d+),title=\S+ .*%3A ([a-z-]+)::", stdout, re.M)
    assert {(path, int(line), cause) for path, line, cause in found} == {
        (file, line, cause) for line, cause in FAULTS.values()
    }
    assert len(json.loads((folder / "check.sarif").read_text())["runs"][0]["results"]) == 3
    assert 'failures="3"' in (folder / "check.xml").read_text()


def test_the_command_of_the_action_annotates_each_fault_and_writes_its_files(
    opsmith: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step calls a `python` that says how it was called; the command runs in this process."""
    file = write(TEXT, "annotated.py")
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    stub.chmod(0o755)
    called = check_of_the_action(tmp_path, stub.parent)
    assert called.returncode == 7, called.stderr
    dash_m, module, *words = called.stdout.splitlines()
    assert (dash_m, module) == ("-m", "opsmith")
    monkeypatch.chdir(tmp_path)
    done = opsmith(*words)
    assert done.exit_code == 1, done.output
    assert_annotated(done.stdout, str(file), tmp_path)


@pytest.mark.slow  # a process of its own imports torch
def test_the_action_annotates_each_fault_and_writes_its_files(write: Write, tmp_path: Path) -> None:
    file = write(TEXT, "annotated.py")
    done = check_of_the_action(tmp_path, Path(sys.executable).parent)
    assert done.returncode == 1, done.stderr
    assert_annotated(done.stdout, str(file), tmp_path)


def test_the_inputs_of_the_action_on_the_page_exist() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = [
        each[0] for each in map(yaml.safe_load, fenced(ROOT / "docs" / "ci.md", "yaml")) if "uses" in each[0]
    ]
    assert {*step["with"]} <= {*action["inputs"]}
    assert {name for name, each in action["inputs"].items() if each.get("required")} <= {*step["with"]}


SKILL = ROOT / "skills" / "write-and-check-an-operator" / "SKILL.md"


def test_the_skill_has_what_agents_read_of_it() -> None:
    _, head, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    read = yaml.safe_load(head)
    assert read["name"] == SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", read["name"])
    assert 0 < len(read["description"]) <= 1024
    assert len(body.splitlines()) < 100


def test_the_commands_of_the_skill_pass_on_its_operator(
    opsmith: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = fenced(SKILL, "python")
    commands = [shlex.split(line) for block in fenced(SKILL, "sh") for line in block.splitlines()]
    assert {tuple(words[:3]) for words in commands} == {("opsmith", "check", "operators.py")}
    write(code, "operators.py")
    monkeypatch.chdir(tmp_path)
    quick = next(words for words in commands if "--quick" in words)
    done = opsmith(*quick[1:])
    assert (done.exit_code, done.output) == (0, "")
