"""`opsmith adopt`: what it prints of a file of mixed Functions, its exit status, JSON and messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from opsmith.cli.app import app

Write = Callable[..., Path]
Run = Callable[..., Result]

MIXED = Path(__file__).parents[1] / "adopting" / "mixed_functions.py"

RIGHT = """
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        print("a word of its own")
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
"""
WRONG = RIGHT.replace("Twice", "Thrice").replace("2 * x", "3 * x")

REPORT = {
    "Mish": ("works", ["gains jvp, vmap; keeps second order, torch.compile"]),
    "Affine": ("works", ["tried on x [3, 4], weight [5, 4], bias [5]"]),
    "ApplyActivation": (
        "needs a declaration",
        ["`activation` and `derivative` are called", "(torch.randn(3, 4), ACTIVATION, DERIVATIVE)"],
    ),
    "AverageOfMany": ("works", ["tried on tensors[0] [3, 4]"]),
    "Square": (
        "wrong",
        ["the gradient of `x` is wrong", "it is the right tensor times 1/2", "functions.py:78"],
    ),
    "ScaleRows": (
        "wrong",
        ["wrong for a grad_output that is expanded", "`grad.contiguous()`", "functions.py:92"],
    ),
    "LeakyReLUInPlace": ("works", []),
    "Arctangent": (
        "works",
        ["no forward mode and no second order", "is marked with `once_differentiable`", "give `reference=`"],
    ),
    "DropFeatures": ("needs a declaration", ["draws random numbers", 'kind="stochastic"', "no forward mode"]),
    "Binarize": ("needs a declaration", ["small changes of `x` do not change", 'kind="surrogate")']),
}
LINES = {
    "Mish": 'mish = opsmith.adopt(Mish, "mypackage::mish")',
    "Affine": 'affine = opsmith.adopt(Affine, "mypackage::affine")',
    "Arctangent": 'arctangent = opsmith.adopt(Arctangent, "mypackage::arctangent")',
    "Binarize": 'binarize = opsmith.adopt(Binarize, "mypackage::binarize", kind="surrogate")',
}


@pytest.fixture(scope="module")
def mixed() -> Result:
    """The report on the file of mixed Functions, made once."""
    return CliRunner().invoke(app, ["adopt", str(MIXED)], prog_name="opsmith")


@pytest.fixture(scope="module")
def blocks(mixed: Result) -> dict[str, str]:
    """The text about each class, with single spaces between its words."""
    found = {}
    for block in re.split(r"\n(?=\w+: (?:works|needs a declaration|wrong)\n)", "\n" + mixed.stdout)[1:]:
        found[block.partition(":")[0]] = " ".join(block.split())
    return found


@pytest.mark.slow
def test_the_report_has_a_block_for_each_class(mixed: Result, blocks: dict[str, str]) -> None:
    assert mixed.exit_code == 1, mixed.output
    assert mixed.stderr == ""
    assert list(blocks) == list(REPORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORT)
def test_the_verdict_on_a_mixed_function(blocks: dict[str, str], name: str) -> None:
    verdict, words = REPORT[name]
    assert blocks[name].startswith(f"{name}: {verdict} ")
    for each in words:
        assert each in blocks[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_the_line_to_copy_stands_by_itself(mixed: Result, name: str) -> None:
    assert LINES[name] in [line.strip() for line in mixed.stdout.splitlines()]


@pytest.mark.slow
def test_the_report_ends_in_a_table_and_in_what_to_do(mixed: Result) -> None:
    end = mixed.stdout[mixed.stdout.index("10 Functions: ") :]
    assert end.splitlines()[0] == "10 Functions: 5 work, 3 need a declaration, 2 are wrong"
    words = " ".join(end.split())
    assert "works Copy the line into your code, with `import opsmith` above it" in words
    assert "needs a declaration Read the reasons first." in words
    assert "wrong Fix the class at the location in brackets" in words
    rows = re.findall(r"^ (\w+) +(works|needs a declaration|wrong) ", mixed.stdout, flags=re.MULTILINE)
    assert rows == [(name, verdict) for name, (verdict, _) in REPORT.items()]


@pytest.mark.slow
def test_what_works_has_status_0_and_only_its_own_advice(opsmith: Run, write: Write) -> None:
    done = opsmith("adopt", str(write(RIGHT)))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Twice: works\n")
    assert "Fix the class" not in done.stdout
    assert "Functions:" not in done.stdout
    assert "a word of its own" in done.stderr


SAVING = """
import torch

class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        slope = 3 * x * x
        ctx.save_for_backward(slope)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return slope * grad
"""


@pytest.mark.slow
def test_a_second_order_that_is_mended_has_a_line(opsmith: Run, write: Write) -> None:
    file = write(SAVING)
    done = opsmith("adopt", str(file))
    assert done.exit_code == 0, done.output
    assert "gains jvp, vmap; mends second order; keeps torch.compile" in done.stdout
    words = " ".join(done.stdout.split())
    assert (
        "- mends second order: with `apply`, the derivative of the gradient of `x` is wrong: it lacks "
        in words
    )
    (read,) = json.loads(opsmith("adopt", str(file), "--json").stdout)["functions"]
    assert read["abilities"]["second order"] == "mended"
    assert read["mends"][0] in words


@pytest.mark.slow
def test_one_class_is_named_behind_a_colon(opsmith: Run, write: Write) -> None:
    file = write(RIGHT + WRONG)
    assert opsmith("adopt", f"{file}:Twice").exit_code == 0
    done = opsmith("adopt", f"{file}:Thrice")
    assert done.exit_code == 1
    assert "Twice" not in done.stdout
    assert "it is the right tensor times 2/3" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(opsmith: Run, write: Write) -> None:
    done = opsmith("adopt", str(write(RIGHT + WRONG)), "--json")
    assert done.exit_code == 1
    read = json.loads(done.stdout)
    assert (read["schema"], read["works"]) == (2, False)
    assert read["counts"] == {"works": 1, "needs a declaration": 0, "wrong": 1}
    right, wrong = read["functions"]
    assert right["line"] == 'twice = opsmith.adopt(Twice, "mypackage::twice")'
    assert right["tried"] == "x [3, 4]"
    assert right["abilities"]["vmap"] == "new"
    assert wrong["name"] == "Thrice"
    assert "times 2/3" in wrong["reasons"][0]
    by_name = {each["property"]: each for each in wrong["report"]["outcomes"]}
    assert by_name["gradient"]["failures"][0]["cause"] == "scale"


@pytest.mark.slow
def test_verbose_shows_the_whole_check(opsmith: Run, write: Write) -> None:
    done = opsmith("adopt", str(write(WRONG)), "-v")
    assert "FAILED: gradient" in done.stdout
    assert "fresh inputs" in done.stdout


@pytest.mark.slow
def test_a_module_is_named_as_python_imports_it_and_a_package_with_what_is_inside(
    opsmith: Run, write: Write, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"{space}_package"
    root = write("from torch.autograd import Function\n", name=f"{package}/__init__.py").parent.parent
    write(RIGHT, name=f"{package}/inner.py")
    monkeypatch.chdir(root)
    done = opsmith("adopt", package)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("inner.Twice: works\n")
    assert 'opsmith.adopt(inner.Twice, "mypackage::twice")' in done.stdout
    assert opsmith("adopt", f"{package}.inner:Twice").stdout.startswith("Twice: works\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch\nfrom torch.autograd import Function\n", "defines no `autograd.Function`"),
        ("def load():\n    raise ValueError('no weights')\nload()\n", "cannot be imported: ValueError"),
        ("class Broken(:\n", "SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_looked_at_has_status_2(
    opsmith: Run, write: Write, text: str, says: str
) -> None:
    done = opsmith("adopt", str(write(text)))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("opsmith: ")
    assert says in done.stderr
    assert "hint: " in done.stderr


def test_a_name_that_is_not_there_has_status_2(opsmith: Run, write: Write) -> None:
    done = opsmith("adopt", f"{write(RIGHT)}:Twise")
    assert done.exit_code == 2
    assert "has no `autograd.Function` named `Twise`" in done.stderr
    assert "expected: one of `Twice`" in done.stderr
    assert opsmith("adopt", "nothing/there.py").exit_code == 2


def test_the_main_part_of_a_script_is_not_run(opsmith: Run, write: Write) -> None:
    done = opsmith("adopt", str(write(RIGHT + '\nif __name__ == "__main__":\n    raise SystemExit(9)\n')))
    assert done.exit_code == 0, done.output
