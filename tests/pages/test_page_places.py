"""Files of pages, the index, and every message about a file or an operator that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import paged
import pytest
from html_reader import Reader

import opsmith
from opsmith import errors
from opsmith.pages import writer
from opsmith.pages.writer import write

pytestmark = pytest.mark.usefixtures("no_exports")

BOTH = (paged.affine, paged.plain)
REPORTS = {"paged::affine": paged.failed(paged.affine), "paged::plain": paged.passed(paged.plain)}


@pytest.mark.slow
def test_several_operators_have_an_index_and_a_page_each(tmp_path: Path) -> None:
    files = opsmith.page(BOTH, tmp_path / "pages", reports=REPORTS)
    assert [file.name for file in files] == ["index.html", "paged-affine.html", "paged-plain.html"]
    assert {file.name for file in (tmp_path / "pages").iterdir()} == {file.name for file in files}
    index, affine, _ = (Reader(file.read_text(encoding="utf-8")) for file in files)
    assert index.open == []
    links = [each for each in index.every("href") if each != "data:,"]
    assert links == ["paged-affine.html", "paged-plain.html"]
    assert "paged::affine ✗ FAILED: gradient; 1 error Compute scale (x Wt) + b" in index.text
    assert "kernels: cpu (Python); ONNX: function ✓ exported , inline ✗ refused" in index.text
    assert "paged::plain ✓ passed no kernel" in index.text
    assert "index.html" in affine.every("href")


def test_one_operator_in_a_folder_has_an_index_too_and_a_file_none(tmp_path: Path) -> None:
    files = opsmith.page(paged.plain, tmp_path, reports=REPORTS)
    assert [file.name for file in files] == ["index.html", "paged-plain.html"]
    assert "<h1>1 operator</h1>" in files[0].read_text(encoding="utf-8")
    (alone,) = opsmith.page(paged.plain, str(tmp_path / "alone.html"), reports=REPORTS)
    assert "index.html" not in alone.read_text(encoding="utf-8")


def test_an_operator_that_is_named_twice_has_one_page(tmp_path: Path) -> None:
    files = opsmith.page([paged.plain, paged.plain], tmp_path, reports=REPORTS)
    assert len(files) == 2


def refusal(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> list[str]:
    """The message of an error, before anything was examined."""
    monkeypatch.setattr(writer, "collect_content", None)
    with pytest.raises(errors.UsageError) as raised:
        opsmith.page(*args, **options)
    return raised.value.message().splitlines()


def test_one_file_is_not_for_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, BOTH, tmp_path / "page.html") == [
        f"`{tmp_path}/page.html` is one file, but there are 2 operators",
        "  argument: path",
        "  expected: a folder, for an index and a page for each operator",
        "  got: `paged::affine`, `paged::plain`",
        f"  hint: write `{tmp_path}/page`, or name one operator",
    ]


EXPECTED = "  expected: a file in an existing folder that can be written to"


@pytest.mark.parametrize(
    ("name", "got", "hint"),
    [
        ("none/page.html", "there is no folder `{folder}/none`", "make the folder first"),
        ("none/pages", "there is no folder `{folder}/none`", "make the folder first"),
        ("file", "a file", "name it `page.html`, or name a folder"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, got: str, hint: str
) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(monkeypatch, paged.plain, tmp_path / name) == [
        f"no file can be written to `{tmp_path}/{name}`",
        "  argument: path",
        EXPECTED,
        f"  got: {got.format(folder=tmp_path)}",
        f"  hint: {hint}",
    ]


def test_a_path_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, paged.plain, 3)[3] == "  got: int"


@pytest.mark.parametrize(("given", "got"), [([], "none"), (3, "int 3"), ([paged.plain, "exp"], "str 'exp'")])
def test_pages_are_about_operators(monkeypatch: pytest.MonkeyPatch, given: Any, got: str) -> None:
    assert refusal(monkeypatch, given, "page.html") == [
        "a page is about operators of opsmith",
        "  argument: operators",
        "  expected: an operator, or several",
        f"  got: {got}",
        '  hint: declare it with `@opsmith.operator("mylib::name")`, or adopt it with `opsmith.adopt`',
    ]


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"reports": REPORTS["paged::plain"]}, "Report "),
        (
            {"reports": {"paged::plain": REPORTS["paged::affine"]}},
            "for `paged::plain` one of `paged::affine`",
        ),
        ({"reports": {"paged::plain": "passed"}}, "for `paged::plain` str 'passed'"),
        ({"benchmarks": {"paged::plain": REPORTS["paged::plain"]}}, "for `paged::plain` Report "),
        ({"benchmarks": "all"}, "str 'all'"),
    ],
    ids=["one report", "of another", "no report", "no benchmark", "no mapping"],
)
def test_what_was_found_before_is_by_the_operators_names(tmp_path: Path, given: Any, got: str) -> None:
    with pytest.raises(errors.UsageError, match="must be a mapping from the operators' names") as raised:
        opsmith.page(paged.plain, tmp_path / "page.html", **given)
    assert raised.value.argument == next(iter(given))
    assert str(raised.value.got).startswith(got)
    assert list(tmp_path.iterdir()) == []


def test_a_page_may_say_what_is_no_utf_8(tmp_path: Path) -> None:
    write(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a?b"


def test_an_unknown_effort_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "effort" in refusal(monkeypatch, paged.plain, tmp_path / "a.html", effort="lazy")[0]


def test_a_disk_that_fails_leaves_nothing_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: Any, **options: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(errors.UsageError, match="got: No space left on device"):
        write(tmp_path / "page.html", "words")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_pages_are_for_any_reader(tmp_path: Path) -> None:
    for file in opsmith.page(BOTH, tmp_path, reports=REPORTS):
        text = file.read_text(encoding="utf-8")
        assert '<html lang="en">' in text
        assert "width=device-width" in text
        assert "prefers-color-scheme: dark" in text
        assert {attributes.get("scope") for tag, attributes in Reader(text).attributes if tag == "th"} <= {
            "col",
            "row",
        }
        scrolling = re.findall(r'<div class="(?:wide|plot)"[^>]*>', text)
        assert all('tabindex="0"' in each and "aria-label=" in each for each in scrolling)
