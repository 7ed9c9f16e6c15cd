"""Numbers as arguments: one for several, ints for floats, NumPy's, sizes that a graph does not know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import opsmith
from opsmith import errors


def by_pair(x: Tensor, n: int | tuple[int, int]) -> Tensor:
    return x * n[0] + n[1]  # type: ignore[index]


def by_list(x: Tensor, n: int | list[int]) -> Tensor:
    return x * n[0] + n[-1]  # type: ignore[index]


def by_tuple(x: Tensor, n: int | tuple[int, ...]) -> Tensor:
    assert isinstance(n, tuple)
    return x * n[0] + n[-1]


def by_floats(x: Tensor, n: float | tuple[float, float]) -> Tensor:
    assert all(isinstance(each, float) for each in n)  # type: ignore[union-attr]
    return x * n[0] + n[1]  # type: ignore[index]


def by_any_floats(
    x: Tensor, n: float | tuple[float, ...] | None = None, *, m: int | tuple[int, int] = 1
) -> Tensor:
    return x * (1 if n is None else n[0]) + m[1]  # type: ignore[index]


def by_int(x: Tensor, n: int) -> Tensor:
    return x * n + n


def by_float(x: Tensor, n: float) -> Tensor:
    return x * n + n


def by_number(x: Tensor, n: int | float) -> Tensor:
    return x * n + n


def by_complex(x: Tensor, n: complex) -> Tensor:
    return (x * n).imag


def by_literal(x: Tensor, n: Literal[2, 3]) -> Tensor:
    return x * n + n


def by_bool(x: Tensor, n: bool) -> Tensor:
    return x + 1 if n else x


def by_int_or_none(x: Tensor, n: int | None = None) -> Tensor:
    return x * (1 if n is None else n)


def by_float_or_none(x: Tensor, n: float | None = None) -> Tensor:
    return x * (1 if n is None else n)


def declared(reference: Callable[..., Tensor]) -> Any:
    return opsmith.operator(f"numbers::{reference.__name__}")(reference)


PAIR, LIST, TUPLE, FLOATS, ANY = map(declared, (by_pair, by_list, by_tuple, by_floats, by_any_floats))
INT, FLOAT, NUMBER, COMPLEX = map(declared, (by_int, by_float, by_number, by_complex))
LITERAL, BOOL, INT_OR_NONE, FLOAT_OR_NONE = map(
    declared, (by_literal, by_bool, by_int_or_none, by_float_or_none)
)

SCHEMAS = {
    "numbers::by_pair(Tensor x, SymInt[2] n) -> Tensor": PAIR,
    "numbers::by_list(Tensor x, SymInt[] n) -> Tensor": LIST,
    "numbers::by_floats(Tensor x, float[2] n) -> Tensor": FLOATS,
    "numbers::by_any_floats(Tensor x, float[]? n=None, *, SymInt[2] m=[1, 1]) -> Tensor": ANY,
}


@pytest.mark.parametrize("text", SCHEMAS)
def test_one_number_is_spread_before_torch_sees_it(text: str) -> None:
    assert str(SCHEMAS[text].torch_operator._schema) == text


VALUES: dict[str, tuple[Any, Any, float]] = {
    "an int for a pair": (PAIR, 3, 6.0),
    "a pair": (PAIR, (2, 3), 5.0),
    "an int64 of NumPy for a pair": (PAIR, np.int64(3), 6.0),
    "numbers of NumPy in a pair": (PAIR, (np.int32(2), 3), 5.0),
    "an array for a pair": (PAIR, np.array([2, 3]), 5.0),
    "an int for a list": (LIST, 3, 6.0),
    "an int for a tuple": (TUPLE, 3, 6.0),
    "three for a tuple": (TUPLE, (2, 5, 3), 5.0),
    "an int for floats": (FLOATS, 2, 4.0),
    "a float for floats": (FLOATS, 2.5, 5.0),
    "ints for floats": (FLOATS, (2, 3), 5.0),
    "a float32 of NumPy for floats": (FLOATS, np.float32(2.5), 5.0),
    "an int for any floats": (ANY, 2, 3.0),
    "None for any floats": (ANY, None, 2.0),
    "an int32 of NumPy for an int": (INT, np.int32(3), 6.0),
    "an int64 of NumPy for a float": (FLOAT, np.int64(3), 6.0),
    "a float64 of NumPy for a float": (FLOAT, np.float64(2.5), 5.0),
    "a float32 of NumPy for a float": (FLOAT, np.float32(2.5), 5.0),
    "an int64 of NumPy for a number": (NUMBER, np.int64(3), 6.0),
    "a float32 of NumPy for a number": (NUMBER, np.float32(2.5), 5.0),
    "a bool of NumPy for a number": (NUMBER, np.bool_(True), 2.0),
    "a bool of NumPy for a float": (FLOAT, np.bool_(True), 2.0),
    "a bool of NumPy for a bool": (BOOL, np.bool_(True), 2.0),
    "a bool for an int": (INT, True, 2.0),
    "an int for a float": (FLOAT, 3, 6.0),
    "an int8 of NumPy for an int": (INT, np.int8(3), 6.0),
    "an int8 of NumPy for a float": (FLOAT, np.int8(3), 6.0),
    "an infinity of NumPy": (FLOAT, np.float64("inf"), float("inf")),
    "an array without dimensions for an int": (INT, np.array(3), 6.0),
    "an array without dimensions for a float": (FLOAT, np.array(2.5, dtype=np.float32), 5.0),
    "float16 and int for floats": (FLOATS, (np.float16(2.5), 2), 4.5),
    "an array of float32 for floats": (FLOATS, np.array([2.5, 2], dtype=np.float32), 4.5),
    "an array of one for a list": (LIST, np.array([3]), 6.0),
    "an int16 of NumPy for an optional int": (INT_OR_NONE, np.int16(3), 3.0),
    "None for an optional int": (INT_OR_NONE, None, 1.0),
    "a float32 of NumPy for an optional float": (FLOAT_OR_NONE, np.float32(2.5), 2.5),
    "a complex64 of NumPy": (COMPLEX, np.complex64(2j), 2.0),
    "a complex number": (COMPLEX, 2j, 2.0),
    "a computed number of NumPy": (FLOAT, np.sqrt(np.float32(6.25)), 5.0),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("known", [False, True], ids=["first call", "fast path"])
@pytest.mark.parametrize("case", VALUES)
def test_numbers_are_converted(case: str, known: bool) -> None:
    operator, value, right = VALUES[case]
    x = torch.ones(2)
    operator.forget_calls()
    for _ in range(3 * known):
        operator(x, (2, 3) if operator in (PAIR, LIST, TUPLE) else operator is BOOL or 2)
    assert operator(x, value).tolist() == operator(x, n=value).tolist() == [right, right]
    assert torch.vmap(lambda x: operator(x, value))(x).tolist() == [right, right]
    assert operator.explain(x, value).forward.startswith("reference")


REFUSED = {
    "a float32 of NumPy for an int": (INT, np.float32(2.5)),
    "a bool of NumPy for an int": (INT, np.bool_(True)),
    "a float for an int": (INT, 2.5),
    "a float64 of NumPy for a pair": (PAIR, np.float64(2.0)),
    "a tensor for an int": (INT, torch.tensor(3)),
    "a text for a float": (FLOAT, "2.5"),
    "a text for floats": (FLOATS, "25"),
    "three for a pair": (PAIR, (1, 2, 3)),
    "a complex number of NumPy": (NUMBER, np.complex64(2)),
    "a complex number of NumPy for a float": (FLOAT, np.complex64(2j)),
    "a complex number of NumPy for floats": (FLOATS, (np.complex128(2j), 1)),
    "a float32 of NumPy for a literal": (LITERAL, np.float32(2.5)),
    "a tensor for a float": (FLOAT, torch.tensor(2.5)),
    "a tensor with a gradient for a float": (FLOAT, torch.tensor(2.5, requires_grad=True)),
    "a tensor for a number": (NUMBER, torch.tensor(2.5)),
    "a tensor for a complex number": (COMPLEX, torch.tensor(2j)),
    "a tensor for a bool": (BOOL, torch.tensor(True)),
    "a tensor for a literal": (LITERAL, torch.tensor(2)),
    "a tensor for an optional int": (INT_OR_NONE, torch.tensor(2)),
    "a tensor for a pair": (PAIR, torch.tensor([2, 3])),
    "a tensor for one of a pair": (PAIR, torch.tensor(2)),
    "a tensor in a pair": (PAIR, (torch.tensor(2), 3)),
    "a tensor for a list": (LIST, torch.tensor([3])),
    "a tensor in floats": (FLOATS, [2.0, torch.tensor(3.0)]),
    "a function of NumPy": (INT, np.sin),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_values_are_refused_as_torch_refuses_them(case: str) -> None:
    operator, value = REFUSED[case]
    with pytest.raises(errors.ArgumentError) as caught:
        operator(torch.ones(2), value)
    assert f"{operator.name}: `n` has the wrong type" in str(caught.value)
    annotation = operator.specification.schema.by_name["n"].kind.annotation()
    assert f"expected: {annotation}" in str(caught.value)
    assert f"expected: {annotation}" in str(caught.value) or operator in (
        *(INT, FLOAT, NUMBER, COMPLEX, BOOL, LITERAL),
        INT_OR_NONE,
    )


def called(operator: Any, value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: operator(x, value)


class Called(torch.nn.Module):
    """A model that calls an operator with a number."""

    def __init__(self, operator: Any, value: Any) -> None:
        super().__init__()
        self.operator, self.value = operator, value

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.operator(x, self.value)
        return result


def compiled(operator: Any, value: Any) -> Tensor:
    torch.compiler.reset()
    result: Tensor = torch.compile(operator, backend="eager", fullgraph=True)(torch.ones(2), value)
    return result


def exported(operator: Any, value: Any, strict: bool = False) -> Tensor:
    program = torch.export.export(Called(operator, value), (torch.ones(2),), strict=strict)
    result: Tensor = program.module()(torch.ones(2))
    return result


def traced(operator: Any, value: Any) -> Tensor:
    result: Tensor = make_fx(called(operator, value))(torch.ones(2))(torch.ones(2))
    return result


EXECUTORS = [exported, traced]


@pytest.mark.every(8)
@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", VALUES)
def test_numbers_are_the_same_in_every_executor(case: str, executor: Any) -> None:
    operator, value, right = VALUES[case]
    assert executor(operator, value).tolist() == [right, right]


@pytest.mark.every(8)
@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", REFUSED)
def test_other_values_are_refused_in_every_executor(case: str, executor: Any) -> None:
    operator, value = REFUSED[case]
    with pytest.raises(errors.ArgumentError, match=f"{operator.name}: `n` has the wrong type"):
        executor(operator, value)


@pytest.mark.every(4)
@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize(
    "case",
    [case for case in REFUSED if "complex number of NumPy" not in case and "for a literal" not in case],
)
def test_one_graph_refuses_other_values_with_the_text_of_the_error(case: str) -> None:
    operator, value = REFUSED[case]
    annotation = operator.specification.schema.by_name["n"].kind.annotation()
    with pytest.raises(Exception, match=f"{operator.name}: `n` has the wrong type") as caught:
        compiled(operator, value)
    assert f"expected: {annotation}" in str(caught.value)
    assert f"hint: call it as `opsmith.find_operator('{operator.name}')(" in str(caught.value)


UNKNOWN = [
    case
    for case, (operator, value, _) in VALUES.items()
    if operator in (FLOAT, FLOATS, FLOAT_OR_NONE, COMPLEX, BOOL, LITERAL) or "bool of NumPy" in case
    if str(getattr(value, "dtype", "")) in ("float32", "bool", "int8") or "inf" in case or "float16" in case
]
"""Cases whose value torch does not know while it compiles."""


@functools.cache
def each_trace_is_an_export() -> bool:
    """Return True if torch takes all that it compiles for an export, as 2.11 does."""
    asked = torch.compile(lambda x: (x, torch.compiler.is_exporting()), backend="eager", fullgraph=True)
    return bool(asked(torch.ones(1))[1])


def of_numpy(value: Any) -> bool:
    parts = value if isinstance(value, tuple | list) else [value]
    return any(type(each).__module__ == "numpy" for each in parts)


def refused_as_unknown(executor: Any, operator: Any, value: Any) -> None:
    with pytest.raises(Exception, match=f"{operator.name}: torch does not know the value") as caught:
        executor(operator, value)
    assert "hint: convert it before compiled code runs, as `float(n)` does" in str(caught.value)


@pytest.mark.every(4)
@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("case", UNKNOWN)
def test_a_number_that_torch_does_not_know_is_refused_in_one_graph(case: str) -> None:
    """The hint helps: a number of Python."""
    operator, value, right = VALUES[case]
    for executor in (compiled, lambda *call: exported(*call, strict=True)):
        refused_as_unknown(executor, operator, value)
        known = tuple(map(float, value)) if isinstance(value, tuple) else value.tolist()
        assert executor(operator, known).tolist() == [right, right]


@pytest.mark.every(4)
@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("case", sorted({*VALUES} - {*UNKNOWN, "a complex64 of NumPy"}))
def test_numbers_are_the_same_in_one_graph(case: str) -> None:
    operator, value, right = VALUES[case]
    if of_numpy(value) and each_trace_is_an_export():
        refused_as_unknown(compiled, operator, value)
        return
    assert compiled(operator, value).tolist() == [right, right]


@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("case", ["an int64 of NumPy for a pair", "an int32 of NumPy for an int"])
def test_a_strict_export_takes_no_numbers_of_numpy(case: str) -> None:
    """torch exports a program that computes with 7777777 in their place."""
    operator, value, _ = VALUES[case]
    with pytest.raises(Exception, match=f"{operator.name}: torch does not know the value"):
        exported(operator, value, strict=True)


GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "a size for a pair": lambda x: PAIR(x, x.shape[0]),
    "a size in a pair": lambda x: PAIR(x, (x.shape[0], 3)),
    "a size for a tuple": lambda x: TUPLE(x, x.shape[0]),
    "a size in a list": lambda x: LIST(x, n=[x.shape[0], x.shape[0]]),
    "an int for floats": lambda x: FLOATS(x, 2),
    "sizes by name": lambda x: ANY(x, n=2, m=x.shape[0]),
    "None": lambda x: ANY(x, None, m=(x.shape[0], 4)),
    "an int": lambda x: INT(x, x.shape[0]),
}


@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("case", GRAPHS)
def test_one_graph_serves_all_sizes(case: str) -> None:
    """Eager calls come between: they change what later ones go by, and no graph."""
    torch.compiler.reset()
    graphs: list[Any] = []
    compiled = torch.compile(
        GRAPHS[case],
        dynamic=True,
        fullgraph=True,
        backend=lambda graph, _: (graphs.append(graph), graph)[1],  # type: ignore[func-returns-value]
    )
    for operator in (PAIR, LIST, TUPLE, FLOATS, ANY, INT):
        operator.forget_calls()
    for size in (3, 4, 7):
        x = torch.ones(size)
        torch.testing.assert_close(compiled(x), GRAPHS[case](x))
    assert len(graphs) == 1


@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize("case", GRAPHS)
def test_an_exported_program_takes_all_sizes(case: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return GRAPHS[case](x)

    program = torch.export.export(
        Model(), (torch.ones(3),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}}
    )
    for size in (3, 5):
        torch.testing.assert_close(program.module()(torch.ones(size)), GRAPHS[case](torch.ones(size)))


@pytest.mark.xdist_group("numbers")
@pytest.mark.parametrize(
    "case",
    [
        "an int64 of NumPy for a pair",
        "numbers of NumPy in a pair",
        "an array for a pair",
        "an int32 of NumPy for an int",
        "a float64 of NumPy for a float",
        "an int64 of NumPy for a number",
    ],
)
def test_compiled_code_takes_numbers_of_numpy(case: str) -> None:
    operator, value, right = VALUES[case]
    torch.compiler.reset()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    if each_trace_is_an_export():
        refused_as_unknown(lambda _, n: compiled(torch.ones(2), n), operator, value)
        return
    assert compiled(torch.ones(2), value).tolist() == [right, right]
    other = type(value)([4, 5]) if isinstance(value, tuple) else value + 1
    torch.testing.assert_close(compiled(torch.ones(2), other), operator(torch.ones(2), other))
