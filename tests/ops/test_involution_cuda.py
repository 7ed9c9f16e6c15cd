"""CUDA kernels of involution, run on the CPU, compute what the references do; and what they take of a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from involution_cases import (
    BEYOND,
    KERNELS,
    OPERATORS,
    PLAIN,
    STEPS,
    STRIDED,
    UNEVEN,
    Case,
    cases,
    empty,
    expected,
    held,
    poisoned,
)
from torch import Tensor

import opsmith
from opsmith.build.source_text import includes_of
from opsmith.kernels.cuda.emulation.access_model import kernel_access
from opsmith.kernels.cuda.emulation.call import EmulatedCall, KernelEmulation
from opsmith.kernels.cuda.emulation.launch import Order
from opsmith.kernels.cuda.usage import cuda_usage
from opsmith.ops.involution import tiles

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the emulation is built on Linux"),
    pytest.mark.xdist_group("involution_cuda"),
]

SHORT = {"plain": PLAIN, "strided": STRIDED, "uneven": UNEVEN, "beyond": BEYOND}
OTHER_DTYPES = [torch.float16, torch.bfloat16, torch.float64]
ORDERS = ("forward", "backward")

Arguments = tuple[Any, ...]


def computed(name: str, calls: Sequence[Arguments], orders: Sequence[str] = ORDERS[:1]) -> list[Tensor]:
    """Results of calls of an operator by its CUDA kernel, in which nothing is found in any of the orders."""
    emulation = KernelEmulation(KERNELS[name])
    emulation.build(calls)
    prepared = [emulation.prepare(list(arguments)) for arguments in calls]
    found: list[Tensor] = []
    for order in orders:
        launches = [call.new_run(Order(order)) for call in prepared if not isinstance(call, str)]
        findings = emulation.run(launches)
        assert not any(findings), f"{name}: {findings}"
        found = [
            call.finish(emulation.kernel, launch)
            for call, launch in zip(prepared, launches, strict=True)
            if not isinstance(call, str)
        ]
        assert len(found) == len(calls), prepared
    return found


CASES = [
    pytest.param(case, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}", marks=marks)
    for name, case in SHORT.items()
    for dtype, marks in (
        (torch.float32, ()),
        *((dtype, pytest.mark.slow) for dtype in OTHER_DTYPES if (name, dtype) != ("plain", torch.bfloat16)),
        *([(torch.bfloat16, ())] if name == "plain" else []),  # rounded once
    )
]


@pytest.mark.every(6)
@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_values_in_two_orders_of_the_threads(case: Case, dtype: torch.dtype) -> None:
    for name, arguments in case.calls(*case.tensors(dtype)).items():
        (found,) = computed(name, [arguments], ORDERS)
        held(found, expected(name, arguments), dtype, (name, case))
        assert found.stride() == OPERATORS[name].reference(*arguments).stride()


@pytest.mark.every(8)
@pytest.mark.parametrize("odd", [float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
def test_what_is_not_finite_goes_where_the_reference_has_it(case: Case, odd: float) -> None:
    for name in OPERATORS:
        calls = [case.calls(*poisoned(case, odd, which))[name] for which in range(6)]
        for which, (arguments, found) in enumerate(zip(calls, computed(name, calls), strict=True)):
            right = OPERATORS[name].reference(*arguments)
            assert torch.equal(found.isfinite(), right.isfinite()), (name, which)
            assert torch.equal(found.isnan(), right.isnan()), (name, which)


def test_sizes_of_tiles_are_those_of_even_parts() -> None:
    for length in range(1, 300):
        sizes = {-(-length // parts) for parts in range(1, length + 1)}
        assert tiles.evenly(length) == sorted(size for size in sizes if size <= 32), length


def test_a_tile_of_the_widest_image_is_found() -> None:
    """Of as many columns as 32 bits count in a tile: what is looked at does not grow with them."""
    wide = 2**29 - 8
    image = torch.empty(1, 1, 1, wide, device="meta")
    weight = torch.empty(1, 1, 3, 3, 1, wide, device="meta")
    for problem in (
        tiles.forward(image, weight, (1, 1), (1, 1), (1, 1)),
        tiles.input_gradient(image, weight, (1, wide), (1, 1), (1, 1), (1, 1)),
        tiles.weight_gradient(image, image, 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    ):
        tile = tiles.chosen(problem)
        assert tile is not None
        assert tiles.blocks(problem, tile) == -(-wide // (tile.strips * problem.strip))


def test_empty_batches_launch_nothing() -> None:
    case = empty(PLAIN)
    for name, arguments in case.calls(*case.tensors(torch.float32)).items():
        emulation = KernelEmulation(KERNELS[name])
        call = emulation.prepare(list(arguments))
        assert isinstance(call, EmulatedCall)
        assert call.new_run(Order("forward")) == ()
        assert call.finish(emulation.kernel, ()).shape == expected(name, arguments).shape


@pytest.mark.slow
def test_nothing_is_copied() -> None:
    case = Case(**{**vars(PLAIN), "last": True, "turned": True, "offset": 1})
    for name, arguments in case.calls(*case.tensors(torch.float32)).items():
        kernel = KERNELS[name]
        (found,) = computed(name, [arguments])
        held(found, expected(name, arguments), torch.float32, name)
        choice = KernelEmulation(kernel).choose(list(arguments))
        assert not isinstance(choice, str)
        assert kernel.copied_tensors(choice, list(arguments)) == ()


@pytest.mark.slow
def test_what_the_reference_refuses_is_refused_in_its_words() -> None:
    image, weight, cotangent = PLAIN.tensors(torch.float32)
    for name, arguments in (
        ("forward", (image[:, :31], weight, 1, 3)),
        ("forward", (image, weight, (0, 1), 3)),
        ("input gradient", (cotangent, weight, (9, 0), 1, 3)),
        ("weight gradient", (cotangent, image, 0, (7, 7), 1, 3)),
    ):
        with pytest.raises(ValueError, match="expected") as ours:
            opsmith.emulate(OPERATORS[name], *arguments)
        with pytest.raises(ValueError, match="expected") as theirs:
            OPERATORS[name].reference(*arguments)
        assert str(theirs.value) in str(ours.value)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_random_sizes_and_layouts(step: int) -> None:
    drawn = [case for case in cases(step, 400) if case.kernel == STEPS[step]["kernel"]][:25]
    some = [case for case in drawn if case.channels in (3, 16)][:8]
    needed = [*((case, torch.float32) for case in drawn), *((c, d) for c in some for d in OTHER_DTYPES)]
    for name in OPERATORS:
        calls = [case.calls(*case.tensors(dtype))[name] for case, dtype in needed]
        for (case, dtype), arguments, found in zip(needed, calls, computed(name, calls), strict=True):
            held(found, expected(name, arguments), dtype, (name, case))
        odd = [case.calls(*poisoned(case, float("inf"), at))[name] for at, case in enumerate(drawn)]
        for case, arguments, found in zip(drawn, odd, computed(name, odd), strict=True):
            right = OPERATORS[name].reference(*arguments)
            assert torch.equal(found.isnan(), right.isnan()), (name, case)
            assert torch.equal(found.isinf(), right.isinf()), (name, case)


def test_the_same_numbers_each_time() -> None:
    """A launch is told from sizes alone, and no kernel adds to memory that another thread adds to."""
    for kernel in KERNELS.values():
        source = kernel.source
        for text in (source.text, *includes_of(source.text, source.folder).values()):
            assert "atomic" not in text


def test_a_tile_is_copied_once_for_all_rows_of_taps() -> None:
    """Four rounds of taps read as many sectors of image and cotangent as one."""
    image = torch.ones(1, 4, 28, 28)
    call = [image, image, 1, (7, 7), (1, 1), (3, 3), (1, 1)]
    tile = tiles.chosen(tiles.weight_gradient(*call))
    assert tile is not None
    assert tile.taps == 2
    (found,) = kernel_access(KERNELS["weight gradient"], lambda dtype: [call], [torch.float32])
    sectors = {each.tensor: each.taken for each in found.lines if each.words.startswith("reads ")}
    assert sectors["cotangent"] == image.numel() * 4 // 32
    assert sectors["input"] < 1.5 * image.numel() * 4 // 32


# ---- What they take of a GPU.

REDNET = [(64, 56), (128, 28), (256, 14), (512, 7)]
"""Channels and side of the four stages of RedNet-50: kernels of 7x7 for 16 channels each, batches of 64."""


def stages(name: str) -> Any:
    """The calls of RedNet's stages, and of those between two stages, in a dtype."""

    def calls(dtype: torch.dtype) -> Iterator[list[Any]]:
        for at, (C, side) in enumerate(REDNET):
            steps = [(C, side, 1)] + ([(C, REDNET[at - 1][1], 2)] if at else [])
            for channels, size, stride in steps:
                case = Case(64, channels // 16, 16, (size, size), (7, 7), (stride, stride), (3, 3))
                made = (
                    torch.empty(shape, dtype=dtype, device="meta")
                    for shape in (
                        (64, channels, size, size),
                        (64, channels // 16, 7, 7, *case.result),
                        (64, channels, *case.result),
                    )
                )
                yield list(case.calls(*made)[name])

    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_DTYPES)], ids=str
)
def test_rednet_spills_nothing(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS[name], "_dtypes", [dtype])
    architectures = ["sm_80", "sm_90"]
    found = [*cuda_usage(KERNELS[name], architectures, stages(name))]
    assert len(found) == 4  # with strides 1 and 2: sizes of images are no constants
    for each in found:
        assert not each.faults, each
        assert (each.spills, each.stack) == (0, 0), each
        assert each.dynamic_shared <= 48 * 1024
    if dtype == torch.float32:
        plain = [each for each in found if "S=1" in each.instance]
        assert min(each.occupancy or 0 for each in plain) >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_samples_and_other_sizes_spill_nothing(name: str) -> None:
    def calls(dtype: torch.dtype) -> Iterator[list[Any]]:
        for kernel, step, gap in (
            (3, 1, 1),
            (5, 1, 1),
            (9, 1, 1),
            (11, 2, 1),
            (7, 1, 2),
            (3, 4, 1),
            (5, 3, 2),
        ):
            for channels in (4, 40):
                case = Case(
                    2, 2, channels, (60, 60), (kernel,) * 2, (step,) * 2, (kernel // 2,) * 2, (gap,) * 2
                )
                yield list(case.calls(*(each.to("meta") for each in case.tensors(dtype)))[name])

    for which in (None, calls):
        for each in cuda_usage(KERNELS[name], ["sm_80", "sm_90"], which):
            assert not each.faults, each
            assert each.spills == 0, each


LAUNCHES = {
    "forward": tiles.forward,
    "input gradient": tiles.input_gradient,
    "weight gradient": tiles.weight_gradient,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_tile_fits(name: str) -> None:
    """It has no more threads than its kernel is compiled for, nor more shared memory than every GPU gives."""
    launch_of = LAUNCHES[name]
    (bounds,) = re.findall(r"__launch_bounds__\((\d+),", KERNELS[name].source.text)
    most = int(bounds)
    for case in cases(1, 60):
        made = (each.to("meta") for each in case.tensors(torch.float32))
        problem = launch_of(*case.calls(*made)[name])
        tile = tiles.chosen(problem)
        if tile is None:
            assert case.stride[1] > 4 or case.kernel[1] > 20
            continue
        x, y, z = tiles.block(problem)
        assert x * y * z <= most
        assert tile.shared <= 48 * 1024


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("groups", "channels"), [(1, 2**31), (2**26, 32)], ids=["one group", "many"])
def test_more_channels_than_32_bits_count_have_no_tile(name: str, groups: int, channels: int) -> None:
    case = Case(1, groups, channels, (1, 1), (1, 1))
    image = torch.empty(1, groups * channels, 1, 1, device="meta", dtype=torch.float16)
    weight = torch.empty(1, groups, 1, 1, 1, 1, device="meta", dtype=torch.float16)
    assert tiles.chosen(LAUNCHES[name](*case.calls(image, weight, image)[name])) is None
