"""docs/errors.md shows every class of error, with a message that the library really gives."""

from __future__ import annotations

import pytest
from doc_pages import python_blocks
from errors_table import ERRORS_PAGE, hints, names, with_table

PAGE = ERRORS_PAGE.read_text(encoding="utf-8")

CLASSES = names()


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_a_section_with_its_message(name: str) -> None:
    shown = [block for block in python_blocks(PAGE) if block.heading == name]
    assert [block.expected.partition(": ")[0] for block in shown] == [name], (
        f"docs/errors.md needs one section {name!r} whose Python raises it"
    )


@pytest.mark.parametrize("name", CLASSES)
def test_a_message_says_what_to_write_instead(name: str) -> None:
    assert hints(PAGE).get(name)


def test_no_section_is_left_over() -> None:
    assert {block.heading for block in python_blocks(PAGE)} - set(names()) <= {"How to read a message"}


def test_the_table_is_what_the_sections_say() -> None:
    assert with_table(PAGE) == PAGE, "run `python tests/docs/update.py errors.md`, and read the difference"
