"""Under OPSMITH_CONSERVATIVE=1, what is refused or done otherwise is counted; see conservative.py."""

from __future__ import annotations

import gc
import getpass
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._export.utils as export_utils
from conservative import OTHERWISE, REFUSED
from torch.autograd import forward_ad
from torch.export import decomp_utils, exported_program

from opsmith import config as environment
from opsmith import errors
from opsmith.build.cache import parts_of
from opsmith.config import cache_directory
from opsmith.core import collector
from opsmith.kernels.cuda import nvrtc

HERE = Path(__file__).parent
OFF = re.compile(r"needs the capability `(\w+)`, which is off")


def capability_of(item: pytest.Item, table: Mapping[str, tuple[str, ...]]) -> str | None:
    """The capability whose row in a table names a test function, or this case of it."""
    folder = item.path.relative_to(HERE).as_posix()
    names = {f"{folder}::{name}" for name in (getattr(item, "originalname", item.name), item.name)}
    return next((capability for capability, tests in table.items() if names & {*tests}), None)


def refusing(error: BaseException | None) -> str | None:
    """The capability that an error, or one that led to it, was raised for."""
    while error is not None:
        # Where torch compiles, it raises an error of its own, and quotes ours in it.
        ours = isinstance(error, errors.OpsmithError) or "got TransformError(" in str(error)
        found = OFF.search(str(error)) if ours else None
        if found:
            return found[1]
        error = error.__cause__ or error.__context__
    return None


def copy_bundled_kernels(source: Path, target: Path) -> None:
    """Copy what `make setup` has built: kernels of involution and calls in C++ take half a minute each."""
    for entry in source.iterdir() if source.is_dir() else ():
        parts = parts_of(entry)
        bundled = parts.get("operator", "").startswith("opsmith::") or parts.get("kind") in (
            "runtime",
            "calls",
        )
        if bundled and not (target / entry.name).exists():
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=target))
            shutil.copytree(entry, scratch / entry.name)
            with suppress(OSError):  # another run of the tests was first
                (scratch / entry.name).rename(target / entry.name)
            shutil.rmtree(scratch)


def pytest_configure(config: pytest.Config) -> None:
    # Kernels that tests build are kept apart from the user's own: where the caller says, or from run to run.
    given = os.environ.pop("OPSMITH_CACHE", "")
    os.environ["OPSMITH_NO_CALLS_BUILD"] = "1"  # it takes a minute, for each empty cache of a test
    own = cache_directory()
    os.environ["OPSMITH_CACHE"] = given or f"{tempfile.gettempdir()}/opsmith-tests-{getpass.getuser()}"
    copy_bundled_kernels(own, cache_directory())
    # torch says this of the caches on disk, which are off then.
    config.addinivalue_line("filterwarnings", "ignore:dynamo_pgo force disabled:UserWarning")


EXPORTS = re.compile(r"exporting/|test_export_command|test_tour_exported")


def thin_out(items: list[pytest.Item]) -> None:
    """Mark the cases of a long matrix as slow, but for each n-th, as its marker `every` says."""
    cases: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("every")
        function = item.nodeid.partition("[")[0]
        if marker is not None and cases.setdefault(function, 0) % marker.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[function] = cases.get(function, 0) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups, and before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep in one process what needs a warm-up: the first compile takes 15 seconds, the first export 5."""
    thin_out(items)
    for item in items:
        path = item.path.relative_to(HERE).as_posix()
        if path.startswith("docs/") or item.get_closest_marker("xdist_group"):
            continue  # a page's blocks stay together
        if item.get_closest_marker("compile"):
            item.add_marker(pytest.mark.xdist_group("compile"))
        elif EXPORTS.search(path):
            item.add_marker(pytest.mark.xdist_group("exports"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, but for those that a group keeps elsewhere.

    They share the fixtures of their module. pytest-xdist goes through all that a process has done after each
    test: ten thousand single tests take it fifteen seconds.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).partition("::")[0]

    return ByFile(config, log)


def set_objects_aside() -> None:
    """Take the objects that there are out of later collections: tests collect, and torch has a million."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    set_objects_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Set objects aside after a test that imported much, as the first compile does, and after each file."""
    modules = len(sys.modules)
    done = yield
    if len(sys.modules) > modules + 20 or (nextitem is not None and nextitem.path != item.path):
        set_objects_aside()
    return done


def pytest_sessionstart() -> None:
    # What a shell starts in the background ignores Ctrl-C, and so does what it starts; some tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A CUDA build of torch 2.11 that finds no GPU starts autograd's threads if a process computes its first
    # gradient within `torch.compile`, and only then; no check is isolated in that process after it.
    torch.ones(1, requires_grad=True).sum().backward()
    # torch loads its rules of forward mode once, and torch 2.15 warns then of its own `torch.jit.script`.
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        forward_ad.make_dual(torch.ones(1), torch.ones(1))


@pytest.fixture(scope="session", autouse=True)
def _composite_operators_are_looked_up_once() -> Iterator[None]:
    """An export by torch looks every composite operator up again for each namespace of operators.

    The suite declares operators in 140 namespaces. Here they are looked up if there are more, once an export.
    """
    look_up, known = getattr(export_utils, "_materialize_cpp_cia_ops", None), 0
    collect, collecting = getattr(export_utils, "_collect_all_valid_cia_ops", None), False

    def collect_after_one_look_up() -> Any:
        nonlocal collecting
        look_up_if_there_are_more()
        collecting = True
        try:
            assert collect is not None
            return collect()
        finally:
            collecting = False

    def look_up_if_there_are_more() -> None:
        nonlocal known
        if collecting:
            return
        registered = len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if registered != known:
            known = registered
            assert look_up is not None
            look_up()

    with pytest.MonkeyPatch.context() as patch:
        if look_up is not None:
            patch.setattr(export_utils, "_materialize_cpp_cia_ops", look_up_if_there_are_more)
            for module in (export_utils, decomp_utils, exported_program):
                if getattr(module, "_collect_all_valid_cia_ops", None) is collect is not None:
                    patch.setattr(module, "_collect_all_valid_cia_ops", collect_after_one_look_up)
        yield


@pytest.fixture(scope="session", autouse=True)
def _frozen_objects_are_not_counted() -> Iterator[None]:
    """An import by a command asks whether objects are frozen, and Python counts all of them for the answer.

    The suite freezes millions: each command would count for a quarter of a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "gc", SimpleNamespace(**{**vars(gc), "get_freeze_count": lambda: 1}))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not environment.conservative() or call.when != "call" or call.excinfo is None or not report.failed:
        return report
    needed = capability_of(item, REFUSED)
    if needed is not None and refusing(call.excinfo.value) == needed:
        report.outcome, report.wasxfail = "skipped", f"refused: {needed}"
    otherwise = capability_of(item, OTHERWISE)
    # Inductor raises an error of its own where an operator refuses; the module of it is slow to import.
    wrong = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
    if otherwise is not None and (wrong or call.excinfo.typename == "InductorError"):
        report.outcome, report.wasxfail = "skipped", f"done otherwise: {otherwise}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not environment.conservative():
        return
    counts: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("xfailed", []):
        counts[report.wasxfail, report.nodeid.partition("[")[0]] += 1
    terminalreporter.section("OPSMITH_CONSERVATIVE=1: refused, or done otherwise")
    for (why, test), count in sorted(counts.items()):
        terminalreporter.write_line(f"{why:28} {count:4}  {test}")


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVRTC."""
    monkeypatch.setattr(nvrtc, "nvrtc_files", lambda: ())
