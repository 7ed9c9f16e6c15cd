"""The layers of pyproject.toml find a wrong import; circles of modules, and the names that operators use."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opsmith

ROOT = Path(opsmith.__file__).parent
SETTINGS = ROOT.parents[1] / "pyproject.toml"

WRONG = {
    "core/schema.py": "def f():\n    from opsmith.torch_library import capabilities",
    "drawing/graph.py": "if TYPE_CHECKING:\n    from opsmith.checking import Report",
    "ops/linear.py": "from opsmith.core.operator import Operator",
    "kernels/runtime/dispatch.py": "import opsmith",
}
"""Imports that the layers forbid, and the modules to which the test adds them."""


def test_a_wrong_import_is_found(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT, tmp_path / "opsmith", ignore=lambda _, names: [n for n in names if n == "__pycache__"]
    )
    shutil.copy(SETTINGS, tmp_path)
    for path, lines in WRONG.items():
        assert (tmp_path / "opsmith" / path).exists()
        with (tmp_path / "opsmith" / path).open("a") as file:
            file.write(f"\n{lines}\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    told = " ".join(run.stdout.split())
    assert "Contracts: 0 kept, 3 broken." in told
    for pair in (
        "opsmith.core is not allowed to import opsmith.torch_library",
        "opsmith.drawing is not allowed to import opsmith.checking",
        "opsmith.ops is not allowed to import opsmith.core",
        "opsmith.kernels.runtime.dispatch -> opsmith (l.",
    ):
        assert pair in told


def test_the_package_itself_imports_no_feature_package_at_once() -> None:
    """Feature packages are imported by `__getattr__`, on first use, and for type checkers."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    at_once = {
        f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = {name.split(".")[1] for name in at_once if name.startswith("opsmith.")}
    assert parts == {"core", "declaration", "errors"}


def test_bundled_operators_use_public_names_only() -> None:
    for path in (ROOT / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "opsmith":
                assert node.attr in opsmith.__all__, f"{path.name}: {ast.unparse(node)}"


def module_of(path: Path) -> str:
    """The name of the module in a file; a package has the name of its folder."""
    return ".".join(("opsmith", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("folder", ["core", "torch_library"])
def test_no_circle_has_more_than_three_modules(folder: str) -> None:
    """Imports in functions and for type checkers count, too; a package that hands names on ties none."""
    files = {module_of(path): path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"}
    imported: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
                imported[module] |= names & files.keys()
    reached: dict[str, set[str]] = {}
    for module in files:
        found, rest = set[str](), [module]
        while rest:
            new = imported[rest.pop()] - found
            found |= new
            rest += new
        reached[module] = found
    circles = {frozenset(each for each in reached[module] if module in reached[each]) for module in files}
    assert [sorted(circle) for circle in circles if len(circle) > 3] == []
