"""Output files: the trial of a file before the work begins, and what is written over."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith import errors
from opsmith.core.output_file import replace_file, writable_file

REFUSED = """no file can be written to `{path}`
  argument: path
  expected: a file in an existing folder that can be written to
  got: {got}
  hint: {hint}"""


def test_a_trial_leaves_everything_as_it_was(tmp_path: Path) -> None:
    earlier, link = tmp_path / "earlier", tmp_path / "link"
    earlier.write_text("mine")
    os.utime(earlier, (1, 1))
    link.symlink_to("nowhere")
    for path in (earlier, link, tmp_path / "new"):
        assert writable_file(path, "a") == path
    assert (earlier.read_text(), earlier.stat().st_mtime) == ("mine", 1)
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["earlier", "link"]


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("refusing", ["file", "folder"])
def test_what_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str, existing: bool
) -> None:
    """Root may write everywhere, so the system is replaced; a file is replaced by a new one beside it."""
    path, real = tmp_path / "a.txt", Path.open
    if existing:
        path.write_text("mine")

    def refused(self: Path, *args: Any, **options: Any) -> Any:
        if refusing == "file" or not self.exists():
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(errors.UsageError) as caught:
        writable_file(path, "a")
    assert caught.value.message() == REFUSED.format(
        path=path, got="Permission denied", hint="name another file"
    )


def test_a_name_that_no_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 300)
    with pytest.raises(errors.UsageError) as caught:
        writable_file(path, "a")
    assert caught.value.message() == REFUSED.format(
        path=path, got="File name too long", hint="name another file"
    )


def draw(run: Callable[..., Any]) -> None:
    opsmith.draw(run, "/proc/x.svg", inputs=torch.ones(2))


def export(run: Callable[..., Any]) -> None:
    model = torch.nn.Module()
    model.forward = run  # type: ignore[method-assign]
    opsmith.export_onnx(model, (torch.ones(2),), "/proc/x.onnx")


def page(run: Callable[..., Any]) -> None:
    operator = opsmith.operator("output_file::paged", opaque=True)(run)
    operator.samples(lambda: [(torch.ones(2),)])
    opsmith.page(operator, "/proc/x.html")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no file")
@pytest.mark.parametrize("command", [draw, export, page])
def test_where_only_the_trial_knows_it_is_refused_before_the_work(
    command: Callable[[Callable[..., Any]], None],
) -> None:
    ran = []

    def run(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x * 2

    with pytest.raises(errors.UsageError, match=r"no file can be written to `/proc/x\.") as caught:
        command(run)
    assert (caught.value.got, ran) == ("No such file or directory", [])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_pipe_is_written_into_and_not_tried(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert writable_file(pipe, "a") == pipe
        replace_file(pipe, b"graph")
        assert os.read(reader, 100) == b"graph"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_device_stays_one() -> None:
    for name in ("/dev/null", "/dev/full"):
        assert writable_file(name, "a") == Path(name)
    replace_file(Path("/dev/null"), b"graph")
    with pytest.raises(errors.UsageError, match="got: No space left on device"):
        replace_file(Path("/dev/full"), b"graph")
    assert Path("/dev/null").is_char_device()
    assert Path("/dev/full").is_char_device()
