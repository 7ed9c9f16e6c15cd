"""`opsmith check` of several files and of folders: what is checked, what is refused, and the exit status."""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from opsmith.targets import is_folder, targets_of

Run = Callable[..., Result]
Write = Callable[..., Path]
FAST = ("--quick", "--only", "forward")

ONE = """
import opsmith
from torch import Tensor

@opsmith.operator("{space}::NAME")
def one(x: Tensor) -> Tensor:
    return x + x

one.samples(lambda make: [(make(3),)])
"""

FUNCTION = """
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
"""


def named(name: str) -> str:
    return ONE.replace("NAME", name)


@pytest.fixture
def folder(write: Write, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with declarations in files of one name, beside files that must not be imported."""
    imported = 'raise RuntimeError("it was imported")  # torch operator\n'
    write(named("first"), f"kernels/{space}_ops.py")
    write(named("second"), f"kernels/deeper/{space}_ops.py")
    write(named("third"), f"kernels/deeper/still/{space}_ops.py")
    write(FUNCTION, f"kernels/{space}_functions.py")
    write("import torch\noperator = 3\n", "kernels/plain.py")
    write('raise RuntimeError("it was imported")\n', "kernels/script.py")
    for path in ("kernels/__main__.py", "kernels/.hidden/ops.py", "kernels/venv/lib/ops.py"):
        write(imported, path)
    write("", "kernels/venv/pyvenv.cfg")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "kernels"


def test_of_a_folder_every_file_that_declares_something_is_checked(
    opsmith: Run, folder: Path, space: str
) -> None:
    done = opsmith("check", "kernels/", *FAST, "--json")
    assert done.exit_code == 0, done.output
    read = json.loads(done.stdout)
    assert [each["operator"] for each in read["reports"]] == [
        "Twice",
        f"{space}::first",
        f"{space}::second",
        f"{space}::third",
    ]
    assert [each["declared"].rpartition(":")[0] for each in read["reports"]] == [
        str(folder / f"{name.format(space)}.py")
        for name in ("{}_functions", "{}_ops", "deeper/{}_ops", "deeper/still/{}_ops")
    ]
    assert read["unchecked"] == []
    assert done.stderr == ""


def test_a_file_that_cannot_be_imported_is_an_error_with_its_file(
    opsmith: Run, write: Write, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(named("right"), "ops/right.py")
    write(f"import torch, {space}_missing  # operator\n", "ops/broken.py")
    monkeypatch.chdir(tmp_path)
    done = opsmith("check", "ops/", *FAST, "--format", "text", "--format", "lines")
    assert done.exit_code == 2
    assert f"{space}::right: passed the requested properties" in done.stdout
    assert "2 operators: 1 passed, 0 not passed, 1 could not be checked" in done.stdout
    assert f"ops/broken.py:1: error: ops/broken.py: could not be checked: `{tmp_path}" in done.stdout
    assert (
        f"opsmith: `{tmp_path / 'ops' / 'broken.py'}` cannot be imported: ModuleNotFoundError" in done.stderr
    )


def test_an_error_in_one_of_several_targets_has_status_1(
    opsmith: Run, write: Write, space: str, folder: Path
) -> None:
    wrong = write(
        named("wrong").replace("\none.samples", '\none.kernel("cpu")(lambda x: x)\none.samples'),
        f"{space}_wrong.py",
    )
    done = opsmith("check", "kernels/deeper/", str(wrong), f"kernels/deeper/{space}_ops.py:one", *FAST)
    assert done.exit_code == 1, done.output
    assert done.stdout.splitlines()[-1] == "3 operators: 2 passed, 1 not passed"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "kernels/:one",
            ("`kernels/` is a folder, but `one` must be in a file", "`kernels/operators.py:one`"),
        ),
        ("kernels/.hidden/empty", ("there is no Python file in the folder `kernels/.hidden/empty`",)),
        ("no_file", ("there is no Python file in the folder `no_file`", "or a folder with Python files")),
        ("bare", ("no Python file in the folder `bare` declares an operator, Function or custom op",)),
        ("none/", ("`none/` names neither a file nor a module",)),
        ("", ("`` names neither a file nor a module", "expected: FILE_OR_MODULE[:NAME]")),
        (":one", ("`:one` names neither a file nor a module",)),
        ("n" * 300, ("there is no module `nnn",)),
        (f"{'n' * 300}.py", ("there is no file `nnn",)),
        (f"{'n' * 300}/", ("nnn/` names neither a file nor a module",)),
        (f"{'n' * 300}/:one", ("/:one` names neither a file nor a module",)),
    ],
)
def test_folders_with_nothing_to_check_are_refused(
    opsmith: Run, write: Write, folder: Path, target: str, says: tuple[str, ...]
) -> None:
    (folder / ".hidden" / "empty").mkdir()
    write("no code", "no_file/deeper/notes.txt")
    write("", "bare/plain.py")
    done = opsmith("check", target, *FAST)
    assert done.exit_code == 2
    for words in says:
        assert words in done.stderr


def test_a_folder_that_cannot_be_read_is_refused(
    opsmith: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def refusing(path: str) -> Any:
        if os.fspath(path).endswith("deeper"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    done = opsmith("check", "kernels/", *FAST)
    assert done.exit_code == 2
    assert "the folder `kernels/deeper` cannot be read\n  got: Permission denied\n" in done.stderr
    assert "hint: make it readable, or name the files and folders to check" in done.stderr


def test_a_folder_whose_files_declare_nothing_is_refused(opsmith: Run, write: Write, tmp_path: Path) -> None:
    write("import torch\noperator = 3\n", "bare/plain.py")
    done = opsmith("check", f"{tmp_path}/bare", *FAST)
    assert done.exit_code == 2
    assert f"no Python file in the folder `{tmp_path}/bare` declares an operator" in done.stderr


def test_samples_are_for_one_operator(opsmith: Run, folder: Path, space: str) -> None:
    done = opsmith("check", "kernels/", "--samples", "SAMPLES")
    assert done.exit_code == 2
    assert "`--samples` is for one operator, but 5 files or modules are named" in done.stderr
    assert (
        f"hint: name it: `opsmith check kernels/{space}_functions.py:NAME --samples SAMPLES`" in done.stderr
    )


def test_a_bare_name_is_a_module(folder: Path) -> None:
    assert not is_folder("kernels")
    assert [each.source for each in targets_of("kernels")] == ["kernels"]
    assert is_folder("kernels/")
    assert is_folder(".")


def test_a_file_that_cannot_be_read_is_left_to_its_import(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("", "ops/gone.py").unlink()
    (tmp_path / "ops" / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert [Path(each.source).name for each in targets_of(f"{tmp_path}/ops")] == ["gone.py"]


def test_files_of_one_name_are_imported_once_each(write: Write, space: str) -> None:
    files = [write(named(f"op{each}"), f"{each}/{space}_same.py") for each in range(3)]
    (targets,) = zip(*(targets_of(str(each)) for each in files), strict=True)
    modules = [each.module() for each in targets]
    assert [each.module() for each in targets] == modules
    assert len({each.__name__ for each in modules}) == 3
    assert [str(each.__file__) for each in modules] == [str(each) for each in files]
    assert all(sys.modules[each.__name__] is each for each in modules)
    assert [len(each.operators()) for each in targets] == [1, 1, 1]
