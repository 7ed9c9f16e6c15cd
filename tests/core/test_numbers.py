"""Numbers as arguments: one for several, ints for floats, NumPy's, sizes that a graph does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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


def declared(reference: Callable[..., Tensor]) -> Any:
    return opsmith.operator(f"numbers::{reference.__name__}")(reference)


PAIR, LIST, TUPLE, FLOATS, ANY = map(declared, (by_pair, by_list, by_tuple, by_floats, by_any_floats))
INT, FLOAT, NUMBER = map(declared, (by_int, by_float, by_number))

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
}


@pytest.mark.parametrize("known", [False, True], ids=["first call", "fast path"])
@pytest.mark.parametrize("case", VALUES)
def test_numbers_are_converted(case: str, known: bool) -> None:
    operator, value, right = VALUES[case]
    x = torch.ones(2)
    operator.forget_calls()
    for _ in range(3 * known):
        operator(x, (2, 3) if operator in (PAIR, LIST, TUPLE) else 2)
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
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_values_are_refused_as_torch_refuses_them(case: str) -> None:
    operator, value = REFUSED[case]
    with pytest.raises(errors.ArgumentError) as caught:
        operator(torch.ones(2), value)
    assert f"{operator.name}: `n` has the wrong type" in str(caught.value)
    annotation = operator.specification.schema.by_name["n"].kind.annotation()
    assert f"expected: {annotation}" in str(caught.value)
    assert f"n: {annotation}" in str(caught.value) or operator in (INT, FLOAT, NUMBER)


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
    assert compiled(torch.ones(2), value).tolist() == [right, right]
    other = type(value)([4, 5]) if isinstance(value, tuple) else value + 1
    torch.testing.assert_close(compiled(torch.ones(2), other), operator(torch.ones(2), other))
