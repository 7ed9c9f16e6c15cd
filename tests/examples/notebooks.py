"""Runs the notebooks of examples/notebooks; `python tests/examples/notebooks.py` renews their output."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
CELL = re.compile(r"\S*ipykernel_\d+[/\\]\d+\.py")
SECONDS = re.compile(r"\d+\.\d+ s\b")


def paths() -> list[Path]:
    """The notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """A notebook after a run of all its cells in a fresh kernel, whose working folder is given."""
    import nbformat
    from ipykernel.kernelspec import make_ipkernel_cmd
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(AsyncKernelManager):
        """Starts the kernel with the Python that runs the tests, whatever kernels are registered."""

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=make_ipkernel_cmd(), language="python", display_name="Python 3")

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=600,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook


def texts(cell: Any) -> list[str]:
    """The outputs of a cell as text, without what differs from run to run: the file of a cell, seconds."""
    found = []
    for output in cell.get("outputs", []):
        text = output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue", "")
        found.append(SECONDS.sub("0.00 s", CELL.sub("cell", text)))
    return found


def shown(cell: Any) -> str:
    """What a cell shows in HTML; empty for nothing."""
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.get("outputs", []))


def renew(path: Path, folder: Path) -> None:
    """Run a notebook, and write its outputs into it: as text alone, so that the file is small."""
    import nbformat

    notebook = executed(path, folder)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        if cell.cell_type == "code":
            cell["execution_count"] = None
            made = [
                nbformat.v4.new_output("execute_result", {"text/plain": text}, execution_count=None)
                if output.output_type == "execute_result"
                else nbformat.v4.new_output("stream", text=text)
                for output, text in zip(cell.outputs, texts(cell), strict=True)
            ]
            cell["outputs"] = made
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    path.write_text(nbformat.writes(notebook, version=4, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    for each in [Path(name) for name in sys.argv[1:]] or paths():
        with tempfile.TemporaryDirectory() as folder:
            renew(each, Path(folder))
