"""The page says all that a report says, lets nothing of it become markup, and asks nobody for anything."""

import re
from dataclasses import replace
from itertools import pairwise

from html_reader import Reader

from opsmith.checking import Failure, Outcome, Report
from opsmith.checking.output.html import page

SCRIPT = "<script>alert('x')</script>"

FAILURE = Failure(
    "gradient",
    "weight",
    "transposed",
    "the gradient of `weight` is the transpose of the right tensor",
    "operators.py:12",
    {
        "error": 3e-16,
        "index": [2, 0],
        "also fits": {"swapped-inputs": {"error": 4e-16}},
        "stderr": "one\ntwo",
    },
    "import torch\nboom(first, second)",
    dtypes=("float64",),
)
DTYPES = ("float64", "float32")
REPORT = Report(
    "demo::linear",
    (
        Outcome("forward", "passed", seconds=0.25, notes=("bfloat16 was left out",), dtypes=DTYPES),
        Outcome("gradient", "failed", seconds=1.5, failures=(FAILURE,), dtypes=DTYPES),
        Outcome("effects", "failed", failures=(Failure("effects", "x", "raises", "no", follows="gradient"),)),
        Outcome("batching", "skipped", "the operator declares no `batching=`"),
        Outcome("compile", "passed", seconds=12.0, compiles=True),
    ),
    seed=7,
    environment={"torch": "2.13.0", "python": "3.11"},
    effort="quick",
    remarks=("its arguments were guessed",),
    inputs=("sample 0 (x [3])", "sample 1 (x [0])"),
    rejected=("sample 0 with `x` at 0: ValueError: no",),
)
GOOD = Report("demo::fine", (Outcome("forward", "passed"), Outcome("gradient", "passed")), seed=7)


def test_a_page_says_all_that_the_report_says() -> None:
    read = Reader(page([REPORT]))
    assert read.open == []
    for words in (
        "demo::linear",
        "✗ FAILED: gradient, effects",
        "with seed 7 and quick effort",
        "its arguments were guessed",
        "✓ passed ✓ passed ✓ passed 0.25 s bfloat16 was left out",
        "✗ failed ✗ failed ? unclear 1.50 s",
        "– Skipped: 1 batching: the operator declares no batching=",
        "12.00 s compiles",
        "sum of the rows that are not marked “compiles” 1.75 s",
        "sum of the rows marked “compiles”, and the loading of torch's compiler: much of it is shared by all "
        "operators of one run 12.00 s",
        "Under a dtype: ✓ the property ran in this dtype without a failure; ✗ an error; ? unknown "
        "for this dtype: the failures are for float64, or name no dtype; empty the property did not "
        "run in this dtype property",
        "The inputs that it was run on: 2, and 1 that it rejects",
        "sample 1 (x [0])",
        "sample 0 with x at 0: ValueError: no",
        "gradient of weight: transposed",
        "the gradient of weight is the transpose of the right tensor",
        "where operators.py:12 cause Two dimensions of the gradient are transposed. fix Transpose the result",
        "error 3e-16",
        "index [2, 0]",
        "also fits swapped-inputs error 4e-16",
        "import torch boom(first, second)",
        "effects of x: raises, which follows from gradient: fix that first",
        "The cause transposed is decided by: The gradient with these two dimensions transposed is right, on "
        "every fresh input. more: opsmith rule transposed",
        "torch 2.13.0; python 3.11",
    ):
        assert words in read.text, words
    assert "<code>weight</code>" in page([REPORT])


def test_several_operators_are_in_one_page_with_a_list_of_them() -> None:
    unchecked = [("demo::bare", "demo::bare: there are no samples\n  hint: give some")]
    read = Reader(page([REPORT, GOOD], unchecked))
    assert "opsmith check: 3 operators" in read.text
    assert "1 passed, 1 not passed, 1 could not be checked" in read.text
    assert "demo::fine ✓ passed" in read.text
    assert "demo::bare: there are no samples hint: give some" in read.text
    assert "nav" in read.tags()
    assert "nav" not in Reader(page([GOOD])).tags()
    assert "opsmith check: demo::fine" in Reader(page([GOOD])).text


def test_a_report_that_failed_comes_before_those_that_passed() -> None:
    read = Reader(page([GOOD, REPORT]))
    assert read.text.index("gradient of weight: transposed") < read.text.rindex("demo::fine")


def test_the_legend_holds_the_signs_that_are_there_and_no_others() -> None:
    assert "Under a dtype" not in Reader(page([GOOD])).text
    fine = replace(GOOD, outcomes=tuple(replace(each, dtypes=DTYPES) for each in GOOD.outcomes))
    text = Reader(page([fine])).text
    assert "Under a dtype: ✓ the property ran in this dtype without a failure property result" in text


def test_every_link_leads_somewhere_and_no_id_is_given_twice() -> None:
    read = Reader(page([REPORT, GOOD, REPORT], [("a", "b")]))
    ids = read.every("id")
    assert len(ids) == len(set(ids))
    named = [name for each in read.every("aria-labelledby") for name in each.split()]
    links = [link for link in read.every("href") if link != "data:,"]
    assert {link.removeprefix("#") for link in links} | {*named} <= {*ids}
    assert all(link.startswith("#") for link in links)


def test_a_page_asks_nobody_for_anything() -> None:
    text = page([REPORT, GOOD])
    read = Reader(text)
    assert read.every("src") == []
    assert not re.search(r"https?:|url\(|@import|//cdn", text)
    (policy,) = (each for each in read.every("content") if "default-src" in each)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_a_page_has_landmarks_a_language_and_headings_in_order() -> None:
    text = page([REPORT, GOOD])
    read = Reader(text)
    assert {"header", "nav", "main", "footer", "caption"} <= read.tags()
    assert '<html lang="en">' in text
    levels = [int(tag[1]) for tag, _ in read.attributes if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    scopes = [attributes.get("scope") for tag, attributes in read.attributes if tag == "th"]
    assert set(scopes) == {"col", "row"}
    assert "width=device-width" in text
    assert "prefers-color-scheme: dark" in text


def test_a_cell_for_each_property_and_dtype() -> None:
    text = page([REPORT])
    heads = re.findall(r'<abbr title="(\w+)">(\w+)</abbr>', text)
    assert heads == [("float64", "f64"), ("float32", "f32")]
    rows = re.findall(r"<tr class=.*?</tr>", text, re.DOTALL)
    cells = [re.findall(r'<td class="dtype (\w*)">.*?</td>', row) for row in rows]
    whys = [at for at, row in enumerate(rows) if 'class="why"' in row]
    assert cells == [["passed", "passed"], [], ["failed", "unclear"], ["", ""], ["", ""]]
    assert whys == [1]


def test_nothing_that_a_report_says_becomes_markup() -> None:
    nasty = SCRIPT + "\"'`<b>`&amp;"
    failure = Failure(
        "gradient",
        nasty,
        "sign",
        nasty,
        nasty,
        {nasty: nasty, "deep": {nasty: [nasty]}, "long": f"{nasty}\n2"},
        nasty,
    )
    outcomes = (
        Outcome("forward", "skipped", nasty, notes=(nasty,)),
        Outcome("gradient", "failed", failures=(failure,)),
        Outcome(nasty, "failed", failures=(Failure(nasty, nasty, nasty, nasty, follows=nasty),)),
    )
    report = Report(
        nasty, outcomes, 0, {nasty: nasty}, remarks=(nasty,), effort=nasty, inputs=(nasty,), rejected=(nasty,)
    )
    text = page([report, GOOD], [(nasty, nasty)])
    read = Reader(text)
    assert SCRIPT not in text
    assert text.count("<script>") == 1
    assert text.count("<b>") == text.count("<b>sign</b>") + text.count("<b>forward</b>") == 2
    assert read.text.count("alert('x')") > 10
    assert read.open == []
