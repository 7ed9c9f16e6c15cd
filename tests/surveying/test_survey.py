"""`survey`: arguments are guessed, and every verdict has the reason that its author can act on."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import judged_functions as judged
import mixed_functions as mixed
import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith
from opsmith import errors
from opsmith.surveying import Finding, survey
from opsmith.surveying.finding import snake
from opsmith.surveying.guesses import ClassSource, guesses, unguessable
from opsmith.surveying.trials import guessed_samples
from opsmith.targets import classes_of

VERDICTS = {
    "GradReverse": (
        "needs a declaration",
        ["scaled or reversed"],
    ),
    "ClipGrad": (
        "needs a declaration",
        ["twice the grad_output does not give twice the gradient", 'kind="nonlinear"'],
    ),
    "DampPositive": (
        "needs a declaration",
        ["twice the grad_output does not give twice the gradient", 'kind="nonlinear"'],
    ),
    "Embed": ("works", []),
    "Conv": ("works", []),
    "Log": ("works", []),
    "Typo": ("wrong", ["its backward raises NameError: name 'y' is not defined"]),
    "TooFew": ("wrong", ["incorrect number of gradients (expected 2, got 1)"]),
    "Swapped": ("wrong", ["the gradient of `a` is wrong", "the same for `b`"]),
    "Reduce": ("works", []),
    "NumpyNoise": ("wrong", ["it draws from the global state of NumPy"]),
    "Broken": ("wrong", ["its forward raises RuntimeError: the extension is not compiled, whatever"]),
    "RoundSTE": ("needs a declaration", ["small changes of `x`", "straight-through", 'kind="surrogate"']),
    "MarksDirty": ("works", []),
    "WritesUnmarked": ("needs a declaration", ["its forward writes into `x`", "works on a copy"]),
    "Outer.Inner": ("works", []),
    "Cube": ("works", []),
    "Fourth": ("works", []),
    "TopK": ("works", []),
    "Single": ("needs a declaration", ["it returns float32 for float64", 'kind="float32"']),
    "NoBackward": ("works", ["it has no backward: its gradient is the derivative of its forward"]),
    "BaseOfOthers": ("needs a declaration", ["it has no `forward`, so there is nothing to adopt"]),
    "TwoKernels": (
        "needs a declaration",
        ["it is wrong for x [3, 4], y [3, 4]", "it is right for x [4], y [4]"],
    ),
    "Unguessable": ("needs a declaration", ["the values of `settings` cannot be guessed", "`samples=`"]),
    "Demanding": ("needs a declaration", ["guessed calls ran", "AssertionError: got [", "`samples=`"]),
    "Cell": ("works", []),
    "WithInit": ("wrong", ["it has an `__init__`", "let forward take the arguments of `__init__`"]),
    "BadShape": ("needs a declaration", ["invalid gradient at index 1", "either its backward is wrong, or"]),
    "Item": ("wrong", ["its forward returns no tensor, for all arguments"]),
    "Positive": ("works", []),
    "Root": (
        "needs a declaration",
        ["it is wrong for x [3, 4]", "it is right for x [3, 4], all of them positive"],
    ),
    "Abstract": ("needs a declaration", ["raises NotImplementedError", "if it is a base class"]),
    "AnswersOnce": ("works", []),
    "LeavesInBackward": ("works", ["cannot run in a second-order gradient"]),
    "Nested": ("works", []),
    "NoSuchMethod": ("wrong", ["its forward raises AttributeError: 'Tensor' object has no attribute 'frob"]),
    "AsksAnObject": ("needs a declaration", ["guessed calls ran", "`samples=`"]),
    "Attention": ("works", []),
}
LINES = {
    "GradReverse": 'grad_reverse = opsmith.adopt(GradReverse, "mypackage::grad_reverse", kind="surrogate")',
    "TopK": 'top_k = opsmith.adopt(TopK, "mypackage::top_k")',
    "RoundSTE": 'round_ste = opsmith.adopt(RoundSTE, "mypackage::round_ste", kind="surrogate")',
    "Outer.Inner": 'inner = opsmith.adopt(Outer.Inner, "mypackage::inner")',
    "Cube": 'cube = opsmith.adopt(Cube, "mypackage::cube")',
    "Unguessable": "samples=lambda: [(torch.randn(3, 4), SETTINGS)]",
    "Demanding": "samples=lambda: [(X, Y)]",
    "Swapped": None,
    "BaseOfOthers": None,
}


def of(name: str, module: ModuleType = judged) -> Finding:
    return survey(classes_of(module, name)[name], name=name)


def test_every_class_of_the_file_has_a_verdict_here() -> None:
    assert list(classes_of(judged)) == list(VERDICTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_and_its_reasons(name: str) -> None:
    found = of(name)
    verdict, words = VERDICTS[name]
    assert found.verdict == verdict, found.reasons
    for each in words:
        assert each in " ".join(found.reasons)
    assert bool(found.reasons) == bool(words)
    if name in LINES:
        expected = LINES[name]
        assert found.line is None if expected is None else expected in str(found.line)


def run(line: str | None, module: ModuleType, space: str, **filled: Any) -> opsmith.Operator[..., Any]:
    """Do what someone does who copies a line, with another name for `mypackage`."""
    assert line is not None
    names = {**vars(module), "opsmith": opsmith, "torch": torch, **filled}
    exec(line.replace("mypackage::", f"{space}::"), names)
    return names[line.partition(" =")[0]]


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["GradReverse", "TopK", "Embed", "Outer.Inner"])
def test_the_line_can_be_copied(name: str) -> None:
    found = of(name)
    operator = run(found.line, judged, f"copied_{name.rpartition('.')[2]}")
    assert isinstance(operator, opsmith.Operator)


@pytest.mark.slow
def test_the_line_with_capitals_works_once_they_are_filled_in() -> None:
    found = of("ApplyActivation", mixed)
    operator = run(found.line, mixed, "filled", ACTIVATION=torch.sin, DERIVATIVE=torch.cos)
    assert opsmith.check(operator, skip=["integration"]).passed
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(operator(x, torch.sin, torch.cos).sum(), x)
    assert torch.allclose(gradient, torch.cos(x))


@pytest.mark.slow
def test_what_it_gains_was_tried() -> None:
    found = of("Log")
    assert found.abilities == {
        "second order": "kept",
        "jvp": "new",
        "vmap": "new",
        "torch.compile": "kept",
    }
    operator = run(found.line, judged, "gained")
    x = torch.rand(3, 2) + 1
    assert torch.allclose(torch.func.vmap(operator)(x), x.log())
    assert torch.allclose(torch.func.jvp(operator, (x,), (x,))[1], torch.ones(3, 2))
    with pytest.raises(RuntimeError):
        torch.func.vmap(judged.Log.apply)(x)


@pytest.mark.slow
def test_a_class_that_leaves_torch_gains_vmap_and_says_what_is_missing() -> None:
    found = of("Arctangent", mixed)
    assert found.abilities["vmap"] == "new"
    assert found.reasons[0].startswith("no forward mode")
    assert found.line == 'arctangent = opsmith.adopt(Arctangent, "mypackage::arctangent")'


@pytest.mark.slow
def test_no_random_state_is_moved_and_the_same_seed_gives_the_same_finding() -> None:
    before = torch.get_rng_state()
    first, second = (survey(judged.Swapped, seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.reasons == second.reasons
    assert survey(judged.Swapped, seed=4).reasons != first.reasons


@pytest.mark.slow
def test_the_class_stays_as_it_is() -> None:
    before = dict(vars(judged.Log))
    of("Log")
    assert dict(vars(judged.Log)) == before


def test_no_guess_begins_after_the_time_is_over() -> None:
    found = survey(judged.Demanding, seconds=0.0)
    assert "none of 1 guessed calls ran" in found.reasons[0]


@pytest.mark.slow
def test_an_exception_of_any_kind_ends_in_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("opsmith.surveying.surveyor.abilities", broken)
    found = of("Log")
    assert found.verdict == "needs a declaration"
    assert found.reasons[0] == "the survey of this class raised RuntimeError: no more memory"
    assert "run `opsmith.check`" in found.reasons[1]


@pytest.mark.slow
def test_a_finding_is_made_of_the_types_of_json() -> None:
    read = of("Swapped").to_dict()
    assert (read["name"], read["verdict"], read["line"]) == ("Swapped", "wrong", None)
    line = inspect.getsourcelines(judged.Swapped.forward)[1] + 1  # `def`, under `@staticmethod`
    assert read["where"] == f"{judged.__file__}:{line}"
    assert read["report"]["passed"] is False


def reading(function: Callable[..., Any]) -> ClassSource:
    return ClassSource.of(type("Anything", (Function,), {"forward": staticmethod(function)}))


def kept_and_called(ctx: Any, x: Any, function: Any, other: Any) -> Any:
    ctx.kept = function
    return ctx.kept(x) + other(x)


def worded(ctx: Any, x: Tensor, mode: str) -> Tensor:
    return x if mode in ("plain", "raw") else -x


def defaulted(ctx: Any, x: Any, function: Any = torch.sin, dim: int = 1) -> Any:
    return function(x)


def test_what_the_source_tells_about_arguments() -> None:
    read = reading(kept_and_called)
    assert read.called == {"function", "other"}
    assert unguessable(read) == ["function", "other"]
    assert reading(worded).compared == {"mode": ("plain", "raw")}
    assert unguessable(reading(worded)) == []


def test_defaults_and_words_are_guesses() -> None:
    first = next(guesses(reading(defaulted), 0))[0].values
    assert first[1:] == (torch.sin, 1)
    assert next(guesses(reading(worded), 0))[0].values[1] == "plain"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LeakyReLUInPlace", "leaky_relu_in_place"),
        ("GELU", "gelu"),
        ("Conv2d", "conv2d"),
        ("STEFunction", "ste_function"),
        ("_Exp", "exp"),
        ("my_function", "my_function"),
    ],
)
def test_names_of_variables(name: str, expected: str) -> None:
    assert snake(name) == expected


def test_only_classes_of_the_file_count() -> None:
    assert list(classes_of(mixed)) == [
        "Mish",
        "Affine",
        "ApplyActivation",
        "AverageOfMany",
        "Square",
        "ScaleRows",
        "LeakyReLUInPlace",
        "Arctangent",
        "DropFeatures",
        "Binarize",
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [("Nope", "has no `autograd.Function` named `Nope`"), ("Outer", "is not an `autograd.Function`")],
)
def test_a_name_that_is_no_function_lists_those_that_are(name: str, says: str) -> None:
    with pytest.raises(errors.OperatorNotFoundError, match=says) as raised:
        classes_of(judged, name)
    assert "`Outer.Inner`" in str(raised.value)
    with pytest.raises(errors.OperatorNotFoundError, match="defines no `autograd"):
        classes_of(sys.modules[Path.__module__])


class EndlessBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return EndlessBackward.backward(ctx, grad)


def test_a_guess_that_needs_no_gradient_is_no_way_around_a_backward_that_raises() -> None:
    """Whole numbers run through the forward, and a plain number gives no tensor: neither says why."""
    with pytest.raises(errors.MissingSamplesError) as raised:
        guessed_samples(EndlessBackward, name="EndlessBackward", hint="")
    assert "the call that came furthest ended in RecursionError" in str(raised.value)


class Cubed(Function):
    """A class that saves what forward has computed: its own second order is silently wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope = 3 * x * x
        ctx.save_for_backward(slope)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return slope * grad


class CubedOnce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


@pytest.mark.slow
def test_it_says_which_second_orders_it_mends() -> None:
    found = survey(Cubed)
    assert found.verdict == "works"
    assert found.reasons == ()
    assert found.abilities["second order"] == "mended"
    (line,) = found.mends
    assert line.startswith(
        "mends second order: with `apply`, the derivative of the gradient of `x` is wrong: it lacks "
    )
    assert "because the forward keeps the value on `ctx` or by `save_for_backward`" in line
    assert found.to_dict()["mends"] == [line]


@pytest.mark.slow
def test_a_second_order_that_is_refused_is_mended_by_a_reference_alone() -> None:
    found = survey(CubedOnce)
    assert found.verdict == "works"
    assert "second order" not in found.abilities
    assert found.mends == ()
    (reason,) = found.reasons
    assert reason.startswith("no forward mode and no second order: `CubedOnce.backward` is marked with")
    assert reason.endswith(
        "give `reference=`, the same mathematics in plain PyTorch: the operator then derives the missing part"
    )
    operator = opsmith.adopt(CubedOnce, "surveying::cubed_once", reference=lambda x: x**3)
    assert torch.func.hessian(lambda x: operator(x).sum())(torch.tensor([2.0])).item() == 12.0


@pytest.mark.slow
def test_code_that_reads_addresses_needs_no_declaration() -> None:
    """The address of a tensor without data is 0, at which code in C dies."""
    found = survey(CopiedByAddress)
    assert (found.verdict, found.reasons) == ("works", ())
    assert found.line == 'copied_by_address = opsmith.adopt(CopiedByAddress, "mypackage::copied_by_address")'
    assert found.abilities["torch.compile"] == "kept"


class CopiedByAddress(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x, result = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        ctypes.memmove(result.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class AssignedRows(Function):
    """Rows of a table; its backward assigns where it should add."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        found = grad.new_zeros(ctx.rows, *grad.shape[1:])
        found[index] = grad
        return found, None


class AddedRows(AssignedRows):
    """Rows of a table, with the right backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        found = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return found.index_add(0, index.flatten(), grad.reshape(-1, *found.shape[1:])), None


class ScatteredElements(Function):
    """Elements of each column; its backward assigns where it should add."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = values.shape
        return values.gather(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(0, index, grad), None


@pytest.mark.slow
@pytest.mark.parametrize("function_class", [ScatteredElements, AssignedRows])
def test_a_backward_that_overwrites_where_an_index_repeats_is_wrong(function_class: Any) -> None:
    found = survey(function_class)
    assert found.verdict == "wrong"
    assert "wrong where an index in `index` occurs more than once, and nowhere else" in found.reasons[0]
    assert found.line is None


def test_a_backward_that_adds_where_an_index_repeats_works() -> None:
    assert survey(AddedRows).verdict == "works"


def test_guessed_indices_repeat_are_all_the_same_and_all_others() -> None:
    every_guess = guesses(ClassSource.of(AssignedRows, "AssignedRows"), 0)
    guess = next(each for some in every_guess for each in some if not each.values[1].is_floating_point())
    every = [each.values[1].tolist() for each in (guess, *guess.with_other_indices())]
    assert every[0][0] == every[0][-1]
    assert every[1:] == [[0, 0, 0], [2, 1, 0]]
