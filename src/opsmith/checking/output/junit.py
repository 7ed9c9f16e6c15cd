"""Reports as JUnit XML, as pytest writes it: a test case for each property of each operator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from opsmith.checking.output.annotations import Unchecked
from opsmith.checking.report import Failure, Outcome, Report, unverified_kernels

_REFUSED = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no way to write."""


def junit(reports: Sequence[Report], unchecked: Sequence[Unchecked] = ()) -> str:
    """Return one suite: properties that failed, were skipped or passed, and what could not be checked.

    The test cases are those of `pytest --opsmith`: the failures of a property are one failure, and a skipped
    property without which a report does not pass fails. With `strict`, warnings fail, too.

    Example:
        >>> report = Report("demo::twice", (Outcome("forward", "passed"),), seed=0)
        >>> ElementTree.fromstring(junit([report]))[0].attrib["tests"]
        '1'
    """
    suite = Element("testsuite", name="opsmith")
    for report in reports:
        for outcome in report.outcomes:
            if not outcome.left_out:
                _add_property(suite, report, outcome)
    for each in unchecked:
        name = each.operator or each.file or "opsmith check"
        case = SubElement(suite, "testcase", classname=_text(name), name="check", time="0.000")
        _add(case, "error", each.message.partition("\n")[0], each.message)
    counts = {
        "errors": len(suite.findall("*/error")),
        "failures": len(suite.findall("*/failure")),
        "skipped": len(suite.findall("*/skipped")),
        "tests": len(suite),
    }
    seconds = sum(float(case.attrib["time"]) for case in suite)
    suite.attrib |= {name: str(count) for name, count in counts.items()} | {"time": f"{seconds:.3f}"}
    suites = Element("testsuites", name="opsmith check")
    suites.append(suite)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add_property(suite: Element, report: Report, outcome: Outcome) -> None:
    case = SubElement(
        suite,
        "testcase",
        classname=_text(report.operator),
        name=outcome.property,
        time=f"{outcome.seconds:.3f}",
    )
    failures = sorted(outcome.failures, key=Failure.rank)
    text = "\n\n".join(map(str, failures))
    strictly = report.strict and (outcome.word() == "warning" or unverified_kernels([outcome]))
    if outcome.status == "failed" or strictly:
        _add(case, "failure", failures[0].heading(), text)
    elif outcome.status == "skipped" and outcome.property in report.missing():
        _add(case, "failure", f"it could not be checked: {outcome.reason}", text)
    elif outcome.status == "skipped":
        SubElement(case, "skipped", type="pytest.skip", message=_text(outcome.reason))
    elif text:
        SubElement(case, "system-out").text = _text(text)


def _add(case: Element, kind: str, message: str, text: str) -> None:
    SubElement(case, kind, message=_text(message)).text = _text(text)


def _text(text: str) -> str:
    return _REFUSED.sub("\N{REPLACEMENT CHARACTER}", text)
