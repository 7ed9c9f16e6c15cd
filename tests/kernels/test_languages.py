"""Languages of other packages: how they are found, and what is said where one is not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_language import COMPILED, TOY, Install

import opsmith
from opsmith import errors
from opsmith.build.processor import levels
from opsmith.checking.properties import PROPERTIES, USUAL
from opsmith.cli.inventory import inventory
from opsmith.kernels import languages
from opsmith.pages.kernels import kernels_of
from opsmith.rules import rules
from opsmith.shipping import build_package


def declared(name: str) -> Any:
    @opsmith.operator(f"languages::{name}")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return twice


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def refused(name: str, device: str = "cpu", **options: Any) -> errors.OpsmithError:
    """The error of a declaration, which says what it is about."""
    with pytest.raises(errors.OpsmithError) as caught:
        declared(name).kernel(device, **options)
    error = caught.value
    assert error.operator == f"languages::{name}"
    assert all((error.argument, error.expected, error.got, error.hint)), str(error)
    return error


def test_a_package_brings_a_language(install: Install) -> None:
    install("toy-kernels", TOY)
    operator = declared("brought").kernel("cpu", toy=double, scale=3)
    assert operator(torch.ones(2)).tolist() == [6, 6]
    assert "toy.py:1" in operator.explain(torch.ones(2)).forward
    assert "toy" in languages.installed_keys()


@pytest.mark.parametrize(("scale", "passed"), [(1, True), (3, False)])
def test_check_runs_its_kernels_on_the_cpu(install: Install, scale: int, passed: bool) -> None:
    install("toy-kernels", TOY)
    operator = declared(f"checked_{scale}").kernel("cuda", toy=double, scale=scale)
    operator.samples(lambda make: [(make(3),), (make(2, 5),)])
    report = opsmith.check(operator, only=["toy"], effort="quick")
    assert report.passed_as_asked == passed
    assert "toy" in PROPERTIES
    assert "toy" not in {each.name for each in rules()}  # its page is the package's affair
    [outcome] = [each for each in report.outcomes if each.property == "toy"]
    if passed:
        assert outcome.notes[0].startswith("run on the CPU, not on a GPU: ")
    else:
        assert {(each.property, each.where) for each in outcome.failures} == {("toy", "toy.py:1")}


def test_only_may_name_what_no_kernel_has_named(install: Install) -> None:
    install("toy-kernels", TOY)
    operator = declared("unnamed")
    operator.samples(lambda make: [(make(3),)])
    report = opsmith.check(operator, only=["toy"], effort="quick")
    assert report.outcomes[-1].reason == "the operator has no kernel in Toy"


def test_the_error_for_an_unknown_name_beside_it_names_that_one(install: Install) -> None:
    install("toy-kernels", TOY)
    with pytest.raises(errors.UsageError, match="there is no property `weather`"):
        opsmith.check(declared("beside"), only=["toy", "weather"])


def test_compile_and_pages_show_what_a_language_compiles(install: Install) -> None:
    install("toy-kernels", TOY + COMPILED)
    operator = declared("compiled").kernel("cuda", toy=double)
    listed = kernels_of(operator, ["sm_80", "sm_90"])
    assert [(each.operator, each.architecture, each.registers) for each in listed.usage] == [
        ("languages::compiled", "sm_80", 8),
        ("languages::compiled", "sm_90", 8),
    ]
    assert [(each.language, each.entry) for each in listed.listed] == [("Toy", "double")]


PACKAGE = """
import opsmith
from torch import Tensor

@opsmith.operator("toy_package::twice")
def twice(x: Tensor) -> Tensor:
    return 2 * x

twice.kernel("cpu", toy=lambda x: x + x)
"""


@pytest.mark.skipif(not levels(), reason="no level of this machine's processors is known")
@pytest.mark.parametrize("more", ["", COMPILED], ids=["as source", "built"])
def test_a_package_ships_kernels_of_a_language(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setenv("OPSMITH_NO_CALLS_BUILD", "1")
    install("toy-kernels", TOY + more)
    folder = tmp_path / f"toy_package_{len(more)}"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE.replace("toy_package", folder.name))
    level = next(iter(levels()))
    made = build_package(folder.name, cpu=level, cuda="none")
    kernels = [each for each in made.rows if each.language == "Toy"]
    assert [(each.operator, each.target) for each in kernels] == [
        (f"{folder.name}::twice", level if more else "source")
    ]
    [file] = [each for each in made.files if each.language == "Toy"] if more else [None]
    if file is not None:
        assert (made.output / file.file).read_bytes() == b"toy"


def loaded(install: Install, **names: str) -> Any:
    """The toy language, with another key."""
    install("toy-kernels", TOY.replace('"toy", "Toy"', f'"{names["key"]}", "Toy"', 2))
    return importlib.import_module("toy_kernels").LANGUAGE


def test_a_language_of_one_process(install: Install) -> None:
    languages.add_language(loaded(install, key="toy"))
    assert declared("of_process").kernel("cpu", toy=double)(torch.ones(2)).tolist() == [2, 2]
    assert "toy" in USUAL


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("triton", "opsmith already has a kernel language `triton`"),
        ("forward", "the kernel language `forward` has the name of a property of `check`"),
    ],
)
def test_a_key_that_is_taken(install: Install, key: str, problem: str) -> None:
    before = PROPERTIES[key]
    with pytest.raises(errors.UsageError) as caught:
        languages.add_language(loaded(install, key=key))
    assert caught.value.problem == problem
    assert all((caught.value.argument, caught.value.expected, caught.value.got, caught.value.hint))
    assert PROPERTIES[key] is before
    assert languages.language("forward") is None


@pytest.mark.parametrize(
    ("attribute", "value", "problem"),
    [
        ("key", "dtypes", "the kernel language ToyLanguage has no valid `key`"),
        ("key", "toy_file", "the kernel language ToyLanguage has no valid `key`"),
        ("key", "", "the kernel language ToyLanguage has no valid `key`"),
        ("key", None, "the kernel language ToyLanguage has no valid `key`"),
        ("name", None, "the kernel language ToyLanguage has no valid `name`"),
        ("devices", (), "the kernel language ToyLanguage has no valid `devices`"),
    ],
)
def test_a_language_without_what_every_one_has(
    install: Install, attribute: str, value: Any, problem: str
) -> None:
    unfit = loaded(install, key="toy")
    setattr(type(unfit), attribute, value)
    with pytest.raises(errors.UsageError) as caught:
        languages.add_language(unfit)
    assert caught.value.problem == problem
    assert (caught.value.argument, caught.value.got) == (attribute, repr(value))
    assert caught.value.hint == f"define `{attribute}` in its class"


def test_what_is_no_language_is_not_added(install: Install) -> None:
    for other in (type(loaded(install, key="toy")), "toy"):
        with pytest.raises(errors.UsageError, match="only a kernel language can be added"):
            languages.add_language(other)


def test_a_key_of_this_process_is_meant_by_one_that_is_close(install: Install) -> None:
    languages.add_language(loaded(install, key="toy"))
    with pytest.raises(errors.UsageError) as caught:
        declared("close").kernel("cpu", toi=double)
    assert caught.value.hint == "did you mean `toy=`?"


def test_doctor_lists_what_languages_need(install: Install) -> None:
    text = """    def parts(self):
        yield Part("Toy compiler", "toy-kernels", "kernels in Toy", "pip install toy-kernels")
"""
    install(
        "toy-kernels",
        TOY.replace("\n    def kernel(", f"\n{text}\n    def kernel(").replace(
            "import Language", "import Language, Part"
        ),
    )
    install("broken-kernels", "import no_such_module", key="broken")
    found = {each.name: each for each in inventory()}
    assert found["Toy compiler"].found == "1.0"
    assert found["broken"].found is None
    assert found["broken"].hint.startswith("the package of the kernel language `broken` cannot be imported")
    assert [*found].index("NVRTC") + 1 == [*found].index("Triton")


def test_a_language_of_opsmith_reads_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    declared("own").kernel("cpu", cpp="void own() {}")


def test_the_package_is_missing() -> None:
    error = refused("missing", "cuda", helion=double)
    assert error.problem == "no installed package has a kernel language for `helion=`"
    assert (error.argument, error.got) == ("helion", "`helion=`")
    assert "an entry point `helion` in the group `opsmith.languages`" in str(error.hint)


def test_an_unknown_option(install: Install) -> None:
    install("toy-kernels", TOY)
    error = refused("unknown", toy=double, scal=3)
    assert error.problem == "a kernel in Toy is given unknown options"
    assert (error.argument, error.hint) == ("scal", "did you mean `scale=`?")
    error = refused("of_another", toy=double, grid=3)
    assert error.hint == "leave `grid=` out; it is for `cuda=` and `triton=`"
    error = refused("in_a_file", toy_file="double.toy")
    assert error.problem == "no installed package has a kernel language for `toy_file=`"


def test_two_sources(install: Install) -> None:
    install("toy-kernels", TOY)
    error = refused("two", "cuda", cuda="", toy=double, grid=1)
    assert (error.problem, error.got) == ("a kernel must have exactly one source", "`cuda=` and `toy=`")


def test_a_device_that_the_language_does_not_support(install: Install) -> None:
    install("toy-kernels", TOY)
    error = refused("elsewhere", "mps", toy=double)
    assert error.problem == "a kernel in Toy is declared for `mps`"
    assert error.expected == "`cpu` or `cuda`, on which its kernels run"
    assert error.hint == "write `op.kernel('cpu', toy=...)`"


def test_a_package_that_cannot_be_imported(install: Install) -> None:
    install("toy-kernels", "import no_such_module")
    error = refused("broken", toy=double)
    assert isinstance(error, errors.ModuleImportError)
    assert error.problem == "the package of the kernel language `toy` cannot be imported"
    assert error.got == "ModuleNotFoundError: No module named 'no_such_module'"
    assert (
        error.hint
        == "import `toy_kernels` in Python for the whole traceback; reinstall or update toy-kernels"
    )


def test_an_entry_point_that_names_something_else(install: Install) -> None:
    install("toy-kernels", "LANGUAGE = 3")
    error = refused("something", toy=double)
    assert error.problem == "the entry point of the kernel language `toy` does not name this language"
    assert error.got == ("toy-kernels (`toy_kernels:LANGUAGE`), which is 3")


def test_a_language_with_another_key(install: Install) -> None:
    install("toy-kernels", TOY.replace('"toy", "Toy"', '"game", "Toy"'))
    assert refused("game", toy=double).got == "toy-kernels (`toy_kernels:LANGUAGE`), which has the key `game`"


def test_two_packages_bring_the_same_language(install: Install) -> None:
    install("toy-kernels", TOY)
    install("other-toys", TOY)
    error = refused("twice", toy=double)
    assert error.problem == "2 installed packages have the kernel language `toy`"
    assert {*str(error.got).split(" and ")} == {
        "toy-kernels (`toy_kernels:LANGUAGE`)",
        "other-toys (`other_toys:LANGUAGE`)",
    }
    assert error.hint == "keep one of these packages, and uninstall the others"


@pytest.mark.parametrize(
    ("name", "function", "error", "expected"),
    [
        ("double", lambda x: (2 * x).double(), errors.ResultTypeError, "torch.float32"),
        ("short", lambda x: 2 * x[:2], errors.ShapeError, "[3]"),
        ("none", lambda x: torch.zeros(()) if len(x) == 3 else x, errors.ShapeError, "[3]"),
    ],
)
def test_its_results_are_held_to_what_the_reference_promises(
    install: Install, name: str, function: Any, error: type[errors.OpsmithError], expected: str
) -> None:
    install("toy-kernels", TOY)
    operator = declared(f"held_{name}").kernel("cpu", toy=function)
    for grad in (False, True, False):
        with pytest.raises(error) as caught:
            operator(torch.ones(3, requires_grad=grad))
        assert caught.value.expected == expected
        assert caught.value.where == "toy.py:1"


def test_its_results_are_copied_into_the_strides_of_the_reference(install: Install) -> None:
    install("toy-kernels", TOY)
    operator = declared("strides").kernel("cpu", toy=lambda x: (2 * x).mT.contiguous().mT)
    assert [operator(torch.ones(2, 3)).stride() for _ in range(3)] == [(3, 1)] * 3
