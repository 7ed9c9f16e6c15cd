"""README.md shows the quick start as it is, and what it really prints."""

from __future__ import annotations

from doc_pages import python_blocks, same
from quick_start import EXAMPLE, README, printed


def test_the_example_is_the_file() -> None:
    (block,) = python_blocks(README.read_text(encoding="utf-8"))
    assert "".join(f"{line}\n" for line in block.code.lines) == EXAMPLE.read_text(encoding="utf-8")


def test_the_output_is_what_it_prints() -> None:
    (block,) = python_blocks(README.read_text(encoding="utf-8"))
    output = printed()
    if not same(output, block.expected):
        assert output == block.expected


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 175  # with three pictures and their words
