"""`pytest --opsmith`: the items, their ids, how they end, and that other suites notice nothing."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import opsmith
from opsmith.checking.properties import USUAL
from opsmith.testing.items import items_of, module_of

ROOT = Path(__file__).resolve().parents[2]

OPERATORS = """
import os
import torch, opsmith
from torch import Tensor

with open(os.environ["IMPORTS"], "a") as file:
    file.write("imported\\n")

@opsmith.operator("plugged::right")
def right(x: Tensor) -> Tensor:
    return x * x

right.gradients(x=lambda grad, x: 2 * grad * x)
right.kernel("cuda")(lambda x: x * x)

@right.samples
def _(make):
    with open(os.environ["IMPORTS"], "a") as file:
        file.write("sampled\\n")
    yield (make(3),)

@opsmith.operator("plugged::wrong")
def wrong(x: Tensor) -> Tensor:
    return x * x

wrong.gradients(x=lambda grad, x: -2 * grad * x)
wrong.samples(lambda make: [(make(3),)])

@opsmith.operator("plugged::bare")
def bare(x: Tensor) -> Tensor:
    return x * x

@opsmith.operator("plugged::untold", opaque=True)
def untold(x: Tensor) -> Tensor:
    return x * 2

untold.fake(torch.empty_like)
untold.samples(lambda make: [(make(3),)])
"""

ORDINARY = "def test_ordinary():\n    assert True\n"
LIGHT = "import sys\n\ndef test_light():\n    assert not {'torch', 'opsmith'} & {*sys.modules}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "plugged").mkdir()
    (folder / "plugged" / "__init__.py").write_text("")
    (folder / "plugged" / "ops.py").write_text(OPERATORS)
    (folder / "test_ordinary.py").write_text(ORDINARY)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest as a user of opsmith runs it, also from a checkout that is not installed."""
    log = folder / "log"
    log.write_text("")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_opsmith", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(opsmith.__file__).parents[1]), "IMPORTS": str(log)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plugin_is_there_when_opsmith_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_opsmith": "pytest_opsmith"}
    assert "src/pytest_opsmith" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.slow
def test_without_the_option_nothing_of_opsmith_or_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(LIGHT)
    done = run(tmp_path, "-q")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    assert "--opsmith-effort" in run(tmp_path, "--help").stdout


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """One run of everything at once, and what the operators' file wrote meanwhile."""
    # These are the items that the tests look at; the others take seconds.
    options = ("--opsmith-effort=quick", "-k", "forward or gradient or surrogate")
    done = run(folder, "--opsmith", "plugged.ops", *options, "-ra", "-v", "--junitxml", "junit.xml")
    return done, (folder / "log").read_text().split()


def outcome_of(done: subprocess.CompletedProcess[str], node: str) -> str:
    line = next(each for each in done.stdout.splitlines() if each.startswith(f"{node} "))
    return next(word for word in ("PASSED", "FAILED", "SKIPPED", "ERROR") if f" {word} " in f"{line} ")


@pytest.mark.slow
def test_every_property_of_every_operator_is_a_test(
    whole: tuple[subprocess.CompletedProcess[str], list[str]],
) -> None:
    done, _ = whole
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcome_of(done, "plugged.ops::right::forward") == "PASSED"
    assert outcome_of(done, "plugged.ops::right::gradient") == "PASSED"
    assert outcome_of(done, "plugged.ops::right::surrogate") == "SKIPPED"
    assert outcome_of(done, "plugged.ops::wrong::forward") == "PASSED"
    assert outcome_of(done, "plugged.ops::wrong::gradient") == "FAILED"
    assert outcome_of(done, "plugged.ops::bare::forward") == "FAILED"
    assert f"collected {4 * len(USUAL)} items" in done.stdout


@pytest.mark.slow
def test_sanitised_there_is_one_test_more(folder: Path) -> None:
    options = ("--opsmith", "plugged.ops:right", "-v", "-k", "sanitized")
    assert "collected 0 items" in run(folder, *options).stdout.replace(f"{len(USUAL)} items / ", "0 items ")
    done = run(folder, *options, "--opsmith-sanitize", "-rs")
    assert outcome_of(done, "plugged.ops::right::sanitized") == "SKIPPED"
    assert "the operator has no kernel in C++" in done.stdout


@pytest.mark.slow
@pytest.mark.compile
def test_what_the_compiler_logs_for_its_own_tools_is_not_shown(folder: Path) -> None:
    done = run(folder, "--opsmith", "plugged.ops:wrong", "-q", "-k", "gradient or compile")
    assert done.returncode == 1
    assert "FAILED plugged.ops::wrong::gradient" in done.stdout
    assert "torch.__trace" not in done.stdout


def test_with_the_option_alone_the_ordinary_tests_are_left_out(
    whole: tuple[subprocess.CompletedProcess[str], list[str]],
) -> None:
    assert "test_ordinary" not in whole[0].stdout


def test_the_items_of_an_operator_share_one_check(
    whole: tuple[subprocess.CompletedProcess[str], list[str]],
) -> None:
    assert whole[1] == ["imported", "sampled"]


def test_a_failure_is_the_report_and_nothing_else(
    whole: tuple[subprocess.CompletedProcess[str], list[str]],
) -> None:
    output = whole[0].stdout
    shown = output.partition("wrong gradient")[2]
    for words in (
        "gradient of `x`: sign",
        "where: ",
        "torch.testing.assert_close(",
    ):
        assert words in shown
    assert "PropertyFailedError" not in shown.partition("short test summary")[0]
    assert "items.py" not in shown.partition("short test summary")[0]
    assert "plugged::bare: there are no samples to check it on" in output


def test_what_could_not_be_checked_is_no_success(
    whole: tuple[subprocess.CompletedProcess[str], list[str]],
) -> None:
    done, _ = whole
    assert outcome_of(done, "plugged.ops::untold::forward") == "PASSED"
    assert outcome_of(done, "plugged.ops::untold::gradient") == "FAILED"
    assert "the property could not be checked: " in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: its kernels run")
def test_kernels_that_did_not_run_are_listed(
    whole: tuple[subprocess.CompletedProcess[str], list[str]],
) -> None:
    output = whole[0].stdout
    line = 1 + OPERATORS[: OPERATORS.index("right.kernel")].count("\n")
    [listed] = re.findall("unverified: .*", output)
    assert listed.startswith(f"unverified: right: kernel for `cuda` at ops.py:{line} (")
    assert "kernels that did not run" in output


def test_junit_has_a_case_for_each(
    whole: tuple[subprocess.CompletedProcess[str], list[str]], folder: Path
) -> None:
    cases = ElementTree.parse(folder / "junit.xml").getroot().findall(".//testcase")
    found = {(case.get("classname"), case.get("name")): case for case in cases}
    failed = found["plugged.ops.wrong", "gradient"].find("failure")
    assert failed is not None
    assert "gradient of `x`: sign" in (failed.text or "")
    skipped = found["plugged.ops.right", "surrogate"].find("skipped")
    assert skipped is not None
    assert "no surrogate gradients" in (skipped.get("message") or "")
    assert found["plugged.ops.right", "forward"].find("failure") is None
    seconds = found["plugged.ops.right", "forward"].find("properties/property")
    assert seconds is not None
    assert seconds.get("name") == "seconds"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: its kernels run")
def test_a_kernel_that_no_chosen_test_runs_fails_each_under_strict(folder: Path) -> None:
    chosen = ("--opsmith", "plugged/ops.py:right", "--opsmith-effort=quick", "-v", "-k")
    for words, strict in (("layouts", "FAILED"), ("layouts or forward and not forward_mode", "PASSED")):
        done = run(folder, *chosen, words)
        assert outcome_of(done, "plugged/ops.py::right::layouts") == "PASSED"
        assert "unverified: right: kernel for `cuda` at ops.py:" in done.stdout
        done = run(folder, *chosen, words, "--opsmith-strict")
        assert outcome_of(done, "plugged/ops.py::right::layouts") == strict
        assert done.returncode == 1, done.stdout
        assert "limit: forward: not-exercised" in done.stdout


@pytest.mark.slow
def test_k_x_and_a_path_beside_it(folder: Path) -> None:
    chosen = ("-k", "gradient or ordinary", "-x", "-v")
    done = run(folder, "--opsmith", "plugged/ops.py", "test_ordinary.py", *chosen)
    assert done.returncode == 1, done.stdout
    assert outcome_of(done, "test_ordinary.py::test_ordinary") == "PASSED"
    assert outcome_of(done, "plugged/ops.py::right::gradient") == "PASSED"
    assert outcome_of(done, "plugged/ops.py::wrong::gradient") == "FAILED"
    assert "forward" not in done.stdout.partition("FAILURES")[0].replace("forward_mode", "")
    assert "bare" not in done.stdout.partition("FAILURES")[0]


def ids(request: pytest.FixtureRequest, target: str) -> list[str]:
    """The ids of the items that a target makes."""
    request.config.addinivalue_line("markers", "opsmith: as the plugin says it")
    module = module_of(request.session, target)
    return [item.nodeid for operator in module.collect() for item in operator.collect()]


def test_an_id_can_be_given_again_and_one_operator_named(request: pytest.FixtureRequest) -> None:
    assert ids(request, "opsmith.ops::exp::gradient") == ["opsmith.ops::exp::gradient"]
    every = [f"opsmith.ops::exp::{name}" for name in USUAL]
    for target in ("opsmith.ops:opsmith::exp", "opsmith.ops:exp", "opsmith.ops::exp"):
        assert ids(request, target) == every


def test_operators_of_one_name_are_told_apart_by_their_namespaces(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = tmp_path / "plugged_twins.py"
    file.write_text(
        "import torch, opsmith\n"
        "def twin(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n"
        "first, second = (opsmith.operator(f'plugged_{name}::twin')(twin) for name in 'ab')\n"
    )
    found = ids(request, str(file))
    assert f"{file}::plugged_a.twin::forward" in found
    assert f"{file}::plugged_b.twin::forward" in found
    assert ids(request, f"{file}::plugged_b.twin::forward") == [f"{file}::twin::forward"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("opsmith.nothing", "there is no module `opsmith.nothing`"),
        ("opsmith.ops:nothing", "`opsmith.ops` has no operator `nothing`"),
        ("opsmith.ops::exp::forwrad", "there is no property `forwrad`"),
        ("opsmith.errors", "`opsmith.errors` declares no operator"),
        ("a b", "`a b` names neither a file nor a module"),
    ],
)
def test_a_target_that_is_none_is_a_usage_error(
    request: pytest.FixtureRequest, target: str, says: str
) -> None:
    with pytest.raises(pytest.UsageError, match=re.escape(says)):
        items_of(request.session, [target])


@pytest.mark.slow
def test_a_usage_error_ends_pytest_with_its_message(folder: Path) -> None:
    done = run(folder, "--opsmith", "plugged.nothing", "-q")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "there is no module `plugged.nothing`" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_in_the_configuration_it_adds_to_the_other_tests(folder: Path) -> None:
    options = ["-o", "addopts=--opsmith=plugged.ops --opsmith-effort=quick"]
    done = run(folder, *options, "-n", "2", "-v", "-k", "ordinary or right")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_ordinary.py::test_ordinary" in done.stdout
    assert "plugged.ops::right::gradient" in done.stdout


@pytest.mark.slow
def test_pytest_xdist_shares_the_items_out(folder: Path) -> None:
    done = run(folder, "--opsmith", "plugged.ops", "-n", "2", "-v", "-k", "right and (forward or gradient)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_ordinary" not in done.stdout
    assert "PASSED plugged.ops::right::gradient" in done.stdout
