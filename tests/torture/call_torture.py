"""Run as a program: random calls of C++ kernels beside their references, and what ten thousand calls leave.

Prints one JSON object.
"""

from __future__ import annotations

import collections
import gc
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith import errors

CALLS, LEAK_CALLS, WARM_UP = 1500, 10_000, 2000
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
PAGE = 4096


@opsmith.operator("torture::scaled")
def scaled(x: Tensor, by: float = 2.0, shift: Tensor | None = None) -> Tensor:
    result = x.double() * by
    return (result if shift is None else result + shift.double()).to(x.dtype)


scaled.kernel(
    "cpu",
    cpp="""
template <class T>
void scaled(Contiguous<const T> x, double by, std::optional<View<const T, 0>> shift, Contiguous<T> y) {
  OPSMITH_CHECK(by != 7.0, "no sevens");
  for (int64_t i = 0; i < x.numel(); i++) y[i] = T(double(x[i]) * by + (shift ? double((*shift)()) : 0.0));
}
""",
)


@opsmith.operator("torture::sums")
def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x.double() + y.double()).sum(-1).to(x.dtype), (x > y).sum(-1)


sums.kernel(
    "cpu",
    cpp="""
template <class T>
void sums(View<const T, 2> x, View<const T, 2> y, View<T, 1> total, View<int64_t, 1> larger) {
  for (int64_t i = 0; i < x.size(0); i++) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t j = 0; j < x.size(1); j++) {
      sum += double(x(i, j)) + double(y(i, j));
      count += x(i, j) > y(i, j);
    }
    total(i) = T(sum);
    larger(i) = count;
  }
}
""",
)


def sizes(draw: random.Random, dims: int) -> list[int]:
    return [draw.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(dims)]


def tensor(draw: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of small whole numbers, in a layout that is drawn."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    layout = draw.choice(("contiguous", "transposed", "gaps", "offset", "expanded"))
    if layout == "expanded" and shape:
        shape = [1, *shape[1:]]
        return made(generator, shape, dtype).expand([draw.randrange(4), *shape[1:]])
    if layout == "transposed":
        return made(generator, shape[::-1], dtype).permute(list(range(len(shape)))[::-1])
    if layout == "gaps" and shape:
        return made(generator, [*shape[:-1], 2 * shape[-1]], dtype)[..., ::2]
    if layout == "offset":
        return made(generator, [2, *shape], dtype)[1]
    return made(generator, shape, dtype)


def made(generator: torch.Generator, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def arguments(draw: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """Return an operator and what it is called with."""
    dtype = draw.choice(DTYPES)
    x = tensor(draw, sizes(draw, draw.randrange(5)), dtype)
    if draw.random() < 0.5:
        shift = tensor(draw, [], draw.choice((dtype, dtype, torch.float64)))
        return scaled, (x, float(draw.randrange(1, 10)), draw.choice((None, shift)))
    x = tensor(draw, sizes(draw, 2), dtype)
    return sums, (x, torch.flip(x, [0]) if draw.random() < 0.5 else x)


def ways(operator: Any) -> dict[str, Callable[..., Any]]:
    packet = getattr(torch.ops.torture, operator.name.partition("::")[2])
    return {
        "handle": operator,
        "packet": packet,
        "overload": packet.default,
        "gradient": lambda *args: differentiated(operator, *args),
        "vmap": lambda *args: (
            torch.func.vmap(lambda x: operator(x, *args[1:]))(args[0][None])[0]
            if operator is scaled
            else operator(*args)
        ),
    }


def differentiated(function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    if not x.is_floating_point():
        return function(x, *rest)
    x = x.detach().clone().requires_grad_()
    result = function(x, *rest)
    (gradient,) = torch.autograd.grad((result[0] if isinstance(result, tuple) else result).sum(), x)
    return gradient


def outcome(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Return the results, or the class of the error."""
    try:
        return call(*given)
    except (errors.OpsmithError, RuntimeError, TypeError) as error:
        return type(error).__name__


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return all(map(same, found, expected))
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return bool(found == expected)
    within = TOLERANCES.get(expected.dtype, 1e-6)
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and torch.allclose(found.double(), expected.double(), rtol=within, atol=within)


def calls() -> dict[str, Any]:
    """Compare random calls with the reference."""
    draw = random.Random(0)
    by: collections.Counter[str] = collections.Counter()
    wrong = []
    for number in range(CALLS):
        operator, given = arguments(draw)
        name, way = draw.choice([*ways(operator).items()])
        found = outcome(way, given)
        by_seven = operator is scaled and given[1] == 7.0
        reference = partial_reference(operator, name)
        expected = outcome(reference, given)
        by["refused" if isinstance(found, str) else name] += 1
        if not same(found, expected) and not (by_seven and found == "KernelError"):
            wrong.append(f"{number}: {operator.name} by {name}: {describe(given)}: {found}, not {expected}")
    return {"calls": CALLS, "by": by, "wrong": wrong[:10]}


def partial_reference(operator: Any, name: str) -> Callable[..., Any]:
    if name == "gradient":
        return lambda *args: differentiated(operator.reference, *args)
    reference: Callable[..., Any] = operator.reference
    return reference


def describe(given: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{each.dtype} {list(each.shape)} {each.stride()}" if isinstance(each, Tensor) else repr(each)
        for each in given
    )


def leaks() -> dict[str, Any]:
    """Call again and again: right ones, ones that raise, ones that the reference computes."""
    draw = random.Random(0)
    cases = []
    while len(cases) < 200:
        operator, given = arguments(draw)
        cases.extend((way, given) for way in ways(operator).values())
    figures = {}
    for number in range(WARM_UP + LEAK_CALLS + 1):
        if number in (WARM_UP, WARM_UP + LEAK_CALLS):
            gc.collect()
            figures[number] = len(gc.get_objects()), resident()
        way, given = cases[number % len(cases)]
        outcome(way, given)
    (objects, memory), (objects_after, memory_after) = figures.values()
    return {
        "calls": LEAK_CALLS,
        "objects": objects_after - objects,
        "kilobytes": (memory_after - memory) // 1024,
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


if __name__ == "__main__":
    modes = {each.__name__: each for each in (calls, leaks)}
    sys.stdout.write(json.dumps(modes[sys.argv[1]]()) + "\n")
