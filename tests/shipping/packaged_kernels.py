"""The package of the tests, and its built kernels in a folder that a test may damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import opsmith
from opsmith.build.packaged import looking_in
from opsmith.build.processor import LEVELS, cpu_features, levels
from opsmith.shipping import BuildTargets, SourcePackage, staged_build

PACKAGE = Path(__file__).with_name("scaled_package")
RUNNABLE = [name for name, needed in levels().items() if cpu_features().issuperset(needed)]
X = torch.tensor([1.0, 2.0, 3.0])

Manifest = dict[str, Any]


def source_package() -> SourcePackage:
    return SourcePackage.of(str(PACKAGE))


def scaled() -> Any:
    source_package()
    return opsmith.find_operator("scaled_package::scaled")


def build_into(folder: Path, cpu: str = "none", cuda: str = "none") -> list[Path]:
    """Build into a folder, and return the files: for processors the runtime, then the best kernel first."""
    with staged_build(source_package(), BuildTargets.of(cpu, cuda), folder) as made:
        made.write()
    return [folder / file.file for file in made.files]


def origin_in(folder: Path, targets: tuple[str, ...] | None = None) -> str:
    """Call the operator with the kernels of a folder, and return where its kernel came from."""
    operator = scaled()
    with looking_in(PACKAGE, folder, targets or tuple(LEVELS["x86_64"]) + tuple(LEVELS["aarch64"])):
        operator.reload()
        try:
            assert torch.equal(operator(X, 3.0), X * 3)
            out = torch.empty(3)
            operator.out(X, 3.0, out=out)
            assert torch.equal(out, X * 3)
            found: str = operator.explain(X, 3.0).origin
            of_out: str = operator.out_operator.explain(X, 3.0, out=out).origin
            assert (of_out == found) or "package" not in found + of_out
        finally:
            operator.reload()
    return found


def edit_manifest(folder: Path, edit: Callable[[Manifest], Any]) -> None:
    path = folder / "manifest.json"
    held = json.loads(path.read_text())
    edit(held)
    path.write_text(json.dumps(held))
