"""A kernel is built again where a header changed, however it is included, and never from a mixture of two."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from opsmith import errors
from opsmith.build.cache import Cache
from opsmith.build.dependencies import (
    INDEX,
    PREPROCESSED,
    SOURCE,
    PreprocessedText,
    PreprocessorError,
    obtain_with_dependencies,
    preprocess,
)
from opsmith.build.toolchain import CompilerOutput, Toolchain, compiler_variables, find_toolchain

HEADER = "value.h"


@dataclass
class Project:
    """A program whose exit status is the VALUE of a header."""

    root: Path
    include: str
    flags: tuple[str, ...] = ()
    toolchain: Toolchain = field(default_factory=find_toolchain)
    preprocessed: int = 0

    def write(self, value: int, folder: str = "own") -> None:
        path = self.root / folder / HEADER
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#undef VALUE\n#define VALUE {value}\n")

    def run(self, between: Callable[[], None] | None = None) -> tuple[int, str]:
        """Return the value that the program was built with, and where it came from, in a new process."""
        text = f"{self.include}\nint main() {{ return VALUE; }}\n"
        flags = ["-iquote", str(self.root / "own"), *self.flags]

        def preprocessed() -> PreprocessedText:
            self.preprocessed += 1
            return preprocess(self.toolchain, flags, {SOURCE: text})

        def build(directory: Path) -> None:
            if between is not None:
                between()
            done = self.toolchain.run([*flags, PREPROCESSED, "-o", "program"], directory)
            assert done.status == 0, done.printed

        parts = {"text": text, "flags": " ".join(flags), "environment": compiler_variables()}
        entry, _ = obtain_with_dependencies(Cache(self.root / "cache"), parts, preprocessed, build)
        return subprocess.run([entry.directory / "program"], check=False).returncode, entry.source


INCLUDES = {
    "quoted": '#include "value.h"',
    "macro": '#define NAME "value.h"\n#include NAME',
    "comment-before": '/* for the value */ #include "value.h"',
    "comment-inside": '#include /* the value */ "value.h"',
    "continued": '#inc\\\nlude \\\n"value.h"',
    "digraph": '%:include "value.h"',
    "imported": '#import "value.h"',
    "tested": '#if __has_include("value.h")\n#include "value.h"\n#endif',
    "through": '#include "through.h"',
}


@pytest.fixture(params=INCLUDES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    made = Project(tmp_path, INCLUDES[request.param])
    made.write(1)
    (tmp_path / "own" / "through.h").write_text('#include "value.h"\n')
    return made


@pytest.mark.every(3)
def test_a_header_that_changes_is_compiled_again(project: Project) -> None:
    assert project.run() == (1, "built")
    before = project.preprocessed
    assert project.run() == (1, "disk")
    assert project.preprocessed == before
    project.write(2)
    assert project.run() == (2, "built")
    project.write(1)
    assert project.run() == (1, "disk")


def test_a_change_that_leaves_the_text_is_looked_at_once(tmp_path: Path) -> None:
    project = Project(tmp_path, INCLUDES["quoted"])
    project.write(1)
    header = tmp_path / "own" / HEADER
    assert project.run() == (1, "built")
    header.write_text(header.read_text().replace("VALUE 1", "VALUE 1 // the first"))
    assert project.run() == (1, "disk")
    before = project.preprocessed
    assert project.run() == (1, "disk")
    assert project.preprocessed == before


@pytest.mark.parametrize("variable", ["CPATH", "CPLUS_INCLUDE_PATH"])
def test_a_header_in_a_folder_of_the_environment(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, "#include <value.h>")
    project.write(1, "first")
    project.write(2, "second")
    monkeypatch.setenv(variable, str(tmp_path / "first"))
    assert project.run() == (1, "built")
    monkeypatch.setenv(variable, str(tmp_path / "second"))
    assert project.run() == (2, "built")
    project.write(3, "second")
    assert project.run() == (3, "built")


def test_the_next_header_of_the_same_name(tmp_path: Path) -> None:
    flags = ("-I", str(tmp_path / "first"), "-I", str(tmp_path / "second"))
    project = Project(tmp_path, "#include <value.h>", flags)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / HEADER).write_text("#include_next <value.h>\n")
    project.write(1, "second")
    assert project.run() == (1, "built")
    project.write(2, "second")
    assert project.run() == (2, "built")


@pytest.mark.parametrize("exists", [True, False])
def test_a_new_header_that_hides_another_is_seen(tmp_path: Path, *, exists: bool) -> None:
    flags = ("-I", str(tmp_path / "first"), "-I", str(tmp_path / "second"))
    project = Project(tmp_path, "#include <value.h>", flags)
    if exists:
        (tmp_path / "first").mkdir()
    project.write(1, "second")
    assert project.run() == (1, "built")
    assert project.run() == (1, "disk")
    project.write(2, "first")
    assert project.run() == (2, "built")


def test_a_header_that_was_tested_and_appears_is_seen(tmp_path: Path) -> None:
    include = '#if __has_include("deep/value.h")\n#include "deep/value.h"\n#else\n#define VALUE 1\n#endif'
    project = Project(tmp_path, include)
    (tmp_path / "own").mkdir()
    assert project.run() == (1, "built")
    (tmp_path / "own" / "deep").mkdir()
    project.write(2, "own/deep")
    assert project.run() == (2, "built")


@pytest.mark.every(3)
def test_a_header_saved_while_the_compiler_runs_is_not_mixed_in(project: Project) -> None:
    assert project.run(between=lambda: project.write(2)) == (1, "built")
    assert project.run() == (2, "built")
    project.write(1)
    assert project.run() == (1, "disk")


@dataclass(frozen=True, slots=True)
class Disturbed(Toolchain):
    """Compiler after each of whose runs a header is saved."""

    save: Callable[[], None] = field(default=lambda: None)

    def run(self, arguments: list[str], directory: Path) -> CompilerOutput:
        done = Toolchain.run(self, arguments, directory)
        self.save()
        return done


def test_a_header_saved_while_the_preprocessor_runs_is_not_remembered(tmp_path: Path) -> None:
    real, values = find_toolchain(), iter(range(2, 100))
    project = Project(tmp_path, INCLUDES["quoted"])
    project.toolchain = Disturbed(real.command, real.identity, lambda: project.write(next(values)))
    project.write(1)
    project.run()
    project.toolchain = real
    project.write(101)
    assert project.run() == (101, "built")


def test_an_entry_that_is_gone_is_not_built_from_another_text(tmp_path: Path) -> None:
    project = Project(tmp_path, INCLUDES["quoted"])
    project.write(1)
    project.run()
    known = (tmp_path / "cache" / INDEX).glob("*.json")
    (index,) = known
    held = json.loads(index.read_text())
    Cache(tmp_path / "cache").clear()
    project.write(2)
    project.run()
    for each in held.values():  # what is remembered says that the old text is still that of the header
        for path, (state, digest) in each["files"].items():
            del state, digest
            found = os.stat(path)
            each["files"][path] = [[found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns], ""]
    index.parent.mkdir(exist_ok=True)
    index.write_text(json.dumps(held))
    assert project.run()[0] == 2


DAMAGES = {
    "empty": b"",
    "a-list": b"[]",
    "a-number": b'{"a": 1}',
    "deep": b"[" * 100_000,
    "no-text": b"\xff\x00",
    "no-files": b'{"a": {"files": 3}}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_memory_is_as_none(tmp_path: Path, damage: str) -> None:
    project = Project(tmp_path, INCLUDES["quoted"])
    project.write(1)
    project.run()
    (index,) = (tmp_path / "cache" / INDEX).iterdir()
    index.write_bytes(DAMAGES[damage])
    assert project.run() == (1, "disk")
    assert project.preprocessed == 2
    assert project.run() == (1, "disk")
    assert project.preprocessed == 2


def test_a_missing_header_is_an_error_of_the_compiler(tmp_path: Path) -> None:
    with pytest.raises(PreprocessorError, match=r"nothing\.h"):
        Project(tmp_path, '#include "nothing.h"').run()
    assert not list((tmp_path).rglob("program"))


def test_a_text_that_was_refused_is_refused_again_at_once(tmp_path: Path) -> None:
    builds = []

    def build(directory: Path) -> None:
        builds.append(directory)
        raise errors.CompileError("no")

    text = f"int unused; // {tmp_path}\n"
    preprocessed = partial(preprocess, find_toolchain(), [], {SOURCE: text})
    for _ in range(2):
        with pytest.raises(errors.CompileError, match="no"):
            obtain_with_dependencies(Cache(tmp_path / "cache"), {"text": text}, preprocessed, build)
    assert len(builds) == 1


LITERAL = '# 1 "{0}package/f.cpp"\nf("{0}table.bin");\n'
RAW = '# 1 "{0}package/f.cpp"\nf(R"(\n# 1 "{0}x"\n)");\n'
PLACED = '# 1 "{0}package/f.cpp"\n# 1 "{0}package/f.h" 1\nint f;\n'


@pytest.fixture
def entry_of(tmp_path: Path) -> Callable[..., Path]:
    def found(home: str, text: str, flags: str = "") -> Path:
        def build(directory: Path) -> None:
            (directory / "made").touch()

        parts = {"text": text, "flags": flags}
        made = PreprocessedText(text, None)
        return obtain_with_dependencies(Cache(tmp_path), parts, lambda: made, build, home)[0].directory

    return found


@pytest.mark.parametrize("homes", [("/home/me/", "/opt/"), ("/a+b/", "/")])
@pytest.mark.parametrize("flags", ["-I{0}package -L {0}lib", "-ffile-prefix-map={0}=", "'-I{0}a b'"])
def test_a_copy_in_another_folder_is_the_same(
    entry_of: Callable[..., Path], homes: tuple[str, str], flags: str
) -> None:
    entries = {entry_of(home, PLACED.format(home), flags.format(home)) for home in homes}
    assert len(entries) == 1


@pytest.mark.parametrize("home", ["/home/me/", "/"])
@pytest.mark.parametrize("text", [LITERAL, RAW], ids=["literal", "raw-literal"])
def test_a_folder_in_a_literal_makes_a_difference(
    entry_of: Callable[..., Path], home: str, text: str
) -> None:
    first, rest = text.format(home).split("\n", 1)
    without = f"{first}\n{rest.replace(home, '')}"
    assert without != text.format(home)
    assert entry_of(home, text.format(home)) != entry_of(home, without)


def test_a_literal_of_another_folder_makes_a_difference(entry_of: Callable[..., Path]) -> None:
    assert len({entry_of(home, LITERAL.format(home)) for home in ("/one/", "/two/")}) == 2


def test_a_flag_that_names_a_folder_inside_a_path_makes_a_difference(entry_of: Callable[..., Path]) -> None:
    flags = [f"-I/opt/{folder}/x" for folder in ("one", "two")]
    homes = ("/one/", "/two/")
    entries = {entry_of(home, PLACED.format(home), flag) for home, flag in zip(homes, flags, strict=True)}
    assert len(entries) == 2
