"""Each error class, cause and property has a page, whose example shows it."""

from __future__ import annotations

import re

import pytest
from doc_pages import same
from rule_pages import TEXTS, example

from opsmith import errors
from opsmith.checking.causes import CAUSES
from opsmith.checking.report import Failure
from opsmith.rules import Rule, pages, rule, rules
from opsmith.rules.rule import ACCEPT, COMPARED, SECTIONS, sections

RULES = {each.key: each for each in rules()}

SLOW = {
    *("BenchmarkFormatError", "CompileError", "DynamicAxisError", "ExportError", "ExportMismatchError"),
    *("KernelError", "KernelFaultError", "KernelRefusedError", "KernelSignatureError", "NotEmulatedError"),
    *("NotPassedError", "OnnxRuntimeError"),
    *("out-of-bounds", "undefined", "uninitialized", "misaligned", "divergent-barrier", "race", "endless"),
    *("not-refused", "resources", "narrow-index"),
    *("cuda", "triton", "compile", "export", "opcheck", "properties/resources", "sanitized"),
    *("half-written", "layout", "nonlinear-grad", "overwritten", "kernel-mismatch"),
}
"""Rules whose example takes longest: it builds kernels, exports, compiles or checks much."""

NEEDS = {"triton": "triton"}
"""Packages without which an example does not run."""


def test_each_rule_has_a_page_and_no_page_is_left_over() -> None:
    assert {each.relative_to(TEXTS).as_posix() for each in TEXTS.rglob("*.md")} == {
        each.file for each in rules()
    }


@pytest.mark.parametrize("each", RULES.values(), ids=RULES)
def test_no_text_says_what_the_code_says(each: Rule) -> None:
    text = (TEXTS / each.file).read_text(encoding="utf-8")
    assert ACCEPT not in sections(text)
    assert each.kind != "cause" or CAUSES[each.name].fix not in text


def test_a_key_leads_to_its_rule() -> None:
    assert [rule(each.key) for each in rules()] == [*rules()]


def test_a_cause_comes_before_a_property_of_the_same_name() -> None:
    assert rule("resources").kind == "cause"
    assert rule("properties/resources").kind == "property"


@pytest.mark.parametrize("each", RULES.values(), ids=RULES)
def test_a_page_has_all_parts(each: Rule) -> None:
    found = sections(each.text)
    assert {*found} == {*SECTIONS} - ({COMPARED} if each.kind != "property" else set())
    assert all(found.values())
    assert each.title.endswith(".")


def _items() -> list[object]:
    return [
        pytest.param(each, id=key, marks=[pytest.mark.slow] if key in SLOW else [])
        for key, each in RULES.items()
    ]


@pytest.mark.parametrize("each", _items())
def test_an_example_prints_what_stands_below_it(each: Rule) -> None:
    if each.name in NEEDS:
        pytest.importorskip(NEEDS[each.name])
    running = example(each)
    for position, block in enumerate(running.blocks):
        printed = running.printed(position)
        if not same(printed, block.expected):
            assert printed == block.expected  # which shows the difference


@pytest.mark.parametrize("each", _items())
def test_an_example_shows_the_rule(each: Rule) -> None:
    shown = "".join(block.expected for block in example(each).blocks)
    if each.kind == "error":
        assert re.match(rf"(opsmith\.errors\.)?{each.name}: ", shown)
        assert re.search(r"^  hint: ", shown, re.MULTILINE)
        assert shown.endswith(f"  more: {each.address}\n")
    elif each.kind == "cause":
        assert re.match(rf"(warning: |limit: )?\w+( of `[^`]+`)?: {each.name}\n", shown)
    else:
        assert re.search(rf"^{each.name}: passed$", shown, re.MULTILINE)


def test_every_cause_says_in_a_sentence_what_to_do() -> None:
    for each in CAUSES.values():
        assert re.fullmatch(r"[A-Z][a-z]+ .*[^.]\.", each.fix), each.name
        assert len(each.fix) < 100, each.name


def test_the_last_line_of_an_error_leads_to_its_page() -> None:
    for name in {*errors.__all__} - {"OpsmithError"}:
        last = str(getattr(errors, name)("it is wrong", hint="write it")).splitlines()[-1]
        assert last == f"  more: {rule(name).address}"


def test_the_last_line_of_a_failure_leads_to_the_page_of_its_cause() -> None:
    for name in CAUSES:
        last = str(Failure("gradient", "x", name, "it is wrong")).splitlines()[-1]
        assert last == f"  more: {rule(name).address}"


def test_the_index_has_every_rule() -> None:
    every = pages()
    assert list(every) == ["index.md", *(each.file for each in rules())]
    assert all(f"]({each.file})" in every["index.md"] for each in rules())


def test_a_name_that_resembles_none_gets_the_way_to_all() -> None:
    with pytest.raises(errors.UsageError, match="`opsmith rule` lists every name"):
        rule("qqqq")
