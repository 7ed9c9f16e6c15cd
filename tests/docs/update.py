"""Write into every page what its Python prints now: `python tests/docs/update.py [PAGE ...]`.

Read the difference before you commit it: the pages show what users see.
"""

from __future__ import annotations

import sys
from pathlib import Path

from doc_pages import Program, pages, same
from errors_table import ERRORS_PAGE, with_table
from readme_examples import README, with_examples


def updated(page: Path) -> str:
    """The page's text with the output of each block as it is now."""
    text = page.read_text(encoding="utf-8")
    running = Program(page)
    lines = text.splitlines()
    outputs = [running.printed(position) for position in range(len(running.blocks))]
    for block, printed in reversed(list(zip(running.blocks, outputs, strict=True))):
        if same(printed, block.expected):
            continue
        if block.output is not None:
            lines[block.output.start : block.output.start + len(block.output.lines)] = printed.splitlines()
        elif printed:
            end = block.code.start + len(block.code.lines) + 1
            lines[end:end] = ["", "```text", *printed.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def main(named: list[str]) -> None:
    names = {Path(each).name for each in named}
    there = {page.name: page for page in pages()}
    if names - there.keys():
        sys.exit(f"there is no page {', '.join(sorted(names - there.keys()))}; there is: {', '.join(there)}")
    for page in [there[name] for name in names] or there.values():
        text = with_examples(page.read_text(encoding="utf-8")) if page == README else updated(page)
        if page == ERRORS_PAGE:
            text = with_table(text)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            sys.stdout.write(f"updated {page.name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
