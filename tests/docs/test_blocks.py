"""Every block of Python in docs/ runs, and prints exactly what stands below it.

All blocks of a page stay in one process and in one suite, since later blocks need the ones above.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from doc_pages import Program, fenced_blocks, pages, program, programs, python_blocks, same

COMPILING = {"tutorial.md", "from-autograd-function.md", "from-custom-op.md"}
"""Pages that compile: they run in the process in which other tests have loaded torch's compiler."""

SLOW = {
    "benchmarking.md",
    "capabilities.md",
    "cheat-sheet.md",
    "cuda-kernels.md",
    "from-autograd-function.md",
    "from-load-inline.md",
    "from-raw-kernel.md",
    "from-triton-op.md",
    "gallery.md",
    "native-kernels.md",
    "onnx.md",
    "pages.md",
    "shipping.md",
    "triton-kernels.md",
}
"""Pages that take longer than all others together: they build kernels, export, or start processes."""


PINNED = {"found.md": "2.13"}
"""Pages that are about one version of torch: others have other faults."""


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    version = PINNED.get(page.name, "")
    other = not torch.__version__.startswith(version)
    return [
        pytest.mark.xdist_group("compile" if page.name in COMPILING else page.name),
        *([pytest.mark.slow] if page.name in SLOW else []),
        *([pytest.mark.skip(reason=f"the page is about torch {version}")] if other else []),
    ]


def _items() -> list[object]:
    items: list[object] = []
    for page in programs():
        for position, block in enumerate(python_blocks(page.read_text(encoding="utf-8"))):
            heading = re.sub(r"\W+", "-", block.heading.lower()).strip("-")
            items.append(
                pytest.param(
                    page,
                    position,
                    id=f"{page.name}:{block.code.start + 1}:{heading}",
                    marks=_marks(page),
                )
            )
    return items


@pytest.mark.parametrize(("page", "position"), _items())
def test_a_block_prints_what_stands_below_it(page: Path, position: int) -> None:
    running = program(page)
    printed, expected = running.printed(position), running.blocks[position].expected
    if not same(printed, expected):
        assert printed == expected  # which shows the difference


PAGE = """# A page

```python
y = 1
print(y)
```

```text
{}
```
"""


def test_wrong_output_is_seen() -> None:
    right, wrong = (Program(Path("some.md"), PAGE.format(text)) for text in ("1", "2"))
    assert same(right.printed(0), right.blocks[0].expected)
    assert not same(wrong.printed(0), wrong.blocks[0].expected)


def test_unexpected_output_is_seen() -> None:
    silent = Program(Path("some.md"), PAGE.partition("```text")[0])
    assert not same(silent.printed(0), silent.blocks[0].expected)


def test_seconds_may_differ_and_nothing_else() -> None:
    assert same("forward  passed   0.20 s\n", "forward  passed  10.21 s\n")
    assert not same("forward  passed   0.20 s\n", "forward  failed   0.20 s\n")


def test_a_block_after_one_that_failed_does_not_run() -> None:
    broken = Program(Path("some.md"), "```python\n1 / 0\n```\n\n```python\nprint(1)\n```\n")
    with pytest.raises(ZeroDivisionError):
        broken.printed(0)
    with pytest.raises(RuntimeError, match=r"the block above, at line 1 of some\.md, did not run"):
        broken.printed(1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python no-run\n```", "a fence says 'python no-run'"),
        ("```py\n```", "a fence says 'py'"),
        ("```python\nprint(1)", "a fence stays open"),
        ("```text\n1\n```", "follows no block of Python"),
        ("```python\nprint(1)\n```\nprints\n```text\n1\n```", "prose stands between"),
    ],
    ids=["no-run", "other-spelling", "open", "output-alone", "prose-between"],
)
def test_a_page_that_would_not_be_held_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        python_blocks(text)


def test_nothing_indented_escapes() -> None:
    """A fence inside a list would not be seen, and its code would never run."""
    indented = [
        f"{page.name}:{number}"
        for page in pages()
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r"\s+```", line)
        and not any(
            block.start < number <= block.start + len(block.lines)
            for block in fenced_blocks(page.read_text(encoding="utf-8"))
        )
    ]
    assert indented == []
