"""Reports as JUnit XML, as pytest writes it: a test case for each property of each operator."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from opsmith.checking.output.annotations import Unchecked
from opsmith.checking.report import Failure, Outcome, Report, verdict_of
from opsmith.errors import xml_text


def junit(reports: Sequence[Report], unchecked: Sequence[Unchecked] = ()) -> str:
    """Return a suite with properties that failed, were skipped or passed, and operators that were not
    checked.

    The test cases are those of `pytest --opsmith`: the failures of a property become one failure, and a
    skipped property fails if the report needs it to pass. With `strict`, warnings fail, too. If a report does
    not pass because no property ran, this is a separate failure.

    Example:
        >>> report = Report("demo::twice", (Outcome("forward", "passed"),), seed=0)
        >>> ElementTree.fromstring(junit([report]))[0].attrib["tests"]
        '1'
    """
    suite = Element("testsuite", name="opsmith")
    for report in reports:
        shown = [each for each in report.outcomes if not each.left_out or report.fails(each)]
        failed = [_add_property(suite, report, each) for each in shown]
        if not (report.passed_as_asked or any(failed)):
            _add(_case(suite, report.operator, "check"), "failure", report.verdict(), "")
    for each in unchecked:
        _add(_case(suite, each.subject, "check"), "error", each.message.partition("\n")[0], each.message)
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


def _add_property(suite: Element, report: Report, outcome: Outcome) -> bool:
    """Add a test case; return True if it is a failure."""
    case = _case(suite, report.operator, outcome.property, outcome.seconds)
    text = "\n\n".join(map(str, sorted(outcome.failures, key=Failure.rank)))
    status, reason = verdict_of(report, outcome)
    if status == "failed":
        _add(case, "failure", reason, text)
    elif status == "skipped":
        SubElement(case, "skipped", type="pytest.skip", message=xml_text(reason))
    elif text:
        SubElement(case, "system-out").text = xml_text(text)
    return status == "failed"


def _case(suite: Element, subject: str, name: str, seconds: float = 0.0) -> Element:
    return SubElement(suite, "testcase", classname=xml_text(subject), name=name, time=f"{seconds:.3f}")


def _add(case: Element, kind: str, message: str, text: str) -> None:
    SubElement(case, kind, message=xml_text(message)).text = xml_text(text)
