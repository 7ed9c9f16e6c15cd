"""Messages of calls that are wrong, and of references that do not keep their contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors

Place = Callable[[Callable[..., Any]], str]


def scaled(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor:
    return x * by + shift


CALL = "call it as `operator(x, by=2.0, shift=0)`"


@pytest.mark.parametrize(
    ("args", "kwargs", "problem", "details"),
    [
        pytest.param(
            (), {}, "`x` is missing", ["argument: x", "expected: Tensor", "got: nothing"], id="missing"
        ),
        pytest.param(
            ([1.0, 2.0],),
            {},
            "`x` has the wrong type",
            ["argument: x", "expected: Tensor", "got: list [1.0, 2.0]"],
            id="list-for-tensor",
        ),
        pytest.param(
            (np.ones(2),),
            {},
            "`x` has the wrong type",
            ["argument: x", "expected: Tensor", "got: ndarray array([1., 1.])"],
            id="array-for-tensor",
        ),
        pytest.param(
            (None,),
            {},
            "`x` has the wrong type",
            ["argument: x", "expected: Tensor", "got: None"],
            id="none-for-tensor",
        ),
        pytest.param(
            (torch.ones(2), "twice"),
            {},
            "`by` has the wrong type",
            ["argument: by", "expected: float", "got: str 'twice'"],
            id="str-for-float",
        ),
        pytest.param(
            (torch.ones(2), torch.ones(2)),
            {},
            "`by` has the wrong type",
            ["argument: by", "expected: float", "got: Tensor of torch.float32, shape [2]"],
            id="tensor-for-float",
        ),
        pytest.param(
            (torch.ones(2), 10**400),
            {},
            "`by` is a number that torch cannot store",
            ["argument: by", "expected: a float of 64 bits", f"got: int 1{'0' * 56}..."],
            id="beyond-float",
        ),
        pytest.param(
            (torch.ones(2),),
            {"shift": -(2**63) - 1},
            "`shift` is a number that torch cannot store",
            ["argument: shift", "expected: an int of 64 bits", "got: int -9223372036854775809"],
            id="beyond-int",
        ),
        pytest.param(
            (torch.ones(2),),
            {"shift": 1.5},
            "`shift` has the wrong type",
            ["argument: shift", "expected: int", "got: float 1.5"],
            id="float-for-int",
        ),
        pytest.param(
            (torch.ones(2),),
            {"shift": None},
            "`shift` has the wrong type",
            ["argument: shift", "expected: int", "got: None"],
            id="none-for-int",
        ),
        pytest.param(
            (torch.ones(2),),
            {"scale": 1.0},
            "it has no argument `scale`",
            ["argument: scale", "expected: one of `x`, `by`, `shift`"],
            id="unknown",
        ),
        pytest.param(
            (torch.ones(2), 1.0, 2),
            {},
            "it takes 2 positional arguments, but 3 were given",
            [],
            id="too-many",
        ),
        pytest.param(
            (torch.ones(2),), {"x": torch.ones(2)}, "`x` is given twice", ["argument: x"], id="twice"
        ),
    ],
)
def test_arguments_that_do_not_fit(
    args: Any, kwargs: Any, problem: str, details: list[str], name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(scaled)
    lines = [
        f"{name}: {problem}",
        *(f"  {detail}" for detail in details),
        f"  where: {place(scaled)}",
        f"  hint: {CALL}",
    ]
    with says(errors.ArgumentError, "\n".join(lines)):
        operator(*args, **kwargs)
    with says(errors.ArgumentError, "\n".join(lines)):
        operator.explain(*args, **kwargs)


@pytest.mark.parametrize("kwargs", [{"by": 10**400}, {"shift": 2**63}, {"size": (1, 2**63)}], ids=str)
def test_numbers_that_torch_cannot_hold_after_the_first_calls(kwargs: Any, name: str) -> None:
    def resized(x: Tensor, by: float = 1.0, shift: int = 0, size: tuple[int, int] = (1, 1)) -> Tensor:
        return x * by + shift

    operator = opsmith.operator(name)(resized)
    for _ in range(3):
        operator(torch.ones(2), 2, 3, (1, 2))
    (argument,) = kwargs
    with pytest.raises(errors.ArgumentError, match=f"`{argument}` is a number that torch cannot store"):
        operator(torch.ones(2), **kwargs)


def test_a_number_for_a_bool_is_not_what_is_wrong(name: str) -> None:
    def flagged(x: Tensor, on: bool, by: float = 2.0) -> Tensor:
        return x * by if on else x.clone()

    operator = opsmith.operator(name)(flagged)
    assert operator(torch.ones(2), 1).tolist() == [2.0, 2.0]  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="`by` has the wrong type"):
        operator(torch.ones(2), 1, "a")  # type: ignore[arg-type]


def test_an_argument_that_comes_twice_after_the_first_call(name: str) -> None:
    operator = opsmith.operator(name)(scaled)
    operator(torch.ones(2))
    with pytest.raises(errors.ArgumentError, match="`x` is given twice"):
        operator(torch.ones(2), x=torch.ones(2))


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0), torch.tensor(2.0, requires_grad=True)], ids=["", "differentiated"]
)
def test_tensor_where_torch_would_take_it_for_a_number(
    value: Tensor, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.ArgumentError,
        f"""
        {name}: `by` has the wrong type
          argument: by
          expected: float
          got: Tensor of torch.float32, shape []
          where: {place(scaled)}
          hint: {CALL}
        """,
    ):
        operator(torch.ones(2), value)  # type: ignore[arg-type]


def pooled(x: Tensor, size: int | tuple[int, int] = 2, scale: float | tuple[float, float] = 1.0) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("kwargs", "expected", "got"),
    [
        pytest.param({"size": (1, 2, 3)}, "int | tuple[int, int]", "tuple (1, 2, 3)", id="too-long"),
        pytest.param({"size": ()}, "int | tuple[int, int]", "tuple ()", id="empty"),
        pytest.param({"size": (1.5, 2)}, "int | tuple[int, int]", "tuple (1.5, 2)", id="float-in-it"),
        pytest.param({"size": "same"}, "int | tuple[int, int]", "str 'same'", id="str"),
        pytest.param({"scale": "1"}, "float | tuple[float, float]", "str '1'", id="str-for-float"),
    ],
)
def test_pair_of_the_wrong_length_or_type(
    kwargs: Any, expected: str, got: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(pooled)
    argument = next(iter(kwargs))
    with says(
        errors.ArgumentError,
        f"""
        {name}: `{argument}` has the wrong type
          argument: {argument}
          expected: {expected}
          got: {got}
          where: {place(pooled)}
          hint: call it as `operator(x, size=2, scale=1.0)`
        """,
    ):
        operator(torch.ones(2), **kwargs)


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


@pytest.mark.parametrize(
    ("xs", "got"),
    [
        pytest.param(torch.ones(2), "Tensor of torch.float32, shape [2]", id="tensor"),
        pytest.param([torch.ones(2), 1.0], "list of Tensor, float", id="number-in-it"),
        pytest.param([torch.ones(2), None], "list of NoneType, Tensor", id="none-in-it"),
    ],
)
def test_list_of_tensors_with_something_else(xs: Any, got: str, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(total)
    with says(
        errors.ArgumentError,
        f"""
        {name}: `xs` has the wrong type
          argument: xs
          expected: list[Tensor]
          got: {got}
          where: {place(total)}
          hint: call it as `operator(xs)`
        """,
    ):
        operator(xs)


def test_long_values_are_cut_short(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled)
    with says(
        errors.ArgumentError,
        f"""
        {name}: `by` has the wrong type
          argument: by
          expected: float
          got: str '{"a" * 56}...
          where: {place(scaled)}
          hint: {CALL}
        """,
    ):
        operator(torch.ones(2), "a" * 100)  # type: ignore[arg-type]


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


DENSE, DEQUANTIZE = "call it with `x.to_dense()`", "call it with `x.dequantize()`"
PADDED = "call it with `torch.nested.to_padded_tensor(x, 0.0)`"


@pytest.mark.parametrize(
    ("make", "got", "hint"),
    [
        pytest.param(lambda: torch.eye(2).to_sparse(), "torch.sparse_coo", DENSE, id="coo"),
        pytest.param(lambda: torch.eye(2).to_sparse_csr(), "torch.sparse_csr", DENSE, id="csr"),
        pytest.param(lambda: torch.eye(2).to_sparse_csc(), "torch.sparse_csc", DENSE, id="csc"),
        pytest.param(lambda: torch.ones(2).to_mkldnn(), "torch._mkldnn", DENSE, id="mkldnn"),
        pytest.param(nested, "a nested tensor", PADDED, id="nested"),
        pytest.param(quantised, "a quantised tensor", DEQUANTIZE, id="quantised"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|quantize|nested|Quantized).*")
@pytest.mark.parametrize("gradients", ["ordinary", "formula"])
def test_tensor_that_is_not_strided_and_dense(
    make: Any, got: str, hint: str, gradients: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(scaled)
    if gradients == "formula":
        operator.gradients(x=lambda grad, by: grad * by)
    with says(
        errors.LayoutError,
        f"""
        {name}: it takes only strided dense tensors
          argument: x
          expected: torch.strided
          got: {got}
          where: {place(scaled)}
          hint: {hint}
        """,
    ):
        operator(make())


def test_sparse_tensor_in_a_list(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(total)
    with says(
        errors.LayoutError,
        f"""
        {name}: it takes only strided dense tensors
          argument: xs[1]
          expected: torch.strided
          got: torch.sparse_coo
          where: {place(total)}
          hint: call it with `xs[1].to_dense()`
        """,
    ):
        operator([torch.eye(2), torch.eye(2).to_sparse()])


Reference = Callable[[Tensor], Any]


def writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def writes_through_a_view(x: Tensor) -> Tensor:
    x.view(-1)[0] = 0
    return x * 2


def own(x: Tensor) -> Tensor:
    return x


def view(x: Tensor) -> Tensor:
    return x.view(-1)


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


@pytest.mark.parametrize("differentiated", [False, True], ids=["plain", "differentiated"])
@pytest.mark.parametrize("reference", [writes, writes_through_a_view], ids=lambda f: f.__name__)
def test_reference_that_writes_into_its_input(
    reference: Reference, differentiated: bool, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(reference)
    x = torch.ones(2, requires_grad=differentiated) * 1  # no leaf, into which torch itself lets no one write
    with says(
        errors.MutationError,
        f"""
        {name}: an operator must not write into an input that it does not declare as written
          argument: x
          where: {place(reference)}
          hint: declare it, `mutates=("x",)`; or work on a copy: `x = x.clone()`
        """,
    ):
        operator(x)


def test_kernel_that_writes_into_its_input(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(scaled).kernel("cpu", writes_as_kernel)
    with says(
        errors.MutationError,
        f"""
        {name}: an operator must not write into an input that it does not declare as written
          argument: x
          where: {place(writes_as_kernel)}
          hint: declare it, `mutates=("x",)`; or work on a copy: `x = x.clone()`
        """,
    ):
        operator(torch.ones(2))


def writes_as_kernel(x: Tensor, by: float, *, shift: int) -> Tensor:
    return x.mul_(by).add(shift)


@pytest.mark.parametrize("differentiated", [False, True], ids=["plain", "differentiated"])
@pytest.mark.parametrize(
    ("reference", "what"),
    [
        (own, "is its input `x`"),
        (contiguous, "is its input `x`"),
        (view, "shares memory with its input `x`"),
    ],
    ids=["input", "contiguous", "view"],
)
def test_reference_that_returns_its_input_or_a_view(
    reference: Reference, what: str, differentiated: bool, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(reference)
    with says(
        errors.AliasError,
        f"""
        {name}: `result` {what}
          argument: x
          expected: a new tensor
          where: {place(reference)}
          hint: return a copy: `.clone()`
        """,
    ):
        operator(torch.ones(2, requires_grad=differentiated))


def test_reference_that_returns_an_item_of_its_list(name: str, place: Place, says: Any) -> None:
    def first(xs: list[Tensor]) -> Tensor:
        return xs[0]

    operator = opsmith.operator(name)(first)
    with says(
        errors.AliasError,
        f"""
        {name}: `result` is its input `xs[0]`
          argument: xs[0]
          expected: a new tensor
          where: {place(first)}
          hint: return a copy: `.clone()`
        """,
    ):
        operator([torch.ones(2), torch.ones(2)])


def test_results_that_share_memory(name: str, place: Place, says: Any) -> None:
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled[:1], doubled[1:]

    operator = opsmith.operator(name, results=("head", "tail"))(split)
    with says(
        errors.AliasError,
        f"""
        {name}: `tail` shares memory with `head`
          argument: tail
          expected: a new tensor
          where: {place(split)}
          hint: return a copy of one of them: `.clone()`
        """,
    ):
        operator(torch.ones(2))


def three(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x + 2, x + 3  # type: ignore[return-value]


def one(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("reference", "got"), [(three, "3"), (one, "Tensor of torch.float32, shape [2]")], ids=["three", "one"]
)
def test_wrong_number_of_results(reference: Any, got: str, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(reference)
    with says(
        errors.ResultCountError,
        f"""
        {name}: the number of its results differs from the declared number
          expected: a tuple of 2 tensors
          got: {got}
          where: {place(reference)}
          hint: return the declared results, or change the type hint
        """,
    ):
        operator(torch.ones(2))


def as_array(x: Tensor) -> Tensor:
    return x.numpy() * 2  # type: ignore[return-value]


def nothing(x: Tensor) -> Tensor:
    return None  # type: ignore[return-value]


def both(x: Tensor) -> Tensor:
    return x + 1, x + 2  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("reference", "got", "hint"),
    [
        pytest.param(
            as_array,
            "ndarray array([2., 2.], dtype=float32)",
            "convert it, for example with `torch.as_tensor(...)` or `torch.from_numpy(...)`",
            id="array",
        ),
        pytest.param(
            nothing,
            "None",
            "return the result; annotate it as `Tensor | None` if it may be None",
            id="none",
        ),
        pytest.param(
            both,
            "tuple of Tensor",
            "annotate `-> tuple[Tensor, Tensor]`, or return one tensor",
            id="tuple",
        ),
    ],
)
def test_result_that_is_no_tensor(
    reference: Any, got: str, hint: str, name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name)(reference)
    with says(
        errors.ResultTypeError,
        f"""
        {name}: `result` is not a tensor
          argument: result
          expected: Tensor
          got: {got}
          where: {place(reference)}
          hint: {hint}
        """,
    ):
        operator(torch.ones(2))


def test_sparse_result(name: str, place: Place, says: Any) -> None:
    def sparse(x: Tensor) -> Tensor:
        return x.to_sparse()

    operator = opsmith.operator(name)(sparse)
    with says(
        errors.LayoutError,
        f"""
        {name}: `result` is not a strided dense tensor
          argument: result
          expected: torch.strided
          got: torch.sparse_coo
          where: {place(sparse)}
          hint: return `result.to_dense()`
        """,
    ):
        operator(torch.eye(2))


captured_weight = torch.ones(2, requires_grad=True)


def uses_a_global(x: Tensor) -> Tensor:
    return x * captured_weight


@pytest.mark.parametrize("gradient", [False, True], ids=["constant", "differentiated"])
def test_global_tensor_that_requires_a_gradient(gradient: bool, name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name)(uses_a_global)
    with says(
        errors.CapturedTensorError,
        f"""
        {name}: it uses `captured_weight`, which requires a gradient but is not an argument
          argument: captured_weight
          expected: a function that uses only its arguments
          got: Tensor
          where: {place(uses_a_global)}
          hint: make it an argument, `captured_weight: Tensor`, or compute `captured_weight.detach()` outside
        """,
    ):
        operator(torch.ones(2, requires_grad=gradient))


def test_module_in_the_closure(name: str) -> None:
    layer = torch.nn.Linear(2, 2)

    def through(x: Tensor) -> Tensor:
        return layer(x)

    with pytest.raises(errors.CapturedTensorError, match="it uses `layer`"):
        opsmith.operator(name)(through)(torch.ones(1, 2))


def test_constant_tensors_may_be_captured(name: str) -> None:
    table = torch.arange(3.0)

    def looked_up(x: Tensor) -> Tensor:
        return table[x]

    torch.testing.assert_close(opsmith.operator(name)(looked_up)(torch.tensor([2])), torch.tensor([2.0]))


def test_nondeterministic_operator_where_torch_must_be_deterministic(
    name: str, place: Place, says: Any
) -> None:
    operator = opsmith.operator(name, deterministic=False)(scaled)
    torch.use_deterministic_algorithms(True)
    try:
        with says(
            errors.NondeterministicError,
            f"""
            {name}: it is declared with `deterministic=False`, and torch.use_deterministic_algorithms(True) is in force
              where: {place(scaled)}
              hint: allow it, `torch.use_deterministic_algorithms(True, warn_only=True)`, or compute with `operator.reference`
            """,  # noqa: E501
        ):
            operator(torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


def resizes(x: Tensor) -> None:
    x.resize_(3).zero_()


def test_reference_that_gives_what_it_writes_another_shape(name: str, place: Place, says: Any) -> None:
    operator = opsmith.operator(name, mutates=["x"])(resizes)
    with says(
        errors.MetadataError,
        f"""
        {name}: it changed the shape, strides or memory of `x`
          argument: x
          expected: new numbers in the same memory
          got: shape [3], strides [1] after the call
          where: {place(resizes)}
          hint: write `x.copy_(...)`; return a new tensor for a result of a different shape
        """,
    ):
        operator(torch.ones(2))


def test_a_look_at_variables_leaves_those_that_a_caller_holds() -> None:
    operator, values = opsmith.operator("calling::held")(scaled), locals()
    with pytest.raises(errors.ArgumentError):
        operator()
    assert values["operator"] is operator


def test_a_text_that_torch_cannot_hold() -> None:
    @opsmith.operator("calling::of_text")
    def of_text(x: Tensor, mode: str = "a") -> Tensor:
        return x.clone()

    with pytest.raises(errors.ArgumentError, match="`mode` is a string that torch cannot store") as caught:
        of_text(torch.ones(1), "\ud800")
    assert (caught.value.argument, caught.value.got) == ("mode", r"str '\ud800'")
