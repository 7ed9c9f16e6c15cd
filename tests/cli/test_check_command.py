"""`opsmith check`: what it prints where, its exit status, and its messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from opsmith.checking.properties import PROPERTIES

Write = Callable[..., Path]
Run = Callable[..., Result]
FAST = ("--only", "forward", "--only", "gradient")


def test_what_passes_has_status_0_and_a_table(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", f"{write()}:right", *FAST)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"{space}::right: passed"
    assert lines[1].split()[:2] == ["forward", "passed"]
    assert done.stderr == ""


@pytest.mark.slow
def test_what_fails_has_status_1_and_a_panel(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", f"{write()}:wrong", *FAST)
    assert done.exit_code == 1
    assert f"{space}::wrong: FAILED: gradient" in done.stdout
    assert "gradient of `x`: sign" in done.stdout


def test_a_baseline_lets_what_is_known_pass(opsmith: Run, write: Write, space: str, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    target = f"{write()}:wrong"
    baseline.write_text(opsmith("check", target, "--json", *FAST).stdout)
    done = opsmith("check", target, "--baseline", str(baseline), *FAST)
    assert done.exit_code == 0, done.output
    assert f"{space}::wrong: passed; 1 accepted" in done.stdout
    assert "accepted: it is in the baseline" in done.stdout
    missing = opsmith("check", target, "--baseline", str(tmp_path / "none.json"), *FAST)
    assert missing.exit_code == 2
    assert "cannot be read" in missing.stderr
    baseline.write_text(baseline.read_text(), encoding="utf-16")  # as PowerShell writes it
    assert opsmith("check", target, "--baseline", str(baseline), *FAST).exit_code == 0
    baseline.write_text("[" * 100_000)
    unreadable = opsmith("check", target, "--baseline", str(baseline), *FAST)
    assert unreadable.exit_code == 2
    assert "is not a report that this version of opsmith wrote" in unreadable.stderr
    assert "expected: JSON, not nested too deeply" in unreadable.stderr
    assert str(baseline) in unreadable.stderr
    assert "Traceback" not in unreadable.stderr


def test_strict_lets_warnings_fail(opsmith: Run, tmp_path: Path) -> None:
    file = tmp_path / "narrow.py"
    file.write_text(NARROW)
    options = (f"{file}:Narrow", "--samples", "SAMPLES", *FAST)
    assert opsmith("check", *options).exit_code == 0
    done = opsmith("check", *options, "--strict")
    assert done.exit_code == 1
    assert "Narrow: FAILED: gradient; 1 warning" in done.stdout
    assert "warning: gradient of `x`: precision" in done.stdout


NARROW = """
import torch

SAMPLES = [(torch.linspace(0.1, 1.3, 12).reshape(3, 4).sin(),)]


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad.float() * x.float().cos()).to(x.dtype)
"""


@pytest.mark.parametrize("name", ["wrong", "other_name", "{space}::wrong"])
def test_an_operator_is_named_by_variable_or_by_its_own_name(
    opsmith: Run, write: Write, space: str, name: str
) -> None:
    done = opsmith("check", f"{write()}:{name.replace('{space}', space)}", *FAST)
    assert f"{space}::wrong: FAILED" in done.stdout
    assert f"{space}::right" not in done.stdout


@pytest.mark.slow
def test_without_a_name_every_operator_of_the_file_is_checked(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", str(write()), *FAST)
    assert done.exit_code == 1
    assert f"{space}::right: passed" in done.stdout
    assert f"{space}::wrong: FAILED" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 operators: 1 passed, 1 not passed"


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(opsmith: Run, write: Write, space: str) -> None:
    file = write('print("importing")\n' + write().read_text())
    done = opsmith("check", str(file), "--json", "--seed", "5", *FAST)
    assert done.exit_code == 1
    read = json.loads(done.stdout)
    assert (read["schema"], read["passed"], read["unchecked"]) == (4, False, [])
    assert [report["operator"] for report in read["reports"]] == [f"{space}::right", f"{space}::wrong"]
    assert [report["passed"] for report in read["reports"]] == [True, False]
    assert read["reports"][0]["seed"] == 5
    assert done.stderr == "importing\n"


def test_what_was_asked_for_decides_the_status(opsmith: Run, write: Write) -> None:
    file = write()
    assert opsmith("check", f"{file}:wrong", "--only", "forward").exit_code == 0
    assert (
        "passed the requested properties; not checked: gradient"
        in opsmith("check", f"{file}:wrong", "--only", "forward").stdout
    )
    skipped = ("gradient", "forward_mode", "second_order", "integration")
    options = [word for name in skipped for word in ("--skip", name)]
    assert opsmith("check", f"{file}:wrong", *options).exit_code == 0


@pytest.mark.slow
def test_an_operator_without_samples_is_named_and_the_others_are_checked(
    opsmith: Run, write: Write, space: str
) -> None:
    text = write().read_text().replace("wrong.samples", "# wrong.samples")
    done = opsmith("check", str(write(text)), *FAST)
    assert done.exit_code == 2
    assert f"{space}::right: passed" in done.stdout
    assert f"opsmith: {space}::wrong: there are no samples to check it on" in done.stderr
    assert done.stdout.splitlines()[-1] == "2 operators: 1 passed, 0 not passed, 1 could not be checked"
    read = json.loads(opsmith("check", str(write(text)), "--json", *FAST).stdout)
    assert read["passed"] is False
    assert [entry["operator"] for entry in read["unchecked"]] == [f"{space}::wrong"]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ("5", "its samples are not a list of calls"),
        ("1 / 0", "its samples cannot be made: ZeroDivisionError: division by zero"),
        (
            "[(make(2), 3)]",
            "sample 0 does not fit the signature: it takes 1 positional argument, but 2 were given",
        ),
        ("[torch.empty(2, device='meta')]", "`x` of sample 0 cannot be checked on"),
    ],
)
def test_bad_samples_of_one_operator_lose_no_report_of_another(
    opsmith: Run, write: Write, space: str, samples: str, says: str
) -> None:
    text = (
        write()
        .read_text()
        .replace("right.samples(lambda make: [(make(3),)])", f"right.samples(lambda make: {samples})")
    )
    file = write(text)
    done = opsmith("check", str(file), "--json", *FAST)
    assert done.exit_code == 2
    read = json.loads(done.stdout)
    assert [report["operator"] for report in read["reports"]] == [f"{space}::wrong"]
    (entry,) = read["unchecked"]
    assert entry["operator"] == f"{space}::right"
    assert says in entry["message"]
    assert "Traceback" not in done.stderr
    if "meta" not in samples:
        assert f"where: {file}:" in entry["message"]


def test_an_operator_that_cannot_be_checked_fully_has_status_1(opsmith: Run, write: Write) -> None:
    text = """
import torch, opsmith
@opsmith.operator("{space}::opaque", opaque=True)
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2
opaque.fake(lambda x: torch.empty_like(x))
opaque.samples(lambda make: [(make(3),)])
"""
    done = opsmith("check", str(write(text)), *FAST)
    assert done.exit_code == 1
    assert "NOT PASSED: gradient could not be checked" in done.stdout


MESSAGES = [
    ("nothing/there.py", ["there is no file `nothing/there.py`", "check the spelling"]),
    ("not_a_module_at_all", ["there is no module `not_a_module_at_all`", "the path of a `.py` file"]),
    ("opsmith.nothing_there", ["there is no module `opsmith.nothing_there`"]),
    ("a b", ["`a b` names neither a file nor a module", "expected: FILE_OR_MODULE[:NAME]"]),
    ("sys", ["`sys` declares no operator, Function or custom op"]),
    ("opsmith.errors", ["`opsmith.errors` declares no operator", "name the module that declares one"]),
]


@pytest.mark.parametrize(("target", "says"), MESSAGES, ids=[target for target, _ in MESSAGES])
def test_a_target_that_is_none_has_status_2_and_a_message(opsmith: Run, target: str, says: list[str]) -> None:
    done = opsmith("check", target)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("opsmith: ")
    for words in says:
        assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_not_there_lists_what_is(opsmith: Run, write: Write, space: str) -> None:
    done = opsmith("check", f"{write()}:wring")
    assert done.exit_code == 2
    assert "has no operator `wring`" in done.stderr
    assert f"expected: one of `{space}::right`, `{space}::wrong`" in done.stderr
    empty = opsmith("check", "opsmith.errors:exp")
    assert "expected: an operator; the module has none" in empty.stderr


def test_a_module_with_a_file_of_its_name_beside_it_is_guessed(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("", name="not-a-module.py")
    file = write("", name="strange.py")
    monkeypatch.chdir(file.parent)
    assert "`not` names neither" not in opsmith("check", "strange.no").stderr
    assert "there is no module `strange.no`" in opsmith("check", "strange.no").stderr


def test_a_file_that_raises_shows_the_last_lines_of_its_traceback(opsmith: Run, write: Write) -> None:
    file = write("def load():\n    raise ValueError('no weights')\n\nload()\n")
    done = opsmith("check", str(file))
    assert (done.exit_code, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0] == f"opsmith: `{file}` cannot be imported: ValueError"
    assert f'File "{file}", line 4, in <module>' in done.stderr
    assert "    raise ValueError('no weights')" in done.stderr
    assert "ValueError: no weights" in done.stderr
    assert lines[-2:] == [
        "  hint: fix the file so that `python` imports it",
        "  more: opsmith rule ModuleImportError",
    ]
    assert "importlib" not in done.stderr


def test_a_file_that_is_no_python_shows_the_line(opsmith: Run, write: Write) -> None:
    done = opsmith("check", str(write("def broken(:\n    pass\n")))
    assert done.exit_code == 2
    assert "SyntaxError: invalid syntax" in done.stderr
    assert "def broken(:" in done.stderr


def test_a_file_that_leaves_is_an_import_error_too(opsmith: Run, write: Write) -> None:
    done = opsmith("check", str(write("import sys\nsys.exit(7)\n")))
    assert done.exit_code == 2
    assert "cannot be imported: SystemExit" in done.stderr


def test_an_error_of_opsmith_in_the_file_is_shown_as_it_is(opsmith: Run, write: Write) -> None:
    done = opsmith("check", str(write("import opsmith\nopsmith.operator('noname')\n")))
    assert done.exit_code == 2
    assert done.stderr.startswith("opsmith: an operator's name is `namespace::name`")


def test_traceback_shows_where_an_error_comes_from(opsmith: Run, write: Write) -> None:
    done = opsmith("check", str(write("1 / 0\n")), "--traceback")
    assert done.exit_code == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_an_unknown_property_lists_them(opsmith: Run, write: Write) -> None:
    done = opsmith("check", str(write()), "--only", "forwrad")
    assert done.exit_code == 2
    assert "there is no property `forwrad`" in done.stderr
    assert "`second_order`" in done.stderr
    assert done.stdout == ""
    done = opsmith("check", str(write(name="again.py")), "--only", "forwrad", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout) == {"error": done.stderr.removeprefix("opsmith: ").rstrip()}


def test_properties_are_named_with_commas_or_again(opsmith: Run, write: Write) -> None:
    chosen = ["--only", "forward, layouts", "--only", "gradient", "--skip", "layouts,cuda"]
    done = opsmith("check", f"{write()}:right", *chosen, "--json")
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.stdout)["reports"]
    ran = [each["property"] for each in report["outcomes"] if not each["left_out"]]
    assert ran == ["forward", "gradient"]
    assert report["passed"]


def test_ctrl_c_has_status_130_and_no_traceback_and_what_is_finished_is_printed(
    opsmith: Run, write: Write, space: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from opsmith import checking

    whole = checking.check

    def interrupted(operator: Any, **options: Any) -> Any:
        if operator.name.endswith("wrong"):
            raise KeyboardInterrupt
        return whole(operator, **options)

    monkeypatch.setattr("opsmith.checking.check", interrupted)
    page, file = tmp_path / "report.html", write()
    done = opsmith("check", str(file), "--json", "--html", str(page), *FAST)
    assert done.exit_code == 130
    assert done.stderr == f"opsmith: the page is in {page}\nopsmith: interrupted\n"
    read = json.loads(done.stdout)
    assert (read["passed"], read["interrupted"]) == (False, True)
    assert [report["operator"] for report in read["reports"]] == [f"{space}::right"]
    assert read["unchecked"] == [
        {
            "operator": f"{space}::wrong",
            "file": str(file),
            "message": "interrupted by Ctrl-C before it was checked",
            "where": None,
        }
    ]
    assert "interrupted by Ctrl-C" in page.read_text(encoding="utf-8")
    told = opsmith("check", str(write()), *FAST)
    assert (told.exit_code, told.stderr) == (130, "opsmith: interrupted\n")
    assert told.stdout.splitlines()[-1] == "2 operators: 1 passed, 0 not passed, 1 interrupted"


@pytest.mark.slow
def test_a_file_of_a_package_is_imported_under_its_own_name(opsmith: Run, write: Write, space: str) -> None:
    package = f"{space}_package"
    write("", name=f"{package}/__init__.py")
    write("from torch import Tensor\n", name=f"{package}/types.py")
    file = write(
        "import opsmith\nfrom .types import Tensor\n"
        '@opsmith.operator("{space}::twice")\ndef twice(x: Tensor) -> Tensor:\n    return x + x\n'
        "twice.samples(lambda make: [(make(2),)])\n",
        name=f"{package}/inner/ops.py",
    )
    write("", name=f"{package}/inner/__init__.py")
    write("raise SystemExit('a program')\n", name=f"{package}/__main__.py")
    file.write_text(file.read_text().replace("from .types", "from ..types"))
    by_file = opsmith("check", str(file), *FAST)
    assert by_file.exit_code == 0, by_file.output
    by_package = opsmith("check", package, *FAST)
    assert by_package.exit_code == 0, by_package.output
    assert f"{space}::twice: passed" in by_package.stdout
    by_module = opsmith("check", f"{package}.inner.ops:twice", *FAST)
    assert by_module.exit_code == 0, by_module.output


@pytest.mark.slow
def test_two_files_of_one_name_are_two_modules(opsmith: Run, write: Write, space: str) -> None:
    first = write(name=f"one/{space}_same.py")
    second = write(first.read_text().replace(f"{space}::", f"{space}b::"), name=f"two/{space}_same.py")
    assert opsmith("check", f"{first}:right", *FAST).exit_code == 0
    done = opsmith("check", f"{second}:right", *FAST)
    assert done.exit_code == 0, done.output
    assert f"{space}b::right: passed" in done.stdout


def test_a_file_named_as_a_module_of_python_does_not_take_its_place(opsmith: Run, write: Write) -> None:
    import statistics

    file = write(name="statistics.py")
    assert opsmith("check", f"{file}:right", *FAST).exit_code == 0
    import sys

    assert sys.modules["statistics"] is statistics


def test_a_terminal_sees_that_the_target_is_imported(
    opsmith: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal then
    monkeypatch.setenv("TERM", "xterm")
    file = write("print('a word of its own')\nfrom opsmith.ops import exp")
    done = opsmith("check", f"{file}:exp", "--only", "forward", "--json")
    assert "importing" in done.stderr
    assert "a word of its own" in done.stderr
    assert json.loads(done.stdout)["passed"] is True


def test_the_help_lists_every_property_with_its_promise(
    opsmith: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = opsmith("check", "--help").stdout
    for known in PROPERTIES.values():
        assert f"{known.name} {known.title}" in shown


@pytest.mark.slow
def test_effort_is_chosen_by_a_flag_and_told(opsmith: Run, write: Write) -> None:
    file = write()
    for flags, effort in (((), "default"), (("--quick",), "quick"), (("--thorough",), "thorough")):
        done = opsmith("check", f"{file}:right", "--json", "--only", "forward", *flags)
        assert json.loads(done.stdout)["reports"][0]["effort"] == effort
    shown = opsmith("check", f"{file}:right", "--quick", "--seed", "4", *FAST).stdout
    assert "; seed 4, quick effort" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--quick", "--thorough"), "`--quick` and `--thorough` contradict each other"),
        (("--limit", "3"), "`--limit` is for a check in child processes"),
        (("--isolate", "--limit", "-3"), "`--limit` takes a positive number of seconds"),
        (("--isolate", "--limit", "0"), "`--limit` takes a positive number of seconds"),
        (("--only", "gradient", "--skip", "gradient"), "nothing is left to check"),
        (("--only", "export", "--skip", "integration"), "nothing is left to check"),
        (("--html", "no/such/folder/page.html"), "no file can be written to `no/such/folder/page.html`"),
        (("--html", "."), "got: a folder"),
    ],
)
def test_flags_that_make_no_sense_have_status_2(
    opsmith: Run, write: Write, flags: tuple[str, ...], says: str
) -> None:
    done = opsmith("check", f"{write()}:right", *flags)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


@pytest.mark.slow
def test_isolated_a_kernel_that_dies_is_a_finding_and_the_others_are_checked(
    opsmith: Run, write: Write, space: str
) -> None:
    text = (
        write().read_text()
        + """
import os

@wrong.kernel("cpu")
def _(x: Tensor) -> Tensor:
    os.abort()
"""
    )
    done = opsmith("check", str(write(text)), "--isolate", "--json", *FAST)
    assert done.exit_code == 1, done.output
    first, second = json.loads(done.stdout)["reports"]
    assert first["passed"] is True
    (failure,) = second["outcomes"][0]["failures"]
    assert failure["cause"] == "raises"
    assert failure["message"].startswith("the process dies of SIGABRT")


def test_sanitised_an_operator_without_a_kernel_in_cpp_says_so(
    opsmith: Run, write: Write, space: str
) -> None:
    done = opsmith("check", f"{write()}:right", "--sanitize", *FAST)
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if "sanitized" in line]
    assert line.strip() == "sanitized: the operator has no kernel in C++"


@pytest.mark.slow
def test_sanitised_a_fault_is_told_and_the_others_are_checked(opsmith: Run, write: Write, space: str) -> None:
    text = (
        write().read_text().replace("2 * grad * x", "-2 * grad * x").replace("--", "")
        + """
wrong.kernel("cpu", cpp="void wrong(Contiguous<const double> x, Contiguous<double> y) {\\n"
             "  for (int64_t i = 0; i < x.numel(); i++) y[i + 1] = x[i] * x[i];\\n"
             "}")
"""
    )
    file = write(text)
    done = opsmith("check", str(file), "--sanitize", "--json", "--quick", *FAST)
    assert done.exit_code == 1, done.output
    first, second = json.loads(done.stdout)["reports"]
    assert [each["status"] for each in first["outcomes"] if each["property"] == "sanitized"] == ["skipped"]
    outcome = second["outcomes"][-1]
    assert outcome["property"] == "sanitized"
    assert [(each["cause"], each["input"]) for each in outcome["failures"]] == [
        ("out-of-bounds", "result"),
        ("uninitialized", "result"),  # its first element
    ]


@pytest.mark.slow
def test_a_page_is_written_beside_what_is_printed(
    opsmith: Run, write: Write, space: str, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    done = opsmith("check", str(write()), "--html", str(page), "--json", *FAST)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["passed"] is False
    assert done.stderr == f"opsmith: the page is in {page}\n"
    text = page.read_text(encoding="utf-8")
    assert f"{space}::right" in text
    assert f"{space}::wrong" in text
