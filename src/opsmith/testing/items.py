"""Items of `pytest --opsmith`: a test for each property of an operator, which is checked once."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opsmith import errors
from opsmith.checking import Failure, Outcome, Report, check
from opsmith.checking.accepting import project_findings
from opsmith.checking.properties import PROPERTIES, USUAL
from opsmith.checking.report import REQUIRED, unverified_kernels, verdict_of
from opsmith.core.location import parsed
from opsmith.core.operator import Operator
from opsmith.targets import Target
from pytest_opsmith import UNVERIFIED


class PropertyFailedError(AssertionError):
    """A property of an operator fails; the text is the text of the report."""


def items_of(session: pytest.Session, targets: Sequence[str]) -> list[pytest.Item]:
    """Collect the items for the values of `--opsmith`, as pytest collects its items.

    Args:
        session: pytest's session.
        targets: Texts `FILE_OR_MODULE[:NAME]`, or ids of these items.

    Raises:
        UsageError: The class of pytest, if there is no such file, module, operator or property.
    """
    try:
        modules = [module_of(session, target) for target in targets]
    except errors.OpsmithError as error:
        raise pytest.UsageError(f"--opsmith: {error}") from error
    found = [item for module in modules for item in session.genitems(module)]
    return list({item.nodeid: item for item in found}.values())


def module_of(session: pytest.Session, text: str) -> OperatorsCollector:
    """Import the file or module of a target, and return its collector.

    Args:
        session: pytest's session.
        text: `FILE_OR_MODULE[:NAME]`, or an item's id.

    Raises:
        UsageError, OperatorNotFoundError, ModuleImportError: If nothing can be found or imported.
    """
    source, name, wanted = _parts(text)
    operators = Target(source, name).operators()
    sanitized = ["sanitized"] if getattr(session.config.option, "opsmith_sanitize", False) else []
    names = [wanted] if wanted else [*USUAL, *sanitized]
    return OperatorsCollector.from_parent(
        session, name=source, nodeid=source, operators=operators, names=names
    )


def _parts(text: str) -> tuple[str, str | None, str | None]:
    """Split a target of the command line, or an item's id, into module, operator and property."""
    target = Target.of(text)
    if target.name is None or not target.name.startswith(":"):
        return target.source, target.name, None
    operator, _, known = target.name.removeprefix(":").partition("::")
    if known and known not in PROPERTIES:
        raise errors.UsageError(
            f"there is no property `{known}`",
            expected=", ".join(f"`{name}`" for name in PROPERTIES),
            got=text,
            hint="give an id that pytest shows, or FILE_OR_MODULE[:NAME]",
        )
    return target.source, operator.replace(".", "::"), known or None


class OperatorsCollector(pytest.Collector):
    """A file or module whose operators are tested."""

    def __init__(self, *, operators: Sequence[Operator[..., Any]], names: Sequence[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.operators, self.names = operators, names

    def collect(self) -> Iterator[OperatorCollector]:
        """Yield its operators, by their short names if these are unique."""
        short = Counter(each.specification.short_name for each in self.operators)
        for each in self.operators:
            known = each.specification.short_name
            name = known if short[known] == 1 else each.name.replace("::", ".")
            yield OperatorCollector.from_parent(self, name=name, operator=each, names=self.names)


class OperatorCollector(pytest.Collector):
    """An operator, which is checked once for all of its items in this process."""

    def __init__(self, *, operator: Operator[..., Any], names: Sequence[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.operator, self.names = operator, names
        self._reports: dict[frozenset[str], Report] = {}

    def collect(self) -> Iterator[PropertyItem]:
        """Yield an item for each property."""
        for name in self.names:
            yield PropertyItem.from_parent(self, name=name)

    def outcome(self, name: str) -> tuple[Report, Outcome]:
        """Return the report that contains a property, and the outcome of the property."""
        for wanted, report in self._reports.items():
            if name in wanted:
                return report, _of(report, name)
        wanted = frozenset(self._checked_with(name))
        option = self.config.option
        report = self._reports[wanted] = check(
            self.operator,
            only=wanted,
            seed=option.opsmith_seed,
            effort=option.opsmith_effort,
            isolate=option.opsmith_isolate,
            strict=option.opsmith_strict,
            accept=project_findings(self.operator.name, self.config.rootpath),
        )
        return report, _of(report, name)

    def chosen(self) -> set[str]:
        """Return the properties of all chosen items."""
        return {item.name for item in self.session.items if item.parent is self}

    def _checked_with(self, name: str) -> set[str]:
        """Return the properties to check together: all chosen and all required ones."""
        chosen = self.chosen()
        if hasattr(self.config, "workerinput"):
            chosen = {name}  # with pytest-xdist the remaining items may run in different processes
        groups = (group for group in REQUIRED if chosen & {*group})
        return chosen | {name} | {each for group in groups for each in group}


def _of(report: Report, name: str) -> Outcome:
    return next(outcome for outcome in report.outcomes if outcome.property == name)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Stop pytest from capturing the trace log of torch's compiler in a region.

    pytest adds its handler to that logger, too, and shows an empty line for each of hundreds of records.
    """
    logger = logging.getLogger("torch.__trace")
    handlers = [each for each in logger.handlers if type(each).__module__.startswith("_pytest.")]
    for each in handlers:
        logger.removeHandler(each)
    try:
        yield
    finally:
        for each in handlers:
            logger.addHandler(each)


class PropertyItem(pytest.Item):
    """One property of one operator."""

    parent: OperatorCollector

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.add_marker("opsmith")

    def runtest(self) -> None:
        """Fail with the text of the report, or skip with its reason."""
        with _without_traces():
            report, outcome = self.parent.outcome(self.name)
        self.user_properties.append(("seconds", round(outcome.seconds, 3)))
        for note in outcome.notes:
            self.add_report_section("call", "notes", f"{note}\n")
        # Findings of a property without a test here (a kernel that no sample ran) are repeated by each test.
        told = [outcome, *(each for each in report.outcomes if each.property not in self.parent.chosen())]
        unverified = unverified_kernels(told)
        self.user_properties += [(UNVERIFIED, f"{self.parent.name}: {name}") for name in unverified]
        failures = sorted((failure for each in told for failure in each.failures), key=Failure.rank)
        if any(map(report.fails, told)):
            raise PropertyFailedError("\n\n".join(map(str, failures)))
        for failure in failures:
            self.add_report_section("call", failure.severity, f"{failure}\n")
        status, reason = verdict_of(report, outcome)
        if status == "failed":
            raise PropertyFailedError(reason)
        if status == "skipped":
            pytest.skip(reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the failure without the traceback of opsmith's code."""
        error = excinfo.value
        if isinstance(error, PropertyFailedError | errors.OpsmithError):
            return str(error)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return the location of the operator's declaration."""
        title = f"{self.parent.name} {self.name}"
        found = parsed(self.parent.operator.specification.where)
        return (self.path, None, title) if found is None else (Path(found[0]), found[1] - 1, title)
