"""Messages about operators registered elsewhere that cannot be adopted, and about their references."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.torch_library.capabilities import public

Place = Callable[[Callable[..., Any]], str]


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library: Any = torch.library.Library("theirs", "FRAGMENT")
    yield library
    library._destroy()


Define = Callable[..., Any]


@pytest.fixture
def define(library: torch.library.Library) -> Define:
    """Defines an operator of a schema, with a kernel for the CPU, and returns it."""

    def of(schema: str, key: str = "CPU") -> Any:
        library.define(schema)
        name = schema.partition("(")[0]
        if key:
            library.impl(name, lambda x, *rest: x.clone(), key)
        return getattr(torch.ops.theirs, name.partition(".")[0])

    return of


def same(x: Tensor) -> Tensor:
    return x.clone()


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x / 2


@pytest.mark.parametrize(
    ("subject", "shown"),
    [(3, "int 3"), ("theirs::name", "str 'theirs::name'"), (None, "None")],
    ids=["number", "text", "None"],
)
def test_no_operator(subject: Any, shown: str, says: Any) -> None:
    with says(
        errors.UsageError,
        f"""
        only a Function class, or an operator that torch knows, can be adopted
          argument: subject
          expected: a class derived from torch.autograd.Function, or `torch.ops.ns.name`
          got: {shown}
          hint: give the class, not its `apply`; declare a function with `@opsmith.operator("mylib::name")`
        """,
    ):
        opsmith.adopt(subject, reference=same)


def test_a_function_and_a_namespace_are_no_operators() -> None:
    for subject in (same, torch.ops.theirs):
        with pytest.raises(errors.UsageError, match="only a Function class, or an operator"):
            opsmith.adopt(subject, reference=same)


@pytest.mark.parametrize(
    ("given", "shown", "hint"),
    [
        ({"name": "mine::name"}, "'mine::name'", "leave it out"),
        ({"signature": "x"}, "'x'", "leave it out"),
        (
            {"kind": "surrogate"},
            "'surrogate'",
            "leave it out; attach `op.surrogate_gradients(...)` to the result",
        ),
        (
            {"deterministic": False},
            "False",
            "leave it out; give it torch's tag `nondeterministic_bitwise` in its definition",
        ),
    ],
    ids=["name", "signature", "kind", "deterministic"],
)
def test_what_is_for_classes(given: dict[str, Any], shown: str, hint: str, define: Define, says: Any) -> None:
    (argument,) = given
    operator = define("classes(Tensor x) -> Tensor")
    args = (given["name"],) if argument == "name" else ()
    rest = {} if args else given
    with says(
        errors.UsageError,
        f"""
        theirs::classes: `{argument}` is for a Function class, not for an operator of torch.library
          argument: {argument}
          got: {shown}
          hint: {hint}
        """,
    ):
        opsmith.adopt(operator, *args, reference=same, **rest)


def test_no_reference(define: Define, says: Any) -> None:
    with says(
        errors.UsageError,
        """
        theirs::alone: it must be adopted with a reference, from which the missing rules are derived
          argument: reference
          expected: a function that computes the same results in plain PyTorch
          got: None
          hint: write `opsmith.adopt(torch.ops.theirs.alone, reference=f)`
        """,
    ):
        opsmith.adopt(define("alone(Tensor x) -> Tensor"))


def test_several_overloads(define: Define, says: Any) -> None:
    define("over(Tensor x) -> Tensor")
    operator = define("over.scaled(Tensor x, float by=1) -> Tensor")
    with says(
        errors.UsageError,
        """
        theirs::over: it has several overloads
          expected: one of them
          got: `default`, `scaled`
          hint: `torch.ops.theirs.over.default` or `torch.ops.theirs.over.scaled`
        """,
    ):
        opsmith.adopt(operator, reference=same)
    assert opsmith.adopt(operator.scaled, reference=scaled)(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("schema", "key", "problem", "hint"),
    [
        (
            "views(Tensor(a) x) -> Tensor(a)",
            "CPU",
            "its schema shows that it returns a view of an argument, or several arguments",
            "adopt an operator that returns new tensors, or the one argument that it writes into",
        ),
        (
            "both(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))",
            "CPU",
            "its schema shows that it returns a view of an argument, or several arguments",
            "adopt an operator that returns new tensors, or the one argument that it writes into",
        ),
        (
            "composed(Tensor x) -> Tensor",
            "CompositeImplicitAutograd",
            "it is composite: torch sees the operations in it, and they have all rules",
            "use it unchanged; to check it, declare an operator whose reference calls it",
        ),
        (
            "empty(Tensor x) -> Tensor",
            "",
            "it has no kernel on any device",
            "import the library that registers its kernels first",
        ),
    ],
    ids=["views", "several-returned", "composed", "empty"],
)
def test_nothing_to_adopt(schema: str, key: str, problem: str, hint: str, define: Define, says: Any) -> None:
    operator = define(schema, key)
    with says(
        errors.UsageError,
        f"""
        theirs::{schema.partition("(")[0]}: {problem}
          got: theirs::{schema}
          hint: {hint}
        """,
    ):
        opsmith.adopt(operator, reference=same)


def test_a_reference_that_does_not_return_what_is_written(define: Define, says: Any, place: Place) -> None:
    operator = define("returns(Tensor(a!) x) -> Tensor(a!)")

    def nothing(x: Tensor) -> None:
        x.sin_()

    with says(
        errors.SignatureMismatchError,
        f"""
        theirs::returns: the reference and the operator return different numbers of results
          expected: theirs::returns(Tensor(a!) x) -> Tensor(a!)
          got: nothing(x: Tensor) -> None
          where: {place(nothing)}
          hint: write into `x`, and return it
        """,
    ):
        opsmith.adopt(operator, reference=nothing)


def test_a_functional_form_whose_name_is_taken(define: Define, says: Any, place: Place) -> None:
    operator = define("put(Tensor(a!) x) -> ()")
    define("put_functional(Tensor x) -> Tensor")

    def store(x: Tensor) -> None:
        x.sin_()

    with says(
        errors.NameTakenError,
        f"""
        theirs::put: torch already has an operator `theirs::put_functional`, the name of its functional form
          where: {place(store)}
          hint: rename that operator
        """,
    ):
        opsmith.adopt(operator, reference=store)


def test_one_of_torch_s_own(says: Any) -> None:
    with says(
        errors.UsageError,
        """
        aten::sin: it is an operator of torch itself, and torch has its gradients and kernels
          got: aten::sin(Tensor self) -> Tensor
          hint: declare your own operator that calls it
        """,
    ):
        opsmith.adopt(torch.ops.aten.sin.default, reference=same)


@pytest.mark.parametrize(
    ("suffix", "returned"), [("", "Tensor"), ("_and_hidden", "(Tensor, Tensor)")], ids=["whole", "hidden"]
)
def test_one_of_ours(suffix: str, returned: str, name: str, says: Any) -> None:
    def hiding(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sin()

    opsmith.operator(name, hidden=("sine",))(hiding)
    with says(
        errors.UsageError,
        f"""
        {name}{suffix}: it is declared with opsmith, and has all kernels and rules
          got: {name}{suffix}(Tensor x) -> {returned}
          hint: use the handle that `@opsmith.operator` made
        """,
    ):
        opsmith.adopt(getattr(torch.ops.messages, f"{name.partition('::')[2]}{suffix}"), reference=same)


def test_declaring_a_name_that_is_adopted(define: Define, place: Place, says: Any) -> None:
    opsmith.adopt(define("taken(Tensor x) -> Tensor"), reference=same)
    with says(
        errors.NameTakenError,
        f"""
        theirs::taken: the name is taken by `{__name__}.same`
          got: {__name__}.same, {place(same)}
          where: {place(same)}
          hint: choose another name, best with the name of your package as its namespace
        """,
    ):
        opsmith.operator("theirs::taken")(same)


def test_captured_parameter(define: Define, place: Place, says: Any) -> None:
    weight = torch.ones(2, requires_grad=True)

    def capturing(x: Tensor) -> Tensor:
        return x * weight

    operator = define("captured(Tensor x) -> Tensor")
    with says(
        errors.CapturedTensorError,
        f"""
        theirs::captured: it uses `weight`, which requires a gradient but is not an argument
          argument: weight
          expected: a function that uses only its arguments
          got: Tensor
          where: {place(capturing)}
          hint: make it an argument, `weight: Tensor`, or compute `weight.detach()` outside
        """,
    ):
        opsmith.adopt(operator, reference=capturing)
    assert "theirs::captured" not in {each.name for each in opsmith.declared_operators()}


def two(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def named(x: Tensor, *, alpha: float) -> Tensor:
    return x * alpha


def given(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def pair(x: Tensor, k: tuple[int, int, int]) -> Tensor:
    return x * k[0]


def listed(x: Tensor, ys: list[Tensor]) -> Tensor:
    return x + sum(ys)


def quoted(x: Tensor, m: str = "b", when: Tensor | None = None) -> Tensor:
    return x


def defaulted(x: Tensor, by: float = 3.0) -> Tensor:
    return x * by


class Mode(enum.Enum):
    UP = 1


def moded(x: Tensor, mode: Mode) -> Tensor:
    return x * mode.value


def bare(x, by=3, more=None):  # type: ignore[no-untyped-def]
    return x * by


ARGUMENTS = "take the same number of arguments by position, and keyword-only arguments by the same names"
MISMATCHES: dict[str, tuple[str, Callable[..., Any], str, str | None, str]] = {
    "more": (
        "more(Tensor x) -> Tensor",
        two,
        "the reference does not take the operator's arguments",
        None,
        ARGUMENTS,
    ),
    "more-without-hints": (
        "bare_more(Tensor x, float by=3.) -> Tensor",
        bare,
        "the reference does not take the operator's arguments",
        None,
        ARGUMENTS,
    ),
    "default-without-hints": (
        "bare_default(Tensor x, float by=3., int[] more=[2]) -> Tensor",
        bare,
        "the default of `more` is None, but the default of the operator's `more` is [2]",
        "more",
        "write `more: list[int] = [2]`, or leave the default out",
    ),
    "fewer": (
        "fewer(Tensor x, Tensor y) -> Tensor",
        same,
        "the reference does not take the operator's arguments",
        None,
        ARGUMENTS,
    ),
    "keyword": (
        "keyword(Tensor x, *, float beta) -> Tensor",
        named,
        "the reference does not take the operator's arguments",
        None,
        ARGUMENTS,
    ),
    "by-name-alone": (
        "by_name_alone(Tensor x, float alpha) -> Tensor",
        named,
        "the reference does not take the operator's arguments",
        None,
        ARGUMENTS,
    ),
    "type": (
        "type(Tensor x, str mode) -> Tensor",
        scaled,
        "`by` of the reference is float, but `mode` of the operator is str",
        "mode",
        "write `by: str`",
    ),
    "enum": (
        "enum(Tensor x, str mode) -> Tensor",
        moded,
        "`mode` of the reference is Mode, but `mode` of the operator is str",
        "mode",
        "write `mode: str`",
    ),
    "text": (
        "text(Tensor x, float m, Tensor? when=None) -> Tensor",
        quoted,
        "`m` of the reference is str, but `m` of the operator is float",
        "m",
        "write `m: float`",
    ),
    "optional": (
        "optional(Tensor x, Tensor? other) -> Tensor",
        given,
        "`y` of the reference is Tensor, but `other` of the operator is Tensor | None",
        "other",
        "write `y: Tensor | None`",
    ),
    "list": (
        "list(Tensor x, Tensor y) -> Tensor",
        listed,
        "`ys` of the reference is list[Tensor], but `y` of the operator is Tensor",
        "y",
        "write `ys: Tensor`",
    ),
    "item": (
        "item(Tensor x, Tensor?[] ys) -> Tensor",
        listed,
        "`ys` of the reference is list[Tensor], but `ys` of the operator is list[Tensor | None]",
        "ys",
        "write `ys: list[Tensor | None]`",
    ),
    "length": (
        "length(Tensor x, int[2] k) -> Tensor",
        pair,
        "`k` of the reference is tuple[int, int, int], but `k` of the operator is int | tuple[int, int]",
        "k",
        "write `k: int | tuple[int, int]`",
    ),
    "default": (
        "default(Tensor x, float by=2.) -> Tensor",
        defaulted,
        "the default of `by` is 3.0, but the default of the operator's `by` is 2.0",
        "by",
        "write `by: float = 2.0`, or leave the default out",
    ),
    "results": (
        "results(Tensor x) -> (Tensor, Tensor)",
        same,
        "the reference and the operator return different numbers of results",
        None,
        "return a tensor for one result, and a tuple of tensors for several",
    ),
    "single": (
        "single(Tensor x) -> Tensor",
        halves,
        "the reference and the operator return different numbers of results",
        None,
        "return a tensor for one result, and a tuple of tensors for several",
    ),
}
SIGNATURES = {
    quoted: "quoted(x: Tensor, m: str = 'b', when: Tensor | None = None) -> Tensor",
    two: "two(x: Tensor, y: Tensor) -> Tensor",
    moded: "moded(x: Tensor, mode: Mode) -> Tensor",
    same: "same(x: Tensor) -> Tensor",
    named: "named(x: Tensor, *, alpha: float) -> Tensor",
    scaled: "scaled(x: Tensor, by: float = 1.0) -> Tensor",
    given: "given(x: Tensor, y: Tensor) -> Tensor",
    listed: "listed(x: Tensor, ys: list[Tensor]) -> Tensor",
    pair: "pair(x: Tensor, k: tuple[int, int, int]) -> Tensor",
    defaulted: "defaulted(x: Tensor, by: float = 3.0) -> Tensor",
    bare: "bare(x, by=3, more=None)",
    halves: "halves(x: Tensor) -> tuple[Tensor, Tensor]",
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_reference_that_does_not_fit(case: str, define: Define, place: Place, says: Any) -> None:
    schema, reference, problem, argument, hint = MISMATCHES[case]
    operator = define(schema)
    at = f"  argument: {argument}\n          " if argument else "  "
    with says(
        errors.SignatureMismatchError,
        f"""
        theirs::{schema.partition("(")[0]}: {problem}
        {at}expected: theirs::{schema}
          got: {SIGNATURES[reference]}
          where: {place(reference)}
          hint: {hint}
        """,
    ):
        opsmith.adopt(operator, reference=reference)


@pytest.mark.parametrize(
    ("schema", "problem", "argument", "got", "hint"),
    [
        (
            "streams(Tensor x, Stream s) -> Tensor",
            "`s` has a type that opsmith does not support",
            "s",
            "Stream, in ",
            "use tensors, numbers, strings, dtypes, devices, layouts, generators or lists of them",
        ),
        (
            "counts(Tensor x) -> int",
            "an operator returns a tensor, or a fixed number of tensors",
            "return",
            "",
            "let it return a tensor for each result; a list of tensors can be stacked into one tensor",
        ),
        (
            "lists(Tensor x) -> Tensor[]",
            "an operator returns a tensor, or a fixed number of tensors",
            "return",
            "",
            "let it return a tensor for each result; a list of tensors can be stacked into one tensor",
        ),
    ],
    ids=["argument", "int", "list"],
)
def test_types_that_are_not_known(
    schema: str, problem: str, argument: str, got: str, hint: str, define: Define, says: Any
) -> None:
    operator = define(schema)
    with says(
        errors.UnsupportedTypeError,
        f"""
        theirs::{schema.partition("(")[0]}: {problem}
          argument: {argument}
          got: {got}theirs::{schema}
          hint: {hint}
        """,
    ):
        opsmith.adopt(operator, reference=two if argument == "s" else same)


def test_a_kernel_beside_its_own(define: Define, place: Place, says: Any) -> None:
    adopted = opsmith.adopt(define("kernels(Tensor x) -> Tensor"), reference=same)
    with says(
        errors.UsageError,
        f"""
        theirs::kernels: it was adopted with its own kernels, which cannot be replaced
          where: {place(same)}
          hint: register it with `torch.library.impl`
        """,
    ):
        adopted.kernel("cpu", torch.clone)


def test_a_fake_kernel_beside_its_own(define: Define, library: Any, place: Place, says: Any) -> None:
    operator = define("fakes(Tensor x) -> Tensor")
    library.impl("fakes", torch.empty_like, "Meta")
    adopted = opsmith.adopt(operator, reference=same)
    with says(
        errors.UsageError,
        f"""
        theirs::fakes: it was adopted with its own fake kernel, which cannot be replaced
          where: {place(same)}
          hint: correct that fake kernel
        """,
    ):
        adopted.fake(torch.empty_like)


def unread(x: Tensor) -> Tensor:
    return x


def _as_packet(operator: Any) -> Any:
    return operator


def _as_overload(operator: Any) -> Any:
    return operator.default


def _as_definition(operator: Any) -> Any:
    return torch.library.custom_op("theirs::off", unread, mutates_args=())


@pytest.mark.parametrize("form", [_as_packet, _as_overload, _as_definition], ids=lambda form: form.__name__)
def test_without_the_capability(form: Callable[[Any], Any], define: Define, says: Any) -> None:
    subject = form(None if form is _as_definition else define("off(Tensor x) -> Tensor"))
    with says(
        errors.UnsupportedTorchError,
        """
        theirs::off: it was registered elsewhere; adopting it needs the capability `library_operators`, which is off
          hint: `opsmith doctor` shows why; declare your own operator, with this operator as a kernel
        """,  # noqa: E501
    ):
        public.overloads_of(subject)
    assert public.overloads_of(unread) is None
