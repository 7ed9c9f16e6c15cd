"""Reading of the files that a kernel's text names."""

from __future__ import annotations

from pathlib import Path

from opsmith.build.source_text import includes_of


def test_a_header_that_cannot_be_read_is_left_to_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "loop.h").symlink_to("loop.h")
    (tmp_path / "folder.h").mkdir()
    right = tmp_path / "right.h"
    right.write_text("// right\n")
    names = ["loop.h", "folder.h", "missing.h", f"{'long' * 100}.h", "right.h"]
    text = "".join(f'#include "{name}"\n' for name in names)
    assert includes_of(text, str(tmp_path)) == {right: "// right\n"}
