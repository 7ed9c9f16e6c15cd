"""Sizes to measure: grown from a sample, given by letters, or made by a function of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarked import bare, count, gate, unshaped, windows
from briefly import BRIEF

import opsmith
import opsmith.ops
from opsmith import errors
from opsmith.benchmarking.sizes import SizedCall, argument_texts, sizes_of
from opsmith.benchmarking.templates import elements


def found(operator: Any, samples: Any = None, sizes: Any = None) -> tuple[list[SizedCall], list[str]]:
    return sizes_of(operator, samples, sizes, 0, BRIEF)


def shapes(size: SizedCall) -> list[list[int]]:
    return [list(value.shape) for value in size.sample.flat if isinstance(value, torch.Tensor)]


def test_a_sample_is_grown_letter_by_letter_to_so_many_elements() -> None:
    (call, small, large), remarks = found(gate)
    assert (call.role, small.role, large.role) == ("call", "size", "size")
    assert call.label == "a call, x [3, 4], y [3, 4]"
    assert [elements(each.sample.flat) for each in (small, large)] == [96, 1536]
    assert (large.label, large.sizes) == ("B=24 M=32", {"B": 24, "M": 32})
    assert remarks == [
        "sizes grown from sample 0 (x [3, 4], y [3, 4]); give different sizes with `sizes=` or `samples=`"
    ]


def test_letters_that_hold_only_together_are_doubled_together() -> None:
    more = replace(BRIEF, elements=(1 << 16,))
    *_, large = sizes_of(opsmith.ops.involution, None, None, 0, more)[0]
    assert large.sizes["H"] == large.sizes["Ho"] > 3
    assert large.sizes["W"] == large.sizes["Wo"] > 3
    assert (large.sizes["Kh"], large.sizes["Kw"]) == (3, 3)


def test_without_letters_axes_of_one_size_are_doubled_together() -> None:
    (call, *_, large), _ = found(unshaped)
    assert shapes(call) == [[4, 3], [2, 3]]
    (rows, inner), (columns, same) = shapes(large)
    assert inner == same > 3
    assert min(rows, columns) > 4
    assert large.label == f"x [{rows}, {inner}], weight [{columns}, {same}]"


def test_tensors_hold_numbers_of_the_samples_own() -> None:
    def samples(make: opsmith.Make) -> Any:
        return [(make(3, low=5.0, high=6.0),)]

    @opsmith.operator("sizes::logarithm", shapes="x: N -> N")
    def logarithm(x: torch.Tensor) -> torch.Tensor:
        return x.log()

    logarithm.samples(samples)
    *_, large = found(logarithm)[0]
    own, grown = found(logarithm)[0][0].sample.flat[0], large.sample.flat[0]
    assert grown.numel() > 500
    assert set(grown.tolist()) == set(own.tolist())


def test_a_sample_that_cannot_be_grown_is_measured_as_it_is() -> None:
    @opsmith.operator("sizes::three")
    def three(x: torch.Tensor) -> torch.Tensor:
        if x.shape != (3,):
            raise ValueError("expected three")
        return x * 2

    three.samples(lambda make: [(make(3),)])
    every, (remark,) = found(three)
    assert [(each.role, shapes(each)) for each in every] == [("call", [[3]]), ("size", [[3]])]
    assert remark.startswith("measured on its own samples, which are small")


def test_lists_of_sizes_go_together() -> None:
    (_, *sizes), _ = found(gate, sizes={"B": 8, "M": [16, 32]})
    assert [shapes(each) for each in sizes] == [[[8, 16], [8, 16]], [[8, 32], [8, 32]]]
    assert [each.label for each in sizes] == ["B=8 M=16", "B=8 M=32"]
    (_, same), _ = found(gate, sizes={"B M": 8})
    assert shapes(same) == [[8, 8], [8, 8]]


def test_an_argument_that_is_a_number_is_a_size_as_well() -> None:
    (_, one), _ = found(windows, sizes={"N": 20, "K": 5, "times": 7})
    assert shapes(one) == [[2, 20], [5]]
    assert one.sample.flat[-1] == 7


def test_a_function_of_sizes_makes_the_calls() -> None:
    (_, small, large), _ = found(
        unshaped, samples=lambda make, n: [(make(n, 4), make(2, 4))], sizes={"n": [8, 64]}
    )
    assert [shapes(each)[0] for each in (small, large)] == [[8, 4], [64, 4]]
    assert [each.label for each in (small, large)] == ["n=8", "n=64"]
    (one,), _ = found(bare, samples=lambda n: [(torch.ones(n),)], sizes={"n": 5})
    assert shapes(one) == [[5]]


def test_given_samples_are_measured_as_they_are_the_smallest_first() -> None:
    given = [(torch.ones(9, 9), torch.ones(9, 9)), (torch.ones(2, 2), torch.ones(2, 2))] * 2
    every, remarks = found(gate, samples=given)
    assert [each.role for each in every] == ["call", "size", "size", "size", "size"]
    assert [each.label for each in every[1:3]] == ["x [2, 2], y [2, 2] (1)", "x [2, 2], y [2, 2] (2)"]
    assert remarks == []


def test_integer_inputs_are_no_template_for_gradients_and_still_measured() -> None:
    every, _ = found(count)
    assert [each.role for each in every][:1] == ["call"]


NO_SIZES = "`sizes` must map names to sizes"


@pytest.mark.parametrize(
    ("operator", "sizes", "problem", "part"),
    [
        (gate, {}, NO_SIZES, "{}"),
        (gate, "B=3", NO_SIZES, "B=3"),
        (gate, {"B": 2.5}, NO_SIZES, "2.5"),
        (gate, {"B M": 2, "M": 3}, NO_SIZES, "'M': 3"),
        (gate, {"B": -1}, NO_SIZES, "-1"),
        (gate, {"B": []}, NO_SIZES, "[]"),
        (gate, {"B": "12"}, NO_SIZES, "12"),
        (gate, {" ": 3}, NO_SIZES, "3"),
        (gate, {3: 3}, NO_SIZES, "3"),
        (gate, {"B": [1, 2], "M": [1, 2, 3]}, "must have the same length", "2 for `B`, 3 for `M`"),
        (gate, {"Q": 3}, "there is no size `Q`", "`Q`"),
        (unshaped, {"n": 3}, "there is no size `n`", "`n`"),
        (windows, {"K": 30}, "no sample takes the sizes K=30", "size for tensor at dimension 1 is 9 but"),
    ],
)
def test_sizes_that_are_none_are_refused(operator: Any, sizes: Any, problem: str, part: str) -> None:
    with pytest.raises(errors.UsageError) as raised:
        opsmith.benchmark(operator, sizes=sizes, effort=BRIEF)
    assert problem in raised.value.problem
    assert part in (raised.value.got or "")
    assert (raised.value.argument, raised.value.operator) == ("sizes", operator.name)


def test_sizes_that_do_not_fit_the_function_are_refused() -> None:
    for samples, sizes in (
        (lambda make, n, m: [(make(n, m),) * 2], {"n": 3, "k": 4}),
        (lambda make, n, m: [(make(n, m),) * 2], {"n": 3}),
    ):
        with pytest.raises(
            errors.UsageError, match="`sizes` does not fit the parameters of `samples`"
        ) as raised:
            found(gate, samples=samples, sizes=sizes)
        assert raised.value.expected == "a size for each of `n`, `m`"


def test_without_samples_it_says_how_to_give_them() -> None:
    with pytest.raises(errors.MissingSamplesError, match="there are no samples to measure it on") as raised:
        found(bare)
    assert raised.value.hint is not None
    assert "@bare.samples" in raised.value.hint
    assert "benchmark(..., samples=[(x, weight)])" in raised.value.hint


def test_tensors_that_have_no_floating_dtype_are_told_with_theirs() -> None:
    values = [torch.ones(2), torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool), 2]
    assert argument_texts(["x", "z", "mask", "n"], values) == [
        "x [2]",
        "z [2] complex",
        "mask [2] bool",
        "n=2",
    ]


def test_sizes_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(errors.UsageError, match="the arguments of a size cannot be made") as raised:
        found(gate, sizes={"B": 10**14, "M": 4})
    assert (raised.value.argument, raised.value.hint) == ("sizes", "give smaller sizes")
    assert "[100000000000000, 4]" in str(raised.value.got)


@pytest.mark.parametrize("size", [10**14, 10**19])
def test_sizes_that_a_function_of_samples_cannot_make_are_refused(size: int) -> None:
    def samples(make: opsmith.Make, n: int) -> list[Any]:
        return [(make(n), make(n))]

    with pytest.raises(errors.SampleError) as raised:
        found(gate, samples=samples, sizes={"n": size})
    assert raised.value.problem.startswith(f"at n={size}: its samples cannot be made: ")
    assert "\n" not in raised.value.problem
    assert raised.value.where == f"{__file__}:{samples.__code__.co_firstlineno + 1}"
    assert raised.value.hint == "give sizes that `samples` can make"


@pytest.mark.parametrize("size", [10**18, 10**19])
def test_sizes_beyond_64_bits_are_refused(size: int) -> None:
    with pytest.raises(errors.UsageError, match="the arguments of a size cannot be made") as raised:
        found(gate, sizes={"B": size, "M": 4})
    assert str(raised.value.got).startswith(f"B={size}, M=4: ")
