"""Write into every page what its Python prints now: `python tests/docs/update.py [PAGE|RULE ...]`.

Read the difference before you commit it: the pages show what users see.
"""

from __future__ import annotations

import sys
from pathlib import Path

from doc_pages import Program, pages, same
from readme_examples import README, with_examples
from rule_pages import example, texts

from opsmith.rules import rules


def updated(text: str, running: Program) -> str:
    """A page's text with the output of each block as it is now."""
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
    ruled = {each.key: each for each in rules()}
    names = {each if each in ruled else Path(each).name for each in named}
    there = {page.name: page for page in pages()}
    unknown = sorted(names - there.keys() - ruled.keys())
    if unknown:
        sys.exit(f"there is no page {', '.join(unknown)}; there is: {', '.join([*there, *ruled])}")
    for name in sorted(names) or [*there, *ruled]:
        page = there[name] if name in there else texts()[name]
        before = page.read_text(encoding="utf-8")
        running = example(ruled[name]) if name in ruled else Program(page)
        text = with_examples(before) if page == README else updated(before, running)
        if text != before:
            page.write_text(text, encoding="utf-8")
            sys.stdout.write(f"updated {page.name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
