"""The layers: a module imports from layers below its own, and feature packages never import one another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import opsmith

ROOT = Path(opsmith.__file__).parent

FEATURE_PACKAGES = (
    "checking",
    "exporting",
    "drawing",
    "benchmarking",
    "modules",
    "scaffolding",
    "shipping",
    "ops",
)
LAYERS: list[tuple[str, ...]] = [
    ("errors", "extras"),
    ("config",),
    ("core",),
    ("build", "init"),
    ("torch_library",),
    ("judging",),
    ("declaration", "kernels"),
    ("adopting",),
    ("targets",),
    FEATURE_PACKAGES,
    ("onnx",),
    ("pages",),
    ("rules", "surveying", "testing", "tour"),
    ("cli",),
    ("__main__",),
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
ALSO = {("benchmarking", "checking")}
"""Imports within a layer that are allowed: a benchmark needs green checks."""
FOR_TYPES = {("core", "modules")}
"""Imports that type checkers alone may follow: a method of the handle returns a type of a feature package, so
that editors know what `op.module(...)` is. At run time the core has a table, which the package fills."""


def parts_of(module: str) -> str:
    """The part of the package that a module belongs to; empty for the package itself."""
    return module.split(".")[1] if module.count(".") else ""


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements of a source: expressions, which are most of a tree, hold no import."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(tree, field, ()):
            yield child
            yield from statements(child)


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules of opsmith that a source imports, wherever it does, and the line."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "opsmith":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            module = node.module or ""
            if module == "opsmith":
                for alias in node.names:
                    yield (f"opsmith.{alias.name}" if alias.name in RANK else "opsmith"), node.lineno
            elif module.startswith("opsmith."):
                yield module, node.lineno


def lines_for_types(tree: ast.AST) -> set[int]:
    """The lines that no program runs: those under `if TYPE_CHECKING`."""
    return {
        line
        for node in statements(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for each in node.body
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }


def faults(part: str, source: str) -> list[str]:
    """Every import of a source in this part that the layers forbid."""
    found, tree = [], ast.parse(source)
    unread = lines_for_types(tree)
    for module, line in imports_of(tree):
        other = parts_of(module)
        if other == part or (part, other) in ALSO:
            continue
        if (part, other) in FOR_TYPES and line in unread:
            continue
        if part == "ops" and other:
            found.append(f"line {line}: ops are written with `import opsmith` alone, not {module}")
        elif other == "" and RANK[part] < RANK["ops"]:
            found.append(f"line {line}: {part} imports the package itself")
        elif other and RANK[other] >= RANK[part]:
            found.append(f"line {line}: {part} imports {module}")
    return found


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_part_has_its_layer() -> None:
    assert {part_of(path) for path in sources()} <= set(RANK)


COLLECTOR = "opsmith.core.collector"
"""Module by which the package `ops` turns the collector off while its modules declare operators."""


def test_imports_keep_to_the_layers() -> None:
    found = {str(path): faults(part_of(path), path.read_text(encoding="utf-8")) for path in sources()}
    package = found[str(ROOT / "ops" / "__init__.py")]
    package[:] = [each for each in package if not each.endswith(f"not {COLLECTOR}")]
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_package_itself_imports_no_feature_package_at_once() -> None:
    """Feature packages are imported by `__getattr__`, on first use, and for type checkers."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    at_once = "\n".join(
        ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    )
    assert {parts_of(module) for module, _ in imports_of(ast.parse(at_once))} == {
        "core",
        "declaration",
        "errors",
    }


def test_bundled_operators_use_public_names_only() -> None:
    for path in (ROOT / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "opsmith":
                assert node.attr in opsmith.__all__, f"{path.name}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "from opsmith.torch_library import capabilities"),
        ("core", "def f():\n    from opsmith.checking import check"),
        ("core", "import opsmith"),
        ("core", "from opsmith.modules import OperatorModule"),
        ("core", "if TYPE_CHECKING:\n    pass\nelse:\n    from opsmith.modules import OperatorModule"),
        ("core", "if TYPE_CHECKING:\n    from opsmith.checking import Report"),
        ("errors", "from opsmith.core.location import where"),
        ("build", "from opsmith import torch_library"),
        ("checking", "from opsmith.drawing.renderer import draw"),
        ("checking", "import opsmith.cli"),
        ("tour", "from opsmith.cli.guard import guarded"),
        ("ops", "from opsmith.core.operator import Operator"),
        ("checking", "if TYPE_CHECKING:\n    from opsmith.benchmarking import Benchmark"),
    ],
)
def test_a_wrong_import_is_found(part: str, source: str) -> None:
    assert len(faults(part, source)) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "from opsmith import errors"),
        ("torch_library", "from opsmith.core.schema import Schema"),
        ("checking", "import opsmith\nfrom opsmith.torch_library import capabilities"),
        ("benchmarking", "from opsmith.checking import check"),
        ("ops", "import opsmith\nfrom opsmith.ops.linear import linear"),
        ("cli", "from opsmith.tour import run_tour"),
        ("core", "if TYPE_CHECKING:\n    from opsmith.modules import OperatorModule"),
        ("modules", "from opsmith.core.operator import Operator"),
        ("core", "import torch\nfrom collections.abc import Callable"),
    ],
)
def test_a_right_import_passes(part: str, source: str) -> None:
    assert faults(part, source) == []


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
