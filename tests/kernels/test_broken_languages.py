"""Languages whose code is wrong: each message names the language, its part, the line and a way out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_language import COMPILED, TOY, Install

import opsmith
from opsmith import errors
from opsmith.build.processor import levels
from opsmith.checking.report import Outcome
from opsmith.cli.inventory import inventory
from opsmith.cli.kernel_origins import kernel_origins
from opsmith.kernels import languages
from opsmith.pages.kernels import kernels_of
from opsmith.shipping import build_package

RUNS = 'return [[CpuRun("the kernel in Toy", self.kernel)] for _ in calls]'
TAKES = "def refusal(self, values: Sequence[Any]) -> None: ..."
MAKES = "return ToyKernel(declaration)"
BUILDS = "def build(self, calls: Any) -> None: ..."
LIMITED = ("class ToyUsage(GpuUsage):", "class ToyUsage(GpuUsage):\n    has_limits = True\n")
EACH = "        for each in architectures:\n"


def broken(*changes: tuple[str, str], compiled: bool = False) -> str:
    """The text of the toy language with changes."""
    text = TOY + COMPILED if compiled else TOY
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    return text


def declared(name: str, device: str = "cuda") -> Any:
    @opsmith.operator(f"languages::{name}")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.samples(lambda make: [(make(3),)])
    return twice.kernel(device, toy=double)


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def checked(operator: Any, name: str) -> Outcome:
    """The outcome of a property, where another one is not disturbed."""
    report = opsmith.check(operator, only=[name, "forward"], effort="quick")
    outcomes = {each.property: each for each in report.outcomes}
    assert outcomes["forward"].status == "passed"
    return outcomes[name]


def line_of(text: str, part: str) -> str:
    """Name and line of a part of the module, as hints name it."""
    return f"toy_kernels.py:{text[: text.index(part)].count(chr(10)) + 1}"


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        pytest.param(
            "return 1",
            "return call.nothing",
            "fails in `ToyOnCpu.prepare`: AttributeError: 'CheckedCall' object has no attribute 'nothing'",
            id="prepare raises",
        ),
        pytest.param(
            "return 1", "pass", "gives None in `ToyOnCpu.prepare`, where int | str is right", id="no parts"
        ),
        pytest.param(
            "return 1", "return 0.5", "gives 0.5 in `ToyOnCpu.prepare`, where int | str is right", id="half"
        ),
        pytest.param(
            RUNS,
            "pass",
            "gives None in `ToyOnCpu.launch`, where list[list[CpuRun]] is right",
            id="launch returns nothing",
        ),
        pytest.param(
            RUNS,
            "yield [CpuRun('k', self.kernel)]",
            "gives <generator object ToyOnCpu.launch> in `ToyOnCpu.launch`, where list[list[CpuRun]] is "
            "right",
            id="launch yields",
        ),
        pytest.param(
            RUNS,
            "return []",
            "gives [] in `ToyOnCpu.launch`, where a list with at least one run for each of 1 call is right",
            id="no call",
        ),
        pytest.param(
            RUNS,
            "return [[] for _ in calls]",
            "gives [[]] in `ToyOnCpu.launch`, where a list with at least one run for each of 1 call is right",
            id="no run",
        ),
        pytest.param(
            RUNS,
            "return [[3] for _ in calls]",
            "gives 3 in `ToyOnCpu.launch`, where CpuRun is right",
            id="a number as a run",
        ),
        pytest.param(
            RUNS,
            "return [[CpuRun('k', 3)] for _ in calls]",
            "gives 3 in `ToyOnCpu.launch`, where Callable[..., Any] is right",
            id="results as a number",
        ),
        pytest.param(
            RUNS,
            "return [[CpuRun('k', self.kernel, found=['a race'])] for _ in calls]",
            "gives 'a race' in `ToyOnCpu.launch`, where CpuFinding is right",
            id="a text as a finding",
        ),
    ],
)
def test_a_kernel_is_unverified_whose_language_fails_on_the_cpu(
    install: Install, request: pytest.FixtureRequest, right: str, wrong: str, problem: str
) -> None:
    text = broken((right, wrong))
    install("toy-kernels", text)
    outcome = checked(declared(f"on_cpu_{request.node.callspec.indices['right']}"), "toy")
    method = problem.partition("`ToyOnCpu.")[2].partition("`")[0]
    at = line_of(text, wrong if "fails" in problem else f"    def {method}(")
    hint = f"correct {at}, or report it to the authors of toy-kernels 1.0"
    hint += " with the whole traceback" if "fails" in problem else ""
    assert outcome.status == "skipped"
    assert outcome.reason == f"the kernel language Toy {problem}; {hint}"
    [failure] = outcome.failures
    assert (failure.cause, failure.where) == ("not-exercised", "toy.py:1")


@pytest.mark.parametrize(
    ("right", "wrong", "part"),
    [
        (BUILDS, "def build(self, calls): {}['x']", "build`: KeyError: 'x'"),
        (BUILDS, "def build(self): ...", "build`: TypeError: ToyOnCpu.build() takes 1 positional argument"),
        (
            "def prepare",
            "def notes(self):\n        yield 1 / 0\n\n    def prepare",
            "notes`: ZeroDivisionError",
        ),
        ("def prepare", "def unseen(self): raise OSError(3)\n\n    def prepare", "unseen`: OSError: 3"),
        ("def prepare", "def __init__(self, kernel): ...\n\n    def prepare", "__init__`: TypeError"),
    ],
)
def test_other_methods_that_raise_on_the_cpu(
    install: Install, request: pytest.FixtureRequest, right: str, wrong: str, part: str
) -> None:
    install("toy-kernels", broken((right, wrong)))
    outcome = checked(declared(f"raising_{request.node.callspec.indices['right']}"), "toy")
    assert outcome.status == "skipped"
    assert outcome.reason.startswith(f"the kernel language Toy fails in `ToyOnCpu.{part}")
    assert [each.cause for each in outcome.failures] == ["not-exercised"]


def test_a_finding_has_a_cause_that_checks_know(install: Install) -> None:
    found = "found=[opsmith.kernels.on_cpu.CpuFinding('bad luck', 'm', 'a.py:1')]"
    install("toy-kernels", "import opsmith\n" + broken((RUNS, RUNS.replace("kernel)", f"kernel, {found})"))))
    outcome = checked(declared("cause"), "toy")
    assert outcome.reason.startswith(
        "the kernel language Toy gives 'bad luck' in `ToyOnCpu.launch`, where `CpuFinding.cause`: one of note"
    )


def test_another_kernel_of_the_language_still_runs(install: Install) -> None:
    text = broken(("return 1", "return 1 if self.kernel.source.entry == 'double' else self.nothing"))
    install("toy-kernels", text)
    operator = declared("beside_another").kernel("cuda", toy=lambda x: 2 * x)
    outcome = checked(operator, "toy")
    assert len(outcome.failures) == 1
    assert outcome.notes[0].startswith("run on the CPU, not on a GPU: ")


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        pytest.param(
            'parts = "programs"',
            'parts = "blocks"',
            "'blocks' in `ToyOnCpu.parts`, where Literal['threads', 'programs'] is right",
            id="parts",
        ),
        pytest.param(
            '("scale",)',
            '"scale"',
            "'scale' in `ToyLanguage.options`, where Sequence[str] is right",
            id="options",
        ),
        pytest.param(
            '("cpu", "cuda")',
            '"cuda"',
            "'cuda' in `ToyLanguage.devices`, where Sequence[str] is right",
            id="text",
        ),
        pytest.param(
            ", ToyOnCpu",
            ', "ToyOnCpu"',
            "'ToyOnCpu' in `ToyLanguage.on_cpu`, where type[OnCpu] | None is right",
            id="name of a class",
        ),
        pytest.param(
            f"    {BUILDS}\n",
            "",
            "<class 'toy_kernels.ToyOnCpu'> in `ToyLanguage.on_cpu`, where type[OnCpu] with `build` is right",
            id="a method is missing",
        ),
        pytest.param(
            "dtypes = None",
            "dtypes = 'float32'",
            "'float32' in `ToyKernel.dtypes`, where Collection[dtype] | None is right",
            id="dtypes",
        ),
        pytest.param(
            "dtypes = None",
            "dtypes = ['float32']",
            "'float32' in `ToyKernel.dtypes`, where dtype is right",
            id="a dtype",
        ),
        pytest.param(
            "gpu_usage = ToyUsage()",
            "gpu_usage = ToyUsage",
            "<class 'toy_kernels.ToyUsage'> in `CompiledToy.gpu_usage`, where GpuUsage | None is right",
            id="a class as an object",
        ),
    ],
)
def test_a_class_with_a_wrong_value(install: Install, right: str, wrong: str, problem: str) -> None:
    install("toy-kernels", broken((right, wrong), compiled="Compiled" in problem))
    with pytest.raises(errors.LanguageError) as caught:
        importlib.import_module("toy_kernels")
    assert caught.value.problem == f"a kernel language gives {problem}"
    assert caught.value.hint == "correct the class, or report it to the authors of toy-kernels 1.0"


@pytest.mark.parametrize(
    ("right", "wrong", "problem", "hint"),
    [
        pytest.param(
            MAKES,
            "declaration.nothing",
            "fails in `ToyLanguage.kernel`: AttributeError: 'Declaration' object has no attribute 'nothing'",
            "correct AT, or report it to the authors of toy-kernels 1.0 with the whole traceback",
            id="kernel raises",
        ),
        pytest.param(
            MAKES,
            "import no_such_module",
            "fails in `ToyLanguage.kernel`: ModuleNotFoundError: No module named 'no_such_module'",
            "install the package of the module `no_such_module`, which toy-kernels 1.0 needs",
            id="a package is missing",
        ),
        pytest.param(
            MAKES,
            "ToyKernel(declaration)",
            "gives None in `ToyLanguage.kernel`, where BuiltKernel[Any] is right",
            "correct AT, or report it to the authors of toy-kernels 1.0",
            id="no kernel",
        ),
        pytest.param(
            "super().__init__(declaration.operator, lambda: source, strict=declaration.strict)",
            "pass",
            "gives None in `ToyKernel.operator`, where the operator of `super().__init__("
            "declaration.operator, read, strict=declaration.strict)` is right",
            "correct the class, or report it to the authors of toy-kernels 1.0",
            id="no operator",
        ),
        pytest.param(
            'key, language = "toy", "Toy"',
            'language = "Toy"',
            "gives '' in `ToyKernel.key`, where 'toy', the key of its language, is right",
            "correct the class, or report it to the authors of toy-kernels 1.0",
            id="no key",
        ),
        pytest.param(
            'key, language = "toy", "Toy"',
            'key = "toy"',
            "gives None in `ToyKernel.language`, where 'Toy', the name of its language, is right",
            "correct the class, or report it to the authors of toy-kernels 1.0",
            id="no name",
        ),
        pytest.param(
            'where: str = "toy.py:1"',
            "...",
            "gives ToySource(function=<function double>, text='text') in `ToyKernel.source`, where an object "
            "with the texts `entry`, `text` and `where` is right",
            "correct the class, or report it to the authors of toy-kernels 1.0",
            id="no place",
        ),
    ],
)
def test_a_declaration_in_a_broken_language(
    install: Install, request: pytest.FixtureRequest, right: str, wrong: str, problem: str, hint: str
) -> None:
    text = broken((right, wrong))
    install("toy-kernels", text)
    name = f"declared_{request.node.callspec.indices['right']}"
    with pytest.raises(errors.LanguageError) as caught:
        declared(name)
    found = caught.value
    assert (found.operator, found.problem) == (f"languages::{name}", f"the kernel language Toy {problem}")
    at = line_of(text, "    def kernel(") if problem.startswith("gives") else line_of(text, wrong)
    assert found.hint == hint.replace("AT", at)
    assert ("AT" in hint) <= str(found.where).endswith(at)
    assert (found.__cause__ is None) == problem.startswith("gives")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return False", "gives False in `ToyKernel.refusal`, where str | None is right"),
        ("return values[3]", "fails in `ToyKernel.refusal`: IndexError: "),
    ],
)
def test_a_call_of_a_kernel_that_cannot_say_if_it_takes_it(install: Install, body: str, problem: str) -> None:
    install("toy-kernels", broken((TAKES, f"def refusal(self, values):\n        {body}")))
    operator = declared(f"refusal_{len(body)}", "cpu")
    for ask in (operator, operator.explain):
        with pytest.raises(errors.LanguageError) as caught:
            ask(torch.ones(2))
        assert caught.value.operator == operator.name
        assert caught.value.problem.startswith(f"the kernel language Toy {problem}")
    report = opsmith.check(operator, only=["forward"], effort="quick")
    assert not report.passed_as_asked
    assert report.outcomes[0].status == "skipped"
    assert report.outcomes[0].reason.startswith(f"missing here: the kernel language Toy {problem}")


def test_explain_of_a_kernel_without_copies(install: Install) -> None:
    install("toy-kernels", broken(("return ()", "pass")))
    operator = declared("copies", "cpu")
    with pytest.raises(
        errors.LanguageError, match=r"gives None in `ToyKernel.copies`, where tuple\[str, ...\]"
    ):
        operator.explain(torch.ones(2))


USAGES = [
    (EACH, f"        raise KeyError('x')\n{EACH}", "fails in `ToyUsage.usage`: KeyError: 'x'"),
    ("yield KernelUsage", "return KernelUsage", "gives KernelUsage(registers=8, "),
    (
        "architecture=each,",
        "",
        "fails in `ToyUsage.usage`: TypeError: KernelUsage.__init__() missing 1 required",
    ),
    ("yield KernelUsage.of", "yield str", "fails in `ToyUsage.usage`: TypeError: "),
    (
        "Resources(8)",
        "Resources('8')",
        "gives '8' in `ToyUsage.usage`, where int is right",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "problem"), USAGES, ids=range(len(USAGES)))
def test_resources_are_unknown_where_the_compiler_of_a_language_fails(
    install: Install, request: pytest.FixtureRequest, right: str, wrong: str, problem: str
) -> None:
    install("toy-kernels", broken(LIMITED, (right, wrong), compiled=True))
    operator = declared(f"usage_{request.node.callspec.indices['right']}")
    outcome = checked(operator, "resources")
    assert outcome.status == "skipped"
    assert outcome.reason.startswith(f"the kernel language Toy {problem}")
    assert "or report it to the authors of toy-kernels 1.0" in outcome.reason
    [refused] = kernels_of(operator).refused
    assert refused.startswith(f"{operator.name}: the kernel language Toy {problem}")


def test_a_language_that_models_no_access(install: Install) -> None:
    models = (LIMITED[0], LIMITED[1].replace("has_limits", "models_access"))
    install("toy-kernels", broken(models, compiled=True))
    operator = declared("access")
    [(kernel, usage)] = languages.with_gpu_usage(operator.specification.kernels)
    with pytest.raises(errors.LanguageError) as caught:
        usage.accesses(kernel, lambda dtype: [])
    assert caught.value.problem == (
        "the kernel language Toy gives True in `ToyUsage.models_access`, where a class with a method "
        "`accesses` "
        "is right"
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("...", "gives None in `ToyLanguage.parts`, where Iterator[Part] is right"),
        ("yield 3", "gives 3 in `ToyLanguage.parts`, where Part is right"),
        ("yield self.nothing", "fails in `ToyLanguage.parts`: AttributeError: 'ToyLanguage' object has no"),
    ],
)
def test_doctor_has_a_line_for_a_broken_language(install: Install, body: str, problem: str) -> None:
    install("toy-kernels", broken(("def kernel(", f"def parts(self):\n        {body}\n\n    def kernel(")))
    found = {each.name: each for each in inventory()}
    assert found["toy"].found is None
    assert found["toy"].hint.startswith(f"the kernel language Toy {problem}")
    assert found["toy"].hint.partition(": correct toy_kernels.py:")[2]
    assert "Triton" in found


PACKAGE = """
import opsmith
from torch import Tensor

@opsmith.operator("NAME::twice")
def twice(x: Tensor) -> Tensor:
    return 2 * x

twice.kernel("cpu", toy=lambda x: x + x)
"""
DESCRIBES = "return Built(described, b"
AHEADS = [
    ("def refuse(self, kernels, targets): ...", "def refuse(self, kernels, targets): self.nothing", "refuse"),
    (DESCRIBES, f"{{}}['x']; {DESCRIBES}", "build"),
    (DESCRIBES, "Built(described, b", "build"),
    ('b"toy"', '"toy"', "build"),
    ("def refuse(", "def shared(self): yield 3\n\n    def refuse(", "shared"),
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Name of a package with one kernel in the toy language."""
    monkeypatch.setenv("OPSMITH_NO_CALLS_BUILD", "1")
    name = re.sub(r"\W+", "_", request.node.name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE.replace("NAME", name))
    return name


@pytest.mark.skipif(not levels(), reason="no level of this machine's processors is known")
@pytest.mark.parametrize(("right", "wrong", "method"), AHEADS, ids=range(len(AHEADS)))
def test_a_build_ends_where_a_language_fails(
    install: Install, package: str, right: str, wrong: str, method: str
) -> None:
    text = broken((right, wrong), compiled=True)
    install("toy-kernels", text)
    with pytest.raises(errors.LanguageError) as caught:
        build_package(package, cpu=next(iter(levels())), cuda="none")
    assert f" in `ToyAhead.{method}`" in caught.value.problem
    assert str(caught.value.hint).startswith("correct toy_kernels.py:")
    if method != "shared":
        assert caught.value.operator == f"{package}::twice"
        assert caught.value.problem.startswith("the kernel language Toy ")


def test_what_a_library_without_python_gets_is_compared_with_its_fields(install: Install) -> None:
    linked = "def linked(self, kernel, targets): return LinkedKernel((), 3)\n\n    def refuse("
    text = broken(("def refuse(", linked), ("Ahead, Built\n", "Ahead, Built, LinkedKernel\n"), compiled=True)
    install("toy-kernels", text)
    operator = declared("linked", "cpu")
    with pytest.raises(errors.LanguageError) as caught:
        languages.language("toy").ahead.linked(operator.specification.kernels[0].given, ())
    problem = (
        "the kernel language Toy gives 3 in `ToyAhead.linked`, where Callable[[], KernelObject | Launched"
    )
    assert caught.value.problem.startswith(problem)


def test_pairs_that_a_language_yields(install: Install) -> None:
    shared = "def shared(self): yield SharedLibrary('a', str), False\n\n    def refuse("
    text = broken(("def refuse(", shared), ("Ahead, Built\n", "Ahead, Built, SharedLibrary\n"), compiled=True)
    install("toy-kernels", text)
    [(library, required)] = languages.language("toy").ahead.shared()
    assert (library.target, required) == ("a", False)


def test_the_origin_of_a_kernel_is_unknown_where_a_language_fails(install: Install, package: str) -> None:
    origin = "def origin(self, kernel): return 3\n\n    def refuse("
    install("toy-kernels", broken(("def refuse(", origin), compiled=True))
    [found] = kernel_origins(package).kernels
    assert found.origin == "the kernel language Toy gives 3 in `ToyAhead.origin`, where str is right"
    assert found.missing


def test_the_check_goes_on_where_a_language_cannot_compile_ahead(install: Install) -> None:
    ahead = "def compile_ahead(self): self.nothing\n\n    def copies"
    install("toy-kernels", broken(("def copies", ahead)))
    operator = declared("ahead", "cpu").kernel("cpu", toy=lambda x: 2 * x)
    with pytest.raises(errors.LanguageError, match=r"fails in `ToyKernel.compile_ahead`: AttributeError"):
        operator.specification.kernels[0].given.compile_ahead()
    assert opsmith.check(operator, only=["forward"], effort="quick").passed_as_asked
