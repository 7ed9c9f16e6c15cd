"""Variations of samples: what may vary varies, nothing else, and tensors keep their structure."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from right_operators import RIGHT
from torch import Tensor

import opsmith
import opsmith.ops
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.domain import sizes_of
from opsmith.checking.samples.sample import Sample
from opsmith.checking.samples.variations import MOST_ELEMENTS, Variations, variations
from opsmith.checking.subject_kinds import subject_of
from opsmith.core.generate_like import generate_like, scale_factors


def derived(operator: Any, samples: Any = None, effort: Any = "thorough", seed: int = 0) -> Variations:
    return variations(subject_of(operator, samples, seed, EFFORTS[effort]))


def shapes(sample: Sample) -> tuple[Any, ...]:
    return tuple(list(value.shape) if isinstance(value, Tensor) else value for value in sample.flat)


def of_known_ranks(found: Variations) -> list[Sample]:
    return [each for each in found.samples if each.change is None or each.dims == each.change.of.dims]


def shaped(found: Variations) -> list[tuple[Any, ...]]:
    return [shapes(sample) for sample in of_known_ranks(found)]


def declared(function: Callable[..., Any], samples: Any, **options: Any) -> Any:
    operator = opsmith.operator(f"varied::{function.__name__}", **options)(function)
    operator.samples(lambda: samples)
    return operator


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ weight.mT
    return y if bias is None else y + bias


AFFINE = [
    (torch.rand(4, 3), torch.rand(2, 3), torch.rand(2)),
    (torch.rand(1, 5), torch.rand(3, 5)),
]


def test_sizes_that_go_together_are_varied_together() -> None:
    found = derived(declared(affine, AFFINE))
    assert ([5, 7], [3, 7], [3]) in shaped(found)
    for sample in of_known_ranks(found):
        x, weight, bias = sample.flat
        assert x.shape[1] == weight.shape[1]
        assert bias is None or bias.shape[0] == weight.shape[0]
    assert not [text for text in found.rejected if "size" in text]


def test_a_size_that_no_sample_varies_stays_unless_each_place_stands_for_itself() -> None:
    def normalised(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    found = derived(declared(normalised, [(torch.rand(3, 4),)]))
    sizes = {tuple(shape) for (shape,) in shaped(found)}
    assert {width for _, width in sizes} <= {4, 0}
    assert {7, 1, 33, 0} <= {height for height, _ in sizes}


def test_other_ranks_are_tried_where_the_reference_takes_them_and_no_shapes_are_declared() -> None:
    def last(x: Tensor, scale: Tensor) -> Tensor:
        return x.softmax(-1) * scale

    given = [(torch.rand(3, 4), torch.rand(4)), (torch.rand(2, 5), torch.rand(5))]
    found = derived(declared(last, given))
    others = [each for each in found.samples if each not in of_known_ranks(found)]
    assert [2, 3, 4] in [shapes(each)[0] for each in others]
    assert {each.given for each in others} == {"undeclared"}
    stated = opsmith.operator("varied::stated_ranks", shapes="x: A B, scale: B -> A B")(last)
    stated.samples(lambda: given)
    assert {len(x) for x, _ in (shapes(each) for each in derived(stated).samples)} == {2}


class Flipped(torch.autograd.Function):
    """Right for matrices, which all samples are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].flip(-1)


def test_a_class_that_is_right_for_the_ranks_of_its_samples_passes() -> None:
    samples = [(torch.rand(3, 4),), (torch.rand(2, 5),)]
    report = opsmith.check(Flipped, samples=samples, only=["forward", "gradient"])
    assert not report.failures, report


def test_all_sizes_are_1_at_once() -> None:
    found = derived(declared(affine, AFFINE), effort="default")
    assert [1, 1] in [x for x, *_ in shaped(found)]


def without_single_rows(x: Tensor) -> Tensor:
    return (2 * x).squeeze(0)


def row_by_row(x: Tensor) -> list[Tensor]:
    return [2 * row for row in x.unbind(0)]


@pytest.mark.parametrize("function", [without_single_rows, row_by_row])
def test_a_part_of_another_rank_or_count_is_no_part(function: Any) -> None:
    found = shaped(derived(declared(function, [(torch.rand(2, 3),)])))
    assert {rows for ((rows, _),) in found} == {0, 2}  # a size of none is tried whatever it means


def test_declared_letters_vary_and_what_is_written_in_them_follows() -> None:
    def halves(x: Tensor, weight: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).sum(-2) @ weight

    both = declared(halves, [(torch.rand(2, 6), torch.rand(3, 4))], shapes="x: B 2*M, weight: M N -> B N")
    for x, weight in shaped(derived(both)):
        assert x[1] == 2 * weight[0]
    assert any(weight[0] == 7 for _, weight in shaped(derived(both)))


def test_an_integer_that_follows_a_size_goes_with_it() -> None:
    def padded(x: Tensor, length: int, axis: int) -> Tensor:
        assert x.shape[0] == length
        return x.sum(axis)

    found = derived(declared(padded, [(torch.rand(3, 2), 3, 1), (torch.rand(4, 2), 4, 1)]))
    assert {7, 33} <= {length for _, length, _ in shaped(found)}
    assert all(x[0] == length for x, length, _ in shaped(found))
    assert {axis for _, _, axis in shaped(found)} == {0, 1}  # another axis is tried, and 2 is refused


def test_empties_are_tried_for_every_size_and_listed_where_they_are_rejected() -> None:
    def largest(x: Tensor) -> Tensor:
        return x.amax(-1)

    found = derived(declared(largest, [(torch.rand(3, 4),)]))
    assert [[0, 4]] in [list(shape) for shape in shaped(found)]
    (reason,) = found.rejected
    assert reason.startswith("sample 0 with `x.shape[1]` = 0 instead of 4: IndexError: amax(): ")


def test_what_has_no_finite_answer_or_warns_is_rejected() -> None:
    def mean(x: Tensor) -> Tensor:
        return x.mean()

    def spread(x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            import warnings

            warnings.warn("too few", stacklevel=2)
        return x * 2

    assert derived(declared(mean, [(torch.rand(3),)])).rejected == (
        "sample 0 with `x.shape[0]` = 0 instead of 3: its results are not finite",
    )
    rejected = derived(declared(spread, [(torch.rand(3),)])).rejected
    assert rejected == ("sample 0 with `x.shape[0]` = 0 instead of 3: it warns: too few",)


def test_arguments_are_broadcast_as_samples_show() -> None:
    found = shaped(derived(opsmith.ops.mul))
    assert ([1, 5], [3, 5]) in found
    assert ([5], [3, 5]) in found
    assert [] in [shape for pair in found for shape in pair]


def test_what_looks_like_broadcasting_and_is_not_stays() -> None:
    """The gain of a norm has fewer dimensions than `x`, and never the other way round, or a size of 1."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * gain

    given = [
        (torch.rand(3, 4), torch.rand(4)),
        (torch.rand(5), torch.rand(5)),
        (torch.rand(1, 3), torch.rand(3)),
    ]
    for x, gain in shaped(derived(declared(norm, given))):
        assert x[-1:] == gain


class Mode(Enum):
    PLAIN = 1
    SQUARED = 2


def test_other_numbers_come_from_samples_defaults_and_types_with_few_values() -> None:
    def power(x: Tensor, exponent: float = 2.0, negative: bool = False, mode: Mode = Mode.PLAIN) -> Tensor:
        y = x.abs().pow(exponent)
        y = -y if negative else y
        return y * y if mode is Mode.SQUARED else y

    found = derived(declared(power, [(torch.rand(3) + 0.1, 3.0), (torch.rand(3) + 0.1, 0.5)]))
    exponents = {sample.flat[1] for sample in found.samples}
    assert exponents == {0.5, 2.0, 3.0}
    assert {sample.flat[2] for sample in found.samples} == {False, True}
    assert {sample.flat[3] for sample in found.samples} == {Mode.PLAIN, Mode.SQUARED}


def test_optional_tensors_are_left_out_and_given() -> None:
    found = shaped(derived(declared(affine, AFFINE)))
    assert ([4, 3], [2, 3], None) in found
    assert ([1, 5], [3, 5], [3]) in found


def test_a_variation_says_where_it_comes_from_and_has_a_position_of_its_own() -> None:
    found = derived(declared(affine, AFFINE), effort="quick")
    assert len(found.samples) == EFFORTS["quick"].variations
    assert [sample.position for sample in found.samples] == [2, 3, 4]
    text = str(found.samples[1])
    assert text == (
        "sample 3 (x [0, 3], weight [2, 3], bias [2]; sample 0 with `x.shape[0]` = 0 instead of 4)"
    )


@pytest.mark.slow
def test_the_same_seed_gives_the_same_ones_and_another_seed_others() -> None:
    operator = declared(affine, AFFINE)

    def numbers(seed: int) -> list[Any]:
        return [value.tolist() for each in derived(operator, seed=seed).samples for value in each.flat[:2]]

    assert numbers(3) == numbers(3)
    assert numbers(3) != numbers(4)


def test_an_operator_that_takes_nothing_at_all_has_no_variations_and_breaks_nothing() -> None:
    def refusing(x: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError("no")

    found = derived(declared(refusing, [(torch.rand(2), torch.rand(1))]))
    assert found.samples == ()
    assert found.rejected
    assert all("the reference does not take the sample itself" in text for text in found.rejected)


@pytest.mark.every(8)
@pytest.mark.parametrize("name", RIGHT)
def test_every_variation_is_small_and_accepted(name: str) -> None:
    subject = subject_of(RIGHT[name], None, 0, EFFORTS["default"])
    found = variations(subject)
    ranks = {sample.dims for sample in subject.samples}
    most = len(ranks) * subject.effort.variations + subject.effort.argument_values
    assert 0 < len(found.samples) <= most
    for sample in found.samples:
        assert sum(value.numel() for value in sample.flat if isinstance(value, Tensor)) <= MOST_ELEMENTS
        assert subject.reference(sample, sample.at(torch.float64))


def test_a_square_matrix_stays_square() -> None:
    def trace(x: Tensor) -> Tensor:
        return x.diagonal().sum() + torch.linalg.det(x)

    subject = subject_of(
        declared(trace, [(torch.rand(3, 3),), (torch.rand(4, 4),)]), None, 0, EFFORTS["default"]
    )
    (symbol,) = sizes_of(subject, subject.samples[0]).symbols
    assert symbol.doubled
    assert symbol.varies
    assert all(height == width for ((height, width),) in shaped(variations(subject)))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


A = torch.randn(4, 4, generator=generator(), dtype=torch.float64)
EYE = torch.eye(4, dtype=torch.float64)


def _sorted(x: Tensor) -> bool:
    return bool((x.diff(dim=-1) >= 0).all())


def _rows_sum_to_one(x: Tensor) -> bool:
    return torch.allclose(x.sum(-1), torch.ones(x.shape[:-1], dtype=x.dtype)) and bool((x >= 0).all())


STRUCTURES: dict[str, tuple[Tensor, tuple[int, ...], Callable[[Tensor], bool]]] = {
    "positive": (torch.rand(5) + 0.5, (7,), lambda x: bool((x >= 0.5).all())),
    "within [-0.9, 0.9]": (A.tanh() * 0.9, (7, 3), lambda x: bool((x.abs() <= 0.9).all())),
    "orders of magnitude": (
        torch.logspace(-4, 4, 9),
        (50,),
        lambda x: bool((x < 1).any() and (x > 1).any() and (x > 0).all()),
    ),
    "constant": (torch.ones(4), (6,), lambda x: torch.equal(x, torch.ones(6))),
    "mask": (torch.tensor([0.0, 1, 1, 0, 1, 0]), (9,), lambda x: set(x.tolist()) <= {0.0, 1.0}),
    "infinities": (
        torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf),
        (5, 5),
        lambda x: bool((x.isinf() | (x == 0)).all()) and bool(x.isfinite().any(-1).all()),
    ),
    "sorted": (torch.tensor([0.1, 0.3, 0.4, 2.0]), (9,), _sorted),
    "decreasing": (torch.tensor([3.0, 1.5, 0.2]), (9,), lambda x: _sorted(-x)),
    "distinct": (torch.tensor([3.0, 1.0, 2.0]), (9,), lambda x: len(x.unique()) == 9),
    "probabilities": (A.softmax(-1), (3, 7), _rows_sum_to_one),
    "one-hot": (EYE[[1, 0, 3]], (6, 5), lambda x: _rows_sum_to_one(x) and set(x.unique().tolist()) == {0, 1}),
    "log-probabilities": (A.log_softmax(-1), (3, 7), lambda x: _rows_sum_to_one(x.exp())),
    "unit rows": (
        torch.nn.functional.normalize(A, dim=-1),
        (3, 7),
        lambda x: torch.allclose(x.norm(dim=-1), torch.ones(3, dtype=x.dtype)),
    ),
    "orthogonal": (
        torch.linalg.qr(A)[0],
        (5, 5),
        lambda x: torch.allclose(x @ x.mT, torch.eye(5, dtype=x.dtype), atol=1e-9),
    ),
    "symmetric": (A + A.mT, (5, 5), lambda x: torch.equal(x, x.mT)),
    "positive definite": (
        A @ A.mT + EYE,
        (5, 5),
        lambda x: torch.allclose(x, x.mT) and bool((torch.linalg.eigvalsh(x) > 0.5).all()),
    ),
    "lower triangular": (A.tril(), (5, 5), lambda x: not x.triu(1).any()),
    "cholesky factor": (
        torch.linalg.cholesky(A @ A.mT + EYE),
        (2, 5, 5),
        lambda x: not x.triu(1).any() and bool((x.diagonal(dim1=-2, dim2=-1) > 0.5).all()),
    ),
    "dominant diagonal": (
        A.clamp(-1, 1) + 9 * EYE,
        (5, 5),
        lambda x: bool((2 * x.diagonal().abs() > x.abs().sum(-1)).all()),
    ),
    "permutation": (torch.tensor([2, 0, 1]), (5,), lambda x: sorted(x.tolist()) == [0, 1, 2, 3, 4]),
    "positions": (torch.arange(4), (6,), lambda x: torch.equal(x, torch.arange(6))),
    "indices": (
        torch.tensor([[2, 2, 1], [1, 3, 1]]),
        (9, 9),
        lambda x: set(x.unique().tolist()) == {1, 2, 3},
    ),
    "distinct indices": (torch.tensor([7, 3, 9]), (5,), lambda x: len(x.unique()) == 5 and int(x.min()) >= 3),
    "offsets": (torch.tensor([0, 2, 2, 6]), (6,), lambda x: _sorted(x) and (int(x[0]), int(x[-1])) == (0, 6)),
    "truths": (torch.tensor([True, False, True]), (40,), lambda x: bool(x.any() and not x.all())),
    "always true": (torch.tensor([True, True]), (40,), lambda x: bool(x.all())),
    "whole number": (torch.tensor(3.0), (4,), lambda x: torch.equal(x, torch.full((4,), 3.0))),
    "one number": (torch.tensor(-0.8), (4,), lambda x: bool(((x <= -0.4) & (x >= -0.8)).all())),
    "hermitian": (
        torch.complex(A + A.mT, A - A.mT),
        (3, 3),
        lambda x: torch.allclose(x, x.mH) and bool(x.imag.any()),
    ),
    "nothing": (torch.empty(0, 3), (2, 3), lambda x: bool((x.abs() <= 2).all())),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_numbers_that_are_drawn_anew_have_the_structure_of_those_given(name: str) -> None:
    given, shape, holds = STRUCTURES[name]
    made = generate_like(given, shape, generator())
    assert (tuple(made.shape), made.dtype) == (shape, given.dtype)
    assert holds(made), made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64], ids=str)
def test_every_dtype_is_drawn(dtype: torch.dtype) -> None:
    for given, shape, _ in STRUCTURES.values():
        if given.is_floating_point():
            assert generate_like(given.to(dtype), shape, generator()).dtype is dtype


def test_sizes_that_give_another_number_of_results_are_rejected() -> None:
    def unbound(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.unbind_copy(x)

    found = derived(declared(unbound, [(torch.rand(2),), (torch.rand(2, 3),), (torch.rand(2, 5),)]))
    assert {sample.flat[0].shape[0] for sample in found.samples} == {2}
    assert any("it returns 0 tensors, but its declaration says 2" in each for each in found.rejected)


def test_a_flag_that_gives_more_results_is_rejected() -> None:
    def max_pooled(x: Tensor, with_indices: bool) -> Tensor:
        return torch.nn.functional.max_pool1d(x, 2, return_indices=with_indices)  # type: ignore[no-any-return]

    found = derived(declared(max_pooled, [(torch.rand(3, 4), False)]))
    assert {sample.flat[1] for sample in found.samples} == {False}
    assert any("it returns 0 tensors, 2 values, but" in each for each in found.rejected)


def test_only_mere_numbers_are_made_larger_or_smaller() -> None:
    assert scale_factors(A) == (4.0, 1 / 16)
    assert scale_factors(A.abs() + 0.5) == (4.0,)
    assert scale_factors(A.tanh()) == (1 / 16,)
    assert scale_factors(A.softmax(-1)) == ()
    assert scale_factors(torch.arange(4)) == ()


def test_bounds_stay_below_and_above() -> None:
    def clamped(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return x.clamp(low, high)

    torch.manual_seed(0)
    low = torch.rand(9)
    found = derived(declared(clamped, [(torch.randn(9), low, low + 0.05)]))
    for change in ("other numbers", "`x.shape[0]` = 33 instead of 9", "times 4"):
        assert any(sample.origin.endswith(change) for sample in found.samples), change
    alike = [sample.flat for sample in found.samples if sample.flat[1].shape == sample.flat[2].shape]
    assert all(bool((low <= high).all()) for _, low, high in alike)


def test_indices_stay_within_what_they_point_into() -> None:
    def rows(table: Tensor, index: Tensor) -> Tensor:
        return table[index]

    given = [(torch.rand(9, 2), torch.tensor([8, 3, 8, 0])), (torch.rand(5, 2), torch.tensor([4, 3]))]
    found = derived(declared(rows, given))
    heights = {sample.flat[0].shape[0] for sample in found.samples}
    assert {1, 7} <= heights
    for table, index in (sample.flat for sample in found.samples):
        assert not index.numel() or int(index.max()) < table.shape[0]


@pytest.mark.parametrize("other", [[1, 3, 0, 2], []], ids=["too few slots for more", "none known"])
def test_indices_that_must_be_distinct_are_not_invented(other: list[int]) -> None:
    def stored(table: Tensor, rows: Tensor, slot: Tensor) -> Tensor:
        return table.index_copy(0, slot, rows)

    slots = [torch.tensor(each, dtype=torch.int64) for each in ([2, 0, 3], other)]
    given = [(torch.rand(4, 2), torch.rand(len(each), 2), each) for each in slots]
    found = derived(declared(stored, given))
    assert any(sample.flat[0].shape[1] == 7 for sample in found.samples)
    for sample in found.samples:
        slot = sample.flat[2]
        assert sample.repeats or len(slot.unique()) == len(slot), sample.origin


def test_dimensions_take_turns_where_several_samples_have_them() -> None:
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    given = [(torch.rand(2, 3, 4),), (torch.rand(3, 2, 5),)]
    found = shaped(derived(declared(doubled, given), effort="default"))
    for size in (0, 1):
        reached = {shape.index(size) for (shape,) in found if size in shape}
        assert len(reached) > 1, (size, found)


@pytest.mark.slow
def test_samples_of_each_rank_have_a_share_of_their_own() -> None:
    def softened(x: Tensor) -> Tensor:
        return x.softmax(-1)

    given = [(torch.rand(3),), (torch.rand(4, 3),), (torch.rand(2, 4, 3),)]
    for effort in ("quick", "default"):
        alone = derived(declared(softened, given[2:]), effort=effort).samples
        found = derived(declared(softened, given), effort=effort).samples
        among = [each for each in found if each.change and each.change.of.dims == 3]
        assert len(among) == len(alone) == EFFORTS[effort].variations
    assert {shape.index(1) for (shape,) in map(shapes, among) if 1 in shape} == {0, 1}


class SqueezesBackward(torch.autograd.Function):
    """A softmax whose backward loses a dimension of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        share = (grad * y).sum(-1).squeeze()
        return y * (grad - share[..., None])


@pytest.mark.slow
def test_a_fault_of_a_dimension_that_samples_of_one_rank_have_is_found() -> None:
    given = [(torch.rand(3),), (torch.rand(4, 3),), (torch.rand(2, 4, 3),)]
    report = opsmith.check(SqueezesBackward, samples=given, only=["forward", "gradient"])
    assert [each.input for each in report.errors] == ["x"], report


def test_classes_and_library_operators_have_variations() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            return 2 * grad * ctx.saved_tensors[0]

    assert ([0, 3],) in shaped(derived(Square, [(torch.rand(2, 3),)]))

    @torch.library.custom_op("varied::thrice", mutates_args=())
    def thrice(x: Tensor) -> Tensor:
        return 3 * x

    assert ([0, 3],) in shaped(derived(thrice, [(torch.rand(2, 3),)]))
