"""Pictures of the documentation: shown by a page, and legible on paper and on any background."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from doc_pages import ROOT, pages

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*"))
_SVG = "{http://www.w3.org/2000/svg}"
_SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_SMALLEST = 12
"""Units of a font, which are pixels where a picture is as wide as it says."""
WIDE_ENOUGH = 800
"""Pixels of a picture that has no units of its own, such as a photograph of a page."""


def faults(picture: str) -> list[str]:
    """Faults that keep a picture from being read, by eye or by a screen reader."""
    root = ElementTree.fromstring(picture)
    if root.tag != f"{_SVG}svg":
        return ["it is no SVG"]
    found = [f"it has no <{name}>" for name in ("title", "desc") if not root.findtext(f"{_SVG}{name}")]
    left, top, width, height = (root.get("viewBox") or "0 0 0 0").split()
    ground = next((each for each in root if each.tag not in (f"{_SVG}title", f"{_SVG}desc")), root)
    expected = {"width": width, "height": height, "fill": "#ffffff"}
    if (left, top) != ("0", "0") or ground.tag != f"{_SVG}rect" or ground.attrib != expected:
        found.append("its background is not white")
    sizes = [float(each.get("font-size", _SMALLEST)) for each in root.iter()]
    if root.get("font-size") is None or min(sizes) < _SMALLEST:
        found.append(f"it has text smaller than {_SMALLEST}")
    return found


def shown() -> dict[Path, str]:
    """Every picture that a page shows, with the words in its place."""
    return {
        (page.parent / target).resolve(): words
        for page in pages()
        for words, target in _SHOWN.findall(page.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize(
    "picture", [each for each in PICTURES if each.suffix == ".svg"], ids=lambda picture: picture.name
)
def test_a_picture_is_legible(picture: Path) -> None:
    assert faults(picture.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "picture", [each for each in PICTURES if each.suffix != ".svg"], ids=lambda picture: picture.name
)
def test_a_picture_in_pixels_is_a_png_with_enough_of_them(picture: Path) -> None:
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
    assert width >= WIDE_ENOUGH, (width, height)


def test_every_picture_is_shown_with_words_in_its_place() -> None:
    assert PICTURES
    assert {picture: bool(shown().get(picture)) for picture in PICTURES} == dict.fromkeys(PICTURES, True)


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("<title>Involution on a CPU</title>", "", "it has no <title>"),
        ('fill="#ffffff"/>\n<defs>', 'fill="#000000"/>\n<defs>', "its background is not white"),
        ('font-size="12"', 'font-size="7"', "it has text smaller than 12"),
    ],
    ids=["title", "background", "small"],
)
def test_a_picture_that_is_not_legible_is_seen(before: str, after: str, fault: str) -> None:
    picture = (ROOT / "docs" / "pictures" / "involution-cpu.svg").read_text(encoding="utf-8")
    assert before in picture
    assert faults(picture.replace(before, after)) == [fault]
