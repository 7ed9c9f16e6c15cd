"""Reports as SARIF 2.1.0, the format of code scanning services.

Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opsmith import __version__
from opsmith.checking.causes import CAUSES
from opsmith.checking.output.annotations import WORDS, Annotation, Unchecked, annotated
from opsmith.checking.report import Report, plain


def sarif(reports: Sequence[Report], unchecked: Sequence[Unchecked] = ()) -> str:
    """Return one run in SARIF: a rule for each cause among the findings, and a result for each finding.

    An accepted failure is a suppressed result. `executionSuccessful` is False if something could not be
    checked.

    Example:
        >>> json.loads(sarif([]))["runs"][0]["results"]
        []
    """
    found = list(annotated(reports, unchecked))
    rules = list(dict.fromkeys(each.rule for each in found))
    run = {
        "tool": {
            "driver": {"name": "opsmith", "version": __version__, "rules": [_rule(name) for name in rules]}
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {"executionSuccessful": not unchecked, "workingDirectory": {"uri": f"{Path.cwd().as_uri()}/"}}
        ],
        "results": [_result(each, rules.index(each.rule)) for each in found],
    }
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _rule(name: str) -> dict[str, Any]:
    known = CAUSES.get(name)
    meaning = "The operator or file could not be checked." if known is None else known.meaning
    return {"id": name, "shortDescription": {"text": meaning}}


def _result(found: Annotation, rule: int) -> dict[str, Any]:
    identity = f"{found.subject}\n{found.rule}\n{found.title}".encode("utf-8", "backslashreplace")
    result: dict[str, Any] = {
        "ruleId": found.rule,
        "ruleIndex": rule,
        "level": WORDS[found.severity][1],
        "message": {"text": f"{found.subject}: {found.title}: {found.message}"},
        "locations": [_location(found)],
        # A finding keeps its identity when lines move.
        "partialFingerprints": {"opsmith/v1": hashlib.sha256(identity).hexdigest()},
    }
    if found.failure is not None:
        result["properties"] = {"property": found.failure.property, "evidence": plain(found.failure.evidence)}
        if found.failure.accepted is not None:
            result["suppressions"] = [{"kind": "external", "justification": found.failure.accepted}]
    return result


def _location(found: Annotation) -> dict[str, Any]:
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": found.subject}]}
    if found.line is not None:
        file, line = found.line
        location["physicalLocation"] = {
            "artifactLocation": {"uri": Path(file).as_uri()},
            "region": {"startLine": line},
        }
    return location
