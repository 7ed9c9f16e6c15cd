"""The build hook of hatchling: its options, and when it builds. tests/scaffolding builds wheels by it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hatchling.bridge.app import Application
from hatchling.builders.wheel import WheelBuilder

import hatch_opsmith
from hatch_opsmith import PURE, OpsmithBuildHook
from opsmith.build import platform_tag as of_platform_tag
from opsmith.build import processor
from opsmith.build.platform_tag import PlatformTag

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _not_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PURE, raising=False)
    monkeypatch.setattr(processor, "levels", lambda: {"x86-64-v3": ()})


def hook(root: Path, target: str = "wheel", of: Any = None, **config: Any) -> OpsmithBuildHook:
    unused: Any = None
    settings = of or SimpleNamespace(
        target_config={}, build_config={}, builder=SimpleNamespace(recurse_included_files=list)
    )
    return OpsmithBuildHook(str(root), config, settings, unused, str(root), target, Application())


class Builds:
    """Stand-in for `opsmith build`: keeps the commands, and writes libraries."""

    def __init__(self, *files: str, status: int = 0, differences: tuple[str, ...] = ()) -> None:
        self.files, self.status, self.differences = files, status, differences
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> SimpleNamespace:
        self.commands.append(command)
        assert options["check"] is False
        folder = Path(command[command.index("--output") + 1])
        folder.mkdir()
        for name in self.files:
            (folder / name).touch()
        verification = {"differences": list(self.differences)} if self.differences else None
        printed = json.dumps({"package": "fast_math.ops", "verification": verification})
        return SimpleNamespace(returncode=self.status, stdout=printed if self.status != 2 else "")


def run(monkeypatch: pytest.MonkeyPatch, builds: Builds, subject: OpsmithBuildHook) -> dict[str, Any]:
    monkeypatch.setattr(hatch_opsmith, "subprocess", SimpleNamespace(run=builds, PIPE=subprocess.PIPE))
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    subject.initialize("standard", data)
    assert all(Path(folder).is_dir() for folder in data["force_include"])
    subject.finalize("standard", data, "wheel")
    assert not any(Path(folder).parent.exists() for folder in data["force_include"])
    return data


def test_it_is_there_when_opsmith_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["hatch"] == {"opsmith": "hatch_opsmith"}
    assert "src/hatch_opsmith" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert hatch_opsmith.hatch_register_build_hook() is OpsmithBuildHook


def test_a_wheel_of_libraries_is_one_of_a_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Path]] = []

    def tag_of(files: Any, wheel: dict[str, Path]) -> PlatformTag:
        assert [*files] == [wheel["fast_math/_kernels/a.so"]]
        given.append(wheel)
        return PlatformTag("manylinux_2_28_x86_64")

    monkeypatch.setattr(of_platform_tag, "platform_tag", tag_of)
    library = tmp_path / "src" / "fast_math" / "native" / "libother.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(settings=""))
    of = WheelBuilder(str(tmp_path)).config
    builds, subject = (
        Builds("a.so", "manifest.json"),
        hook(tmp_path, of=of, package="src/fast_math", cpu="x86-64-v3"),
    )
    data = run(monkeypatch, builds, subject)
    assert [each["fast_math/native/libother.so"] for each in given] == [library]
    (place,) = data["force_include"]
    assert data["force_include"] == {place: "fast_math/_kernels"}
    assert (data["pure_python"], data["tag"]) == (False, "py3-none-manylinux_2_28_x86_64")
    command = ["-m", "opsmith", "build", "--json", "--output", place, "src/fast_math"]
    assert builds.commands == [[sys.executable, *command, "--cpu", "x86-64-v3", "--verify"]]
    assert capsys.readouterr().out == ""


def test_a_wheel_for_one_system_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = PlatformTag("linux_x86_64", "a.so needs libother.so.3", "link it statically")
    monkeypatch.setattr(of_platform_tag, "platform_tag", lambda files, wheel: found)
    data = run(monkeypatch, Builds("a.so"), hook(tmp_path))
    assert data["tag"] == "py3-none-linux_x86_64"
    said = "for this system alone (linux_x86_64): a.so needs libother.so.3; link it statically"
    assert said in "".join(capsys.readouterr())


def test_code_of_gpus_alone_runs_on_every_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds = Builds("a.images", "manifest.json")
    data = run(monkeypatch, builds, hook(tmp_path, cpu="none", cuda="sm_90", verify=False))
    assert len(data["force_include"]) == 1
    assert data["pure_python"] is True
    assert "tag" not in data
    assert builds.commands[0][-4:] == ["--cpu", "none", "--cuda", "sm_90"]


@pytest.mark.parametrize("way", ["editable", "sdist", "option", "variable"])
def test_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(hatch_opsmith, "subprocess", SimpleNamespace(run=refused))
    if way == "variable":
        monkeypatch.setenv(PURE, "1")
    subject = hook(
        tmp_path, "sdist" if way == "sdist" else "wheel", **({"pure": True} if way == "option" else {})
    )
    data: dict[str, Any] = {"force_include": {}}
    subject.initialize("editable" if way == "editable" else "standard", data)
    assert data == {"force_include": {}}
    subject.finalize("standard", data, "wheel")


PROJECT = """
[project]
name = "fast-math"
version = "0"
[tool.hatch.build]
artifacts = ["*.so"]
[tool.hatch.build.targets.wheel]
packages = ["src/fast_math"]
{settings}
"""


@pytest.mark.parametrize("settings", ["", 'exclude = ["*.txt"]'])
@pytest.mark.parametrize("pure", [True, False])
def test_an_earlier_build_in_the_tree_is_in_no_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pure: bool, settings: str
) -> None:
    folder = tmp_path / "src" / "fast_math" / "_kernels"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(settings=settings))
    ours = [f"fast.x.x86-64-v3.{'0a' * 8}.so", f"fast.x.sm_90.{'1b' * 8}.images", "manifest.json"]
    others = ["own.so", "own.cpp", "own.json"]
    for name in (*ours, *others, "notes.txt"):
        (folder / name).touch()
    killed = folder.with_name("._kernels-17-abc")
    killed.mkdir()
    (killed / ours[0]).touch()
    config = WheelBuilder(str(tmp_path)).config
    subject = hook(tmp_path, of=config, pure=pure, package="src/fast_math")
    data = run(monkeypatch, Builds("manifest.json"), subject)
    found = {Path(each.path).name for each in config.builder.recurse_selected_project_files()}
    assert found == {*others, *([] if settings else ["notes.txt"])}
    assert len(data["force_include"]) == (0 if pure else 1)


def test_where_nothing_is_built_ahead_the_wheel_is_pure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor, "levels", dict)
    monkeypatch.setattr(processor, "machine", lambda: "darwin-arm64")
    builds = Builds()
    data = run(monkeypatch, builds, hook(tmp_path))
    assert (data["force_include"], data["pure_python"], builds.commands) == ({}, True, [])
    said = "kernels are not built ahead on darwin-arm64: the wheel is pure, and they are built where they are"
    assert said in " ".join("".join(capsys.readouterr()).split())


def test_the_variable_stands_above_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PURE, "0")
    assert len(run(monkeypatch, Builds(), hook(tmp_path, pure=True))["force_include"]) == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"cpus": "x86-64-v3"}, "there is no option `cpus`; there are package, cpu, cuda, verify, pure"),
        ({"cpu": ["x86-64-v3"]}, "the option `cpu` must be text between quotes, and is ['x86-64-v3']"),
        ({"verify": "yes"}, "the option `verify` must be true or false, and is 'yes'"),
        ({"pure": 1}, "the option `pure` must be true or false, and is 1"),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        hook(tmp_path, **config).initialize("standard", {})
    assert ended.value.code == 1
    assert f"opsmith: {said}\n" in "".join(capsys.readouterr())


def test_options_of_hatchling_are_left_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = {"enable-by-default": False, "dependencies": ["opsmith[cli]"]}
    assert len(run(monkeypatch, Builds(), hook(tmp_path, **config))["force_include"]) == 1


def test_a_wrong_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PURE, "yes")
    with pytest.raises(SystemExit):
        hook(tmp_path).initialize("standard", {})
    assert f"the environment variable {PURE} must be 1 or 0, and is 'yes'" in "".join(capsys.readouterr())


@pytest.mark.parametrize("status", [1, 2])
def test_a_build_that_fails_makes_no_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    builds = Builds(status=status, differences=("demo::scale for x86-64-v3: wrong",) if status == 1 else ())
    with pytest.raises(SystemExit):
        run(monkeypatch, builds, hook(tmp_path))
    said = "".join(capsys.readouterr())
    assert not Path(builds.commands[0][builds.commands[0].index("--output") + 1]).parent.exists()
    assert f"opsmith: the kernels cannot be built (exit status {status}; the message stands above)" in said
    assert (f"{PURE}=1 makes a wheel without built kernels" in said) is (status == 2)
    assert ("Mend the kernels that differ from their references" in said) is (status == 1)
    assert ("demo::scale for x86-64-v3: wrong\n" in said) is (status == 1)


@pytest.mark.slow
def test_the_plugin_imports_neither_torch_nor_opsmith() -> None:
    program = "import sys, hatch_opsmith\nprint(sorted({'torch', 'opsmith'} & {*sys.modules}))\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "src",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
