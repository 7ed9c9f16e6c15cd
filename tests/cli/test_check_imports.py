"""`opsmith check` warns of settings that the import of a file changes, and of no other import."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from opsmith.checking.side_effects.global_settings import restore_settings, settings

Write = Callable[..., Path]
Run = Callable[..., Result]

OPERATOR = """
@opsmith.operator("{space}::double")
def double(x: Tensor) -> Tensor:
    return 2 * x

double.samples(lambda make: [(make(3),)])

@opsmith.operator("{space}::triple")
def triple(x: Tensor) -> Tensor:
    return 3 * x

triple.samples(lambda make: [(make(3),)])
"""
HEAD = "import os, sys, warnings\nimport torch, opsmith\nfrom torch import Tensor\n"

CHANGES = {
    "torch.set_default_dtype(torch.float64)": "torch's default dtype from torch.float32 to torch.float64",
    "torch.use_deterministic_algorithms(True)": "torch's deterministic mode from 0 to 2",
    "torch.set_grad_enabled(False)": "grad mode (`torch.is_grad_enabled()`) from True to False",
    "torch.backends.cudnn.benchmark = True": (
        "cuDNN's flags from (True, False, False) to (True, True, False)"
    ),
}

KEEPS = {
    "a setting that is put back": (
        "before = torch.get_default_dtype()\ntorch.set_default_dtype(torch.float64)\n"
        "torch.set_default_dtype(before)"
    ),
    "a region": "with torch.no_grad():\n    TABLE = torch.arange(3.0)",
    "seeds of samples": "torch.manual_seed(0)",
    "filters and variables, as libraries change them": (
        "warnings.filterwarnings('ignore', message='a line of a library')\nos.environ['OF_A_LIBRARY'] = '1'"
    ),
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = settings()
    yield
    restore_settings(before)


def reports(done: Result) -> list[dict[str, Any]]:
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["reports"]
    return found


def failures(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [failure for outcome in report["outcomes"] for failure in outcome["failures"]]


@pytest.mark.parametrize("line", CHANGES)
def test_a_setting_that_the_import_changes_is_a_warning_of_the_first_operator(
    opsmith: Run, write: Write, line: str
) -> None:
    file = write(HEAD + line + OPERATOR)
    first, second = reports(opsmith("check", str(file), "--quick", "--only", "effects", "--json"))
    (failure,) = failures(first)
    found = failure["property"], failure["cause"], failure["severity"], failure["given"]
    assert found == ("effects", "side-effect", "warning", "unpromised")
    hint = "let the program change the setting, or restore it"
    assert failure["message"] == (
        f"importing `{file}` changes {CHANGES[line]}, for the whole process: {hint}"
    )
    assert not failures(second)


@pytest.mark.parametrize("lines", KEEPS)
def test_an_import_that_changes_no_setting_of_torch_passes(opsmith: Run, write: Write, lines: str) -> None:
    file = write(HEAD + KEEPS[lines] + OPERATOR)
    found = reports(opsmith("check", f"{file}:double", "--quick", "--only", "effects", "--json"))
    assert not [failure for report in found for failure in failures(report)]
    os.environ.pop("OF_A_LIBRARY", None)


def test_two_settings_are_one_warning_whose_replay_fails(opsmith: Run, write: Write) -> None:
    lines = "torch.set_float32_matmul_precision('medium')\ntorch.set_default_dtype(torch.float64)"
    file = write(HEAD + lines + OPERATOR)
    before = settings()
    done = opsmith("check", f"{file}:double", "--quick", "--only", "effects", "--json")
    (failure,) = failures(reports(done)[0])
    for words in ("to torch.float64, torch's float32 matmul precision from 'highest' to 'medium'", str(file)):
        assert words in failure["message"]
    restore_settings(before)
    file.write_text(HEAD + lines)  # its operators are declared already
    with pytest.raises(AssertionError):
        exec(failure["replay"], {})


def test_it_is_accepted_as_other_findings_are(
    opsmith: Run, write: Write, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = f'operator = "{space}::double", property = "effects", cause = "side-effect", reason = "a script"'
    (tmp_path / "pyproject.toml").write_text(f"[tool.opsmith]\naccept = [{{{entry}}}]\n")
    monkeypatch.chdir(tmp_path)
    file = write(HEAD + "torch.set_num_threads(3)" + OPERATOR)
    (report,) = reports(opsmith("check", f"{file}:double", "--quick", "--only", "effects", "--json"))
    (failure,) = failures(report)
    assert "the number of torch's threads from" in failure["message"]
    assert failure["accepted"] == "a script"
    assert not report["remarks"]
