"""`pytest --opsmith mypackage.ops`: every property of every operator of a module is a test.

pytest imports this in every run where opsmith is installed, so that it imports nothing, torch least of all,
until the option is given; which is why it lies beside the package and not inside of it.
"""

from __future__ import annotations

import pytest

ALONE = "opsmith_alone"
"""Name of an option that nobody gives: whether nothing but operators is to be collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, which all begin with `--opsmith`."""
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
        help="How much to look at (default: default).",
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


def pytest_configure(config: pytest.Config) -> None:
    """Say what the mark means, and leave everything else out where only operators were asked for."""
    config.addinivalue_line("markers", "opsmith: a property of an operator, from `--opsmith`")
    if not config.getoption("opsmith"):
        return
    given = config.invocation_params.args
    named = any(str(each) == "--opsmith" or str(each).startswith("--opsmith=") for each in given)
    paths = config.args_source is pytest.Config.ArgsSource.ARGS
    if getattr(config.option, ALONE, False) or (named and not paths):
        setattr(config.option, ALONE, True)  # the processes of pytest-xdist are told by the options
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
