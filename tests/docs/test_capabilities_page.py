"""The table in docs/capabilities.md is the one in the code."""

from __future__ import annotations

import re

from doc_pages import ROOT

from opsmith.torch_library.capabilities.capability import CAPABILITIES, describe_tested_versions

PAGE = (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")
REQUIRED = "opsmith does not work, and says so when the first operator is declared"


def test_the_table_is_the_one_in_the_code() -> None:
    table = PAGE.partition("to the code -->\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", table, re.MULTILINE)
    assert rows == [(each.name, each.purpose, each.instead or REQUIRED) for each in CAPABILITIES.values()]


def test_the_tested_versions_are_named() -> None:
    assert f"opsmith is tested with torch {describe_tested_versions('and')}." in " ".join(PAGE.split())
