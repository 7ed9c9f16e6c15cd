"""The tests that `pytest --opsmith` makes: one for each property of an operator, from one check of it."""

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
from opsmith.checking import Outcome, Report, check
from opsmith.checking.properties import PROPERTIES, USUAL
from opsmith.checking.report import REQUIRED
from opsmith.core.operator import Operator
from opsmith.targets import Target


class PropertyFailedError(AssertionError):
    """A property of an operator does not hold; the text is what the report says of it."""


def items_of(session: pytest.Session, targets: Sequence[str]) -> list[pytest.Item]:
    """The items for what stands behind `--opsmith`, collected as pytest collects all others.

    Args:
        session: pytest's session.
        targets: Each `FILE_OR_MODULE[:NAME]`, or the id of one of these items.

    Raises:
        UsageError: pytest's own, if there is no such file, module, operator or property.
    """
    try:
        modules = [module_of(session, target) for target in targets]
    except errors.OpsmithError as error:
        raise pytest.UsageError(f"--opsmith: {error}") from error
    found = [item for module in modules for item in session.genitems(module)]
    return list({item.nodeid: item for item in found}.values())


def module_of(session: pytest.Session, text: str) -> OperatorModule:
    """The collector for one target, whose file or module is imported.

    Args:
        session: pytest's session.
        text: `FILE_OR_MODULE[:NAME]`, or an item's id.

    Raises:
        UsageError, OperatorNotFoundError, ModuleImportError: If it names nothing.
    """
    place, name, wanted = _parts(text)
    operators = Target(place, name).operators()
    asked = ["sanitized"] if getattr(session.config.option, "opsmith_sanitize", False) else []
    names = [wanted] if wanted else [*USUAL, *asked]
    return OperatorModule.from_parent(session, name=place, nodeid=place, operators=operators, names=names)


def _parts(text: str) -> tuple[str, str | None, str | None]:
    """Place, operator and property, from what the command line takes or from an item's id."""
    target = Target.of(text)
    if target.name is None or not target.name.startswith(":"):
        return target.place, target.name, None
    operator, _, known = target.name.removeprefix(":").partition("::")
    if known and known not in PROPERTIES:
        raise errors.UsageError(
            f"there is no property `{known}`",
            expected=", ".join(f"`{name}`" for name in PROPERTIES),
            got=text,
            hint="take an id as pytest shows it, or FILE_OR_MODULE[:NAME]",
        )
    return target.place, operator.replace(".", "::"), known or None


class OperatorModule(pytest.Collector):
    """A file or module whose operators are tested."""

    def __init__(self, *, operators: Sequence[Operator[..., Any]], names: Sequence[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.operators, self.names = operators, names

    def collect(self) -> Iterator[OperatorNode]:
        """Its operators, by their short names where these tell them apart."""
        short = Counter(each.specification.short_name for each in self.operators)
        for each in self.operators:
            known = each.specification.short_name
            name = known if short[known] == 1 else each.name.replace("::", ".")
            yield OperatorNode.from_parent(self, name=name, operator=each, names=self.names)


class OperatorNode(pytest.Collector):
    """An operator, which is checked once for all of its items that run here."""

    def __init__(self, *, operator: Operator[..., Any], names: Sequence[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.operator, self.names = operator, names
        self._reports: dict[frozenset[str], Report] = {}

    def collect(self) -> Iterator[PropertyItem]:
        """An item for each property."""
        for name in self.names:
            yield PropertyItem.from_parent(self, name=name)

    def outcome(self, name: str) -> tuple[Report, Outcome]:
        """What became of a property, and the report that says so."""
        for wanted, report in self._reports.items():
            if name in wanted:
                return report, _of(report, name)
        wanted = frozenset(self._together(name))
        option = self.config.option
        report = self._reports[wanted] = check(
            self.operator,
            only=wanted,
            seed=option.opsmith_seed,
            effort=option.opsmith_effort,
            isolate=option.opsmith_isolate,
        )
        return report, _of(report, name)

    def _together(self, name: str) -> set[str]:
        """The properties to check at once: those of all items that were chosen, and what decides for them."""
        chosen = {item.name for item in self.session.items if item.parent is self}
        if hasattr(self.config, "workerinput"):
            chosen = {name}  # with pytest-xdist the others may run elsewhere
        groups = (group for group in REQUIRED if chosen & {*group})
        return chosen | {name} | {each for group in groups for each in group}


def _of(report: Report, name: str) -> Outcome:
    return next(outcome for outcome in report.outcomes if outcome.property == name)


@contextmanager
def _without_traces() -> Iterator[None]:
    """A region in which pytest does not capture what torch's compiler logs for its own tools.

    pytest hangs its handler on that logger, too, and shows an empty line for each of hundreds of records.
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

    parent: OperatorNode

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.add_marker("opsmith")

    def runtest(self) -> None:
        """Fail with what the report says, or skip with its reason."""
        with _without_traces():
            report, outcome = self.parent.outcome(self.name)
        self.user_properties.append(("seconds", round(outcome.seconds, 3)))
        for note in outcome.notes:
            self.add_report_section("call", "notes", f"{note}\n")
        if outcome.status == "failed":
            raise PropertyFailedError("\n\n".join(str(failure) for failure in outcome.failures))
        if outcome.status == "skipped":
            if self._is_missed(report):
                raise PropertyFailedError(f"it could not be checked: {outcome.reason}")
            pytest.skip(outcome.reason)

    def _is_missed(self, report: Report) -> bool:
        """Whether a check without this property is no success, and nothing else stands for it."""
        passed = {outcome.property for outcome in report.outcomes if outcome.status == "passed"}
        return any(self.name == group[0] and not passed & {*group} for group in REQUIRED)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What is wrong, without the lines of ours that found out."""
        error = excinfo.value
        if isinstance(error, PropertyFailedError | errors.OpsmithError):
            return str(error)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the operator is declared."""
        file, _, line = self.parent.operator.specification.where.rpartition(":")
        number = int(line) - 1 if line.isdigit() else None
        return Path(file) if file else self.path, number, f"{self.parent.name} {self.name}"
