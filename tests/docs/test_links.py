"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import ROOT, fenced_blocks, pages

PAGES = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"#+ (.*)")


def prose(page: Path) -> list[str]:
    """The lines of a page outside of its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    inside = {
        index for block in fenced_blocks(text) for index in range(block.start, block.start + len(block.lines))
    }
    return [line for index, line in enumerate(text.splitlines()) if index not in inside]


def links(page: Path) -> list[str]:
    """Targets of its links, without code in backticks, which may look like one."""
    return [target for line in prose(page) for target in _LINK.findall(re.sub(r"`[^`]*`", "", line))]


def anchors(page: Path) -> set[str]:
    """Anchors of a page: its headings, as GitHub spells them."""
    found: set[str] = set()
    for line in prose(page):
        heading = _HEADING.fullmatch(line)
        if heading:
            words = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found.add(words.strip().replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    lost: list[str] = []
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and (there.suffix != ".md" or anchor not in anchors(there))):
            lost.append(target)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n\n[a](#one-two-three) [b](#four) [c](no.md) [d](page.md#five)\n")
    assert broken(page) == ["#four", "no.md", "page.md#five"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [target.partition("#")[0] for target in links(page) if not re.match(r"[a-z]+:", target)]
        ahead += [(page.parent / target).resolve() for target in targets if target.endswith(".md")]
    assert set(PAGES) <= reached


def test_pages_name_no_machine() -> None:
    """No path of a developer's machine: `/home/...`, `/tmp/...`, `C:\\...`."""
    path = re.compile(r"(?<![\w.])(/(home|tmp|root|Users)/|[A-Z]:\\)")
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if path.search(line)
    ]
    assert found == []
