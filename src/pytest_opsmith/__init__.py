"""`pytest --opsmith mypackage.ops`: every property of every operator of a module is a test.

pytest imports this plugin in every run where opsmith is installed. So it imports nothing until the option is
given; a module inside of the package `opsmith` would import torch.
"""

from __future__ import annotations

import pytest

ALONE = "opsmith_alone"
"""Name of an internal option: True if only operators are collected."""
UNVERIFIED = "unverified"
"""Name of the property of a test, in pytest's sense, for a kernel that did not run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which all begin with `--opsmith`."""
    group = parser.getgroup("opsmith", "operators")
    group.addoption(
        "--opsmith",
        action="append",
        default=[],
        metavar="FILE_OR_MODULE[:NAME]",
        help="Test every property of every operator of a file or module, or of the one named; may be given "
        "again. On the command line without a path the operators alone are tested.",
    )
    group.addoption(
        "--opsmith-effort",
        choices=("quick", "default", "thorough"),
        default="default",
        help="Effort of the checks (default: default).",
    )
    group.addoption(
        "--opsmith-seed", type=int, default=0, metavar="N", help="Seed of the checks (default: 0)."
    )
    group.addoption(
        "--opsmith-isolate",
        action="store_true",
        help="Run each property in a child process, so that a crash is a failure and not the end.",
    )
    group.addoption(
        "--opsmith-sanitize",
        action="store_true",
        help="Run kernels in C++ under the compiler's sanitizers, too.",
    )
    group.addoption(
        "--opsmith-strict",
        action="store_true",
        help="Let warnings and unrun kernels fail, as errors do.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and collect only operators if no path is given."""
    config.addinivalue_line("markers", "opsmith: a property of an operator, from `--opsmith`")
    if not config.getoption("opsmith"):
        return
    given = config.invocation_params.args
    named = any(str(each) == "--opsmith" or str(each).startswith("--opsmith=") for each in given)
    paths = config.args_source is pytest.Config.ArgsSource.ARGS
    if getattr(config.option, ALONE, False) or (named and not paths):
        setattr(config.option, ALONE, True)  # the processes of pytest-xdist get the options
        config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the operators' items, before any are chosen from them by `-k`, `-m` or `--last-failed`."""
    targets = config.getoption("opsmith")
    if targets:
        from opsmith.testing.items import items_of

        items += items_of(session, targets)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the kernels that did not run."""
    reports = [report for category in terminalreporter.stats.values() for report in category]
    found = {
        str(value): None
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == UNVERIFIED and getattr(report, "when", "") == "call"
    }
    if found:
        terminalreporter.write_sep("=", "kernels that did not run")
        for line in found:
            terminalreporter.write_line(f"unverified: {line}")
