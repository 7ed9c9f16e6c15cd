"""Languages of kernels are named in their folders, and in the registry alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import opsmith
from opsmith.kernels.languages import OWN

ROOT = Path(opsmith.__file__).parent
WORDS = {"cuda", "derived"}
"""Keys that are types of devices or common words, too: a string of these says nothing of a language."""
REGISTRY = "kernels/languages.py"
BUILDS_ON = {("cuda", "cpp"), ("runtime", "cpp")}
"""Folders that import from another one: the emulation and the runtime are compiled as kernels in C++ are."""
PUBLIC = "a public function, command or property for one language"
CRASH = "the line of a crash in a process: other languages for the CPU have none"
STILL = {
    "__init__.py": PUBLIC,
    "checking/processes/fork.py": CRASH,
    "cli/mcp_worker.py": PUBLIC,
    "checking/processes/sanitizer_child.py": PUBLIC,
    "checking/processes/sanitizer_parent.py": PUBLIC,
    "checking/properties/kernels/sanitized.py": PUBLIC,
    "testing/emulation.py": PUBLIC,
}
"""Modules that name a language still, with the reason."""


def named_in(source: str, folder: str = "") -> Iterator[tuple[str, int]]:
    """The languages that a source names, outside of its folder, with the line: by imports and by strings."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        texts = []
        if isinstance(node, ast.ImportFrom):
            texts = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            texts = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            texts = [node.value]
        for key in OWN:
            module = f"opsmith.kernels.{key}"
            if (
                key != folder
                and (folder, key) not in BUILDS_ON
                and any(
                    text == module or text.startswith(f"{module}.") or (text == key and key not in WORDS)
                    for text in texts
                )
            ):
                yield key, node.lineno


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "kernels" and len(parts) > 2 else ""


def modules_that_name_one() -> dict[str, list[tuple[str, int]]]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not re.search(r"kernels\b|[\"'](cpp|cuda|triton)[\"']", path.read_text(encoding="utf-8")):
            continue  # to parse takes long
        if named := [*named_in(path.read_text(encoding="utf-8"), folder_of(path))]:
            found[name] = named
    return found


def test_modules_name_no_language() -> None:
    found = modules_that_name_one()
    found.pop(REGISTRY)
    assert {name: lines for name, lines in found.items() if name not in STILL} == {}
    assert sorted(STILL.keys() - found.keys()) == [], "these name none any more: take them out of the table"


@pytest.mark.parametrize(
    "source",
    [
        "from opsmith.kernels.triton.kernel import TritonKernel",
        "from opsmith.kernels import cuda",
        "import opsmith.kernels.cpp.compiler",
        "def f():\n    from opsmith.kernels.cuda.plan import plan_call",
        "if TYPE_CHECKING:\n    from opsmith.kernels.cpp.kernel import CppKernel",
        "connect('opsmith.kernels.cuda.emulation')",
        "if language == 'triton':\n    pass",
    ],
)
def test_a_name_is_found(source: str) -> None:
    assert len([*named_in(source)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Kernels in Triton."""',
        "message = 'a kernel in Triton'",
        "x.to('cuda')",
        "from opsmith.kernels.common.dtypes import CPP_TYPES",
    ],
)
def test_prose_and_devices_name_none(source: str) -> None:
    assert [*named_in(source)] == []
