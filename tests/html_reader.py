"""Reading an HTML page in tests: its text, its ids, its tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
"""Elements that have no end, as the HTML standard lists them (13.1.2)."""


class Reader(HTMLParser):
    """Reads a page: its text, its ids, what it links to, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag not in ("code", "a", "b"):
            self.words.append(" ")

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & {*self.open}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def every(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.attributes if name in attributes]

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.attributes}
