"""Launch expressions in C++ have the values that Python computes."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from opsmith import errors
from opsmith.build.toolchain import find_toolchain
from opsmith.kernels.cpp.compiler import HEADER
from opsmith.kernels.cuda.launch import LaunchRule, launch_rule
from opsmith.kernels.runtime import library as runtime
from opsmith.kernels.runtime import served
from opsmith.kernels.serving.expressions import rule_in_cpp

NAMES = {
    "x": torch.empty(6, 5, device="meta"),
    "n": 7,
    "half": 2.5,
    "some": [3, 4, 5],
    "none": None,
    "yes": True,
    "text": "text",
    "a": 0.0,
    "b": 0.0,
}
PARTS = (
    "x.numel",
    "x.shape[0]",
    "x.shape[-1]",
    "n",
    "half",
    "len(some)",
    "some[1]",
    "yes",
    "3",
    "0",
    "-2",
    "len(x)",
)
NUMBERS = (0, 1, -3, 7, 2**53 + 1, 2**62 - 1, 0.1, 1e-6, -0.3, 2.5, 9007199254740993.0, 4e15, -0.0)
"""Each is `a` and `b` in turn, with NaN and the infinite ones."""
EVERY = (*NUMBERS, math.nan, math.inf, -math.inf)
OF_TWO = (
    *(f"a {op} b" for op in ("+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=")),
    *("max(a, b)", "min(a, b)", "-a", "not a", "1 if a else 2", "floor(a)", "ceil(a)", "floor(a // b)"),
    *(
        "ceil(a / b)",
        "floor(a / b * 3)",
        "floor(a * b + a)",
        "a / 3 < b / 7",
        "a / 3 + b",
        "a / 11 + b",
        "a / 13 + b",
        "a / 7 == b / 7",
    ),
)
REASONS = {
    "n / (n - 7)": "it divides by zero",
    "half // (half - half)": "it divides by zero",
    "half % 0": "it divides by zero",
    "1 / (half - half)": "it divides by zero",
    "none + 1": "a part of it is not a number",
    "n[0]": "it indexes a value that has no items",
    "some[half]": "an index in it is not a whole number",
    "some[3]": "an index in it is out of range: there are 3",
    "none.numel": "a part of it must be a tensor",
    "min(())": "the least or the largest of nothing",
    "text": "it names a text",
    "half": "a value of it is not a whole number",
}
"""Expressions without a value, and what C++ says."""
LIMITS = {
    "x == 1": "it compares a tensor",
    "n is 3": "one side of `is` must be None",
    "1 if x else 2": "it takes a tensor for a condition",
    "floor(half * 10000000000 * 10000000000 * 10000000000 * 10000000000)": "a number in it exceeds 126 bits",
    "n * 4611686018427387904 * 4611686018427387904": "a number in it exceeds 126 bits",
    "n * 4611686018427387904": "a number in it exceeds 64 bits",
}
"""Those that have a value in Python, or that Python refuses with an error of torch."""

PROGRAM = """
#include <cstdio>

#include "expression.h"
using namespace opsmith;

int64_t sizes[] = {6, 5}, strides[] = {5, 1}, items[] = {3, 4, 5};
Value values[9];
int32_t dtypes[] = {6, -1, -1, -1, -1, -1, -1, -1, -1};
Signed signature = {{TENSOR, false, false}, {INTEGER, false, false}, {NUMBER, false, false},
                    {INTEGERS, false, false}, {INTEGER, true, false}, {FLAG, false, false},
                    {-1, false, false}, {NUMBER, false, false}, {NUMBER, false, false}};
const Scope scope{signature, values, dtypes, 9};

struct Number { bool is_whole; int64_t integer; double real; };
const Number numbers[] = {@numbers@};
const Rule rules[] = {@rules@}, of_two[] = {@of_two@};

void give(size_t at, const Number& number) {
  signature[at].type = number.is_whole ? INTEGER : NUMBER;
  number.is_whole ? void(values[at].integer = number.integer) : void(values[at].number = number.real);
}

std::string digits(Wide value) {
  std::string text;
  for (Wide rest = value < 0 ? -value : value; rest || text.empty(); rest /= 10)
    text.insert(text.begin(), char('0' + int(rest % 10)));
  return (value < 0 ? "-" : "") + text;
}

std::string shown(const Term& term) {
  char text[64];
  if (term.kind == Term::FRACTION) return digits(term.over) + "/" + digits(term.under);
  std::snprintf(text, sizeof text, "%a", approximate(term));
  return text;
}

template <class Compute>
void print(Compute compute) {
  std::string line;
  try {
    line = compute();
  } catch (const NoValue& error) {
    line = "none: " + error.text;
  }
  std::puts(line.c_str());
}

int main() {
  for (Value& each : values) each.given = true;
  values[0].tensor = {nullptr, sizes, strides, 2};
  values[1].integer = 7, values[2].number = 2.5, values[3].list = {items, 3};
  values[4].given = false, values[5].flag = true;
  for (Rule rule : rules)
    print([&] {
      std::string line;
      for (int64_t each : whole_numbers(rule, scope))
        line += (line.empty() ? "" : " ") + std::to_string(each);
      return line;
    });
  for (Rule rule : of_two)
    for (const Number& a : numbers)
      for (const Number& b : numbers) {
        give(7, a), give(8, b);
        print([&] { return shown(values_of(rule, scope)[0]); });
      }
}
"""


def expressions() -> list[str]:
    """Launch expressions of all parts of the language, with those that have no value."""
    choose = random.Random(0)
    binary = [
        f"{a} {op} {b}" for op in ("+", "-", "*", "/", "//", "%") for a, b in itertools.product(PARTS, PARTS)
    ]
    compared = [
        f"{a} {op} {b}"
        for op in ("<", "<=", ">", ">=", "==", "!=")
        for a, b in zip(PARTS, PARTS[::-1], strict=True)
    ]
    some = choose.sample(binary, 60)
    return [
        *PARTS,
        *binary[::3],
        *(f"ceil(({each}))" for each in some),
        *(f"floor(-({each}))" for each in some[:20]),
        *(f"({each}) // 2" for each in some[:20]),
        *(f"({a}) if ({b}) else ({a}, 1)" for a, b in zip(some, compared, strict=False)),
        *(f"max({', '.join(choose.sample(PARTS, 3))})" for _ in range(8)),
        *("min(some)", "max(x.shape)", "x.dim", "x.itemsize", "not none", "not some", "none is None"),
        *("some is not None", "none == 0", "some[3]", "none + 1", "none.numel", "x", "some"),
        *("x.shape", "(1, n, 2 * n)", "x.shape[n]", "1 if none is None else none", "min(n, none)"),
    ]


def rule_of(text: str) -> LaunchRule:
    return launch_rule("grid", text, "demo::f", list(NAMES), 3)


def value_of(text: str) -> str:
    """The whole numbers of an expression."""
    try:
        return " ".join(map(str, rule_of(text).value(NAMES)))
    except (errors.LaunchError, TypeError):
        return "none"


def exact_value(rule: LaunchRule, a: float, b: float) -> str:
    try:
        (found,) = rule.found({"a": a, "b": b})
    except errors.LaunchError:
        return "none"
    return (
        repr(found) if isinstance(found, float) else "{0.numerator}/{0.denominator}".format(Fraction(found))
    )


def numbers_in_cpp() -> str:
    texts = [
        f"{{true, {each}, 0}}" if isinstance(each, int) else f"{{false, 0, {each!r}}}" for each in NUMBERS
    ]
    return ", ".join([*texts, "{false, 0, NAN}", "{false, 0, INFINITY}", "{false, 0, -INFINITY}"])


def computed(listed: Sequence[str], of_two: Sequence[str], folder: Path) -> list[str]:
    """What C++ prints: the whole numbers of each expression; then the values of those of two numbers."""
    places = {name: at for at, name in enumerate(NAMES)}

    def functions(texts: Sequence[str]) -> str:
        head = "[](const Scope& scope, std::vector<Term>& parts) { (void)scope; "
        return ",\n".join(f"{head}{rule_in_cpp(rule_of(each), places)} }}" for each in texts)

    program = PROGRAM.replace("@numbers@", numbers_in_cpp())
    program = program.replace("@rules@", functions(listed)).replace("@of_two@", functions(of_two))
    (folder / "main.cpp").write_text(program)
    folders = [f"-I{each}" for each in (served._CUDA, HEADER.parent, runtime.HERE)]
    done = find_toolchain().run(["-std=c++17", "-O0", *folders, "main.cpp", "-o", "main"], folder)
    assert done.status == 0, done.printed
    return subprocess.run([folder / "main"], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return computed([*some_expressions(13), *REASONS, *LIMITS], OF_TWO, tmp_path_factory.mktemp("program"))


def some_expressions(step: int) -> list[str]:
    return list(dict.fromkeys(expressions()))[::step]


def refuse_differences(listed: Sequence[str], printed: Sequence[str]) -> None:
    found = {text: line.partition(":")[0] for text, line in zip(listed, printed, strict=True)}
    assert found == {each: value_of(each) for each in listed}
    assert 0.1 < list(found.values()).count("none") / len(found) < 0.7


def test_expressions_have_the_values_that_python_computes(lines: list[str]) -> None:
    listed = some_expressions(13)
    refuse_differences(listed, lines[: len(listed)])


@pytest.mark.slow
def test_every_expression_has_the_value_that_python_computes(tmp_path: Path) -> None:
    listed = some_expressions(1)
    refuse_differences(listed, computed(listed, ["a"], tmp_path)[: len(listed)])


@pytest.mark.parametrize("text", [*REASONS, *LIMITS])
def test_an_expression_without_a_value_says_why(lines: list[str], text: str) -> None:
    reasons = REASONS | LIMITS
    assert lines[len(some_expressions(13)) + list(reasons).index(text)] == f"none: {reasons[text]}"
    assert text in LIMITS or value_of(text) == "none"


@pytest.mark.parametrize("text", OF_TWO)
def test_numbers_are_computed_to_the_last_bit(lines: list[str], text: str) -> None:
    pairs = list(itertools.product(EVERY, EVERY))
    printed = lines[-len(OF_TWO) * len(pairs) :][OF_TWO.index(text) * len(pairs) :][: len(pairs)]
    rule = rule_of(text)
    for (a, b), line in zip(pairs, printed, strict=True):
        if line == "none: a number in it exceeds 126 bits":
            assert 1e-6 in (a, b), "its fraction has 72 bits below"
            assert max(abs(a), abs(b)) > 2**52
            continue
        found = line.partition(":")[0] if "none" in line else line
        if "/" not in found and found != "none":
            found = repr(float.fromhex(found))
        assert found == exact_value(rule, a, b), f"a = {a!r}, b = {b!r}: {line}"
