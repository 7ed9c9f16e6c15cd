"""Kernels in Triton are compiled for GPUs that are not there, and what they use is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build.cache import Cache

triton = pytest.importorskip("triton", reason="Triton is not installed: no part of a torch for the CPU")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton_operators import OPERATORS, picked, pixel_sums, product, softmax, times, tuned  # noqa: E402

from opsmith.core.samples import samples_of  # noqa: E402
from opsmith.kernels.triton import compiler  # noqa: E402
from opsmith.kernels.triton.compiler import specialization_of, triton_type  # noqa: E402
from opsmith.kernels.triton.source import POINTED, compiler_options  # noqa: E402
from opsmith.kernels.triton.usage import specializations, triton_usage  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90")
CUBIN_MAGIC = b"\x7fELF"


def kernel_of(operator: Any) -> Any:
    return operator.specification.kernels[0].function


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own = Cache(tmp_path / "cache")
    monkeypatch.setattr(compiler, "cache_on_disk", lambda: own)
    return own.directory


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("name", "architectures"),
    [
        *((name, ARCHITECTURES if name == "times" else ARCHITECTURES[:1]) for name in OPERATORS),
        *(pytest.param(name, ARCHITECTURES, marks=pytest.mark.slow) for name in OPERATORS if name != "times"),
    ],
)
def test_every_kernel_compiles_for_every_architecture(name: str, architectures: tuple[str, ...]) -> None:
    kernel = kernel_of(OPERATORS[name])
    used = list(
        triton_usage(kernel) if architectures == ARCHITECTURES else triton_usage(kernel, architectures)
    )
    assert {each.architecture for each in used} == {*architectures}
    assert len(used) == len(architectures) * len(specializations(kernel))
    for each in used:
        assert 0 < each.registers <= 255
        assert each.spill_stores == each.spill_loads == 0
        assert each.threads in (32, 64, 128)
        assert each.occupancy is not None
        assert 0 < each.occupancy <= 1
        assert each.operator == OPERATORS[name].name
        assert Path(each.where.rpartition(":")[0]).name == "triton_operators.py"


def test_a_form_for_each_dtype_and_each_sample_that_differs() -> None:
    kinds = [each.signature["x_ptr"] for each in specializations(kernel_of(times))]
    assert sorted(kinds) == ["*bf16", "*fp16", "*fp32", "*fp64"]
    assert all(each.signature["by"] == "fp64" for each in specializations(kernel_of(times)))
    # The second sample of `picked` gives what is None in the first, and other numbers.
    shifts = {each.signature["shift"] for each in specializations(kernel_of(picked))}
    assert shifts == {"constexpr", "*fp32", "*fp64"}


def test_every_configuration_is_compiled() -> None:
    found = {
        (each.constants["BLOCK"], each.options["num_warps"]) for each in specializations(kernel_of(tuned))
    }
    assert found == {(32, 1), (128, 4)}
    assert {each.constants["EVEN"] for each in specializations(kernel_of(tuned))} == {True, False}


def test_what_is_divisible_is_known_to_the_compiler() -> None:
    [each, *_] = specializations(kernel_of(product))
    assert each.signature["b_stride_1"] == "constexpr"
    assert each.constants["b_stride_1"] == 1
    assert {"a", "b", "result"} <= set(each.divisible)
    assert "a_size_0" not in each.divisible


def test_products_and_sums_are_fused_as_triton_does_by_default(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fused_kernel(x, result):  # type: ignore[no-untyped-def]
        value = tl.load(x + tl.program_id(0))
        tl.store(result + tl.program_id(0), value * value + value)

    @opsmith.operator("triton_kernels::fused")
    def fused(x: Tensor) -> Tensor:
        return x * x + x

    fused.kernel("cuda", triton=fused_kernel, grid=lambda x: x.numel(), dtypes=torch.float32)
    fused.samples(lambda make: [(make(3),)])
    compile_, texts = triton.compile, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        kernel = compile_(*args, **kwargs)
        texts.append(kernel.asm["ptx"])
        return kernel

    monkeypatch.setattr(triton, "compile", recorded)
    for fusion in ("1", "0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fusion)
        list(triton_usage(kernel_of(fused), ["sm_80"]))
    assert ["fma.rn.f32" in text for text in texts] == [True, False]  # the third is found in the cache


def test_addresses_that_are_divisible_are_loaded_several_at_once(cache: Path) -> None:
    [each] = [one for one in specializations(kernel_of(times)) if one.signature["x_ptr"] == "*fp16"][:1]
    wide = replace(
        each, constants={**each.constants, "BLOCK": 1024}, divisible=(*each.divisible, "result_numel")
    )
    source = kernel_of(times).source
    vectors = compiler.compile_specialization(source, "triton_kernels::times", wide, "sm_80")
    single = compiler.compile_specialization(
        source, "triton_kernels::times", replace(wide, divisible=()), "sm_80"
    )
    assert vectors.cubin.read_bytes() != single.cubin.read_bytes()


def test_types_are_called_as_triton_calls_them() -> None:
    names = {1: "i32", 2**31 - 1: "i32", 2**31: "i64", 2**40: "i64", 0.5: "fp32"}
    assert {value: triton_type(value) for value in names} == names
    kinds = {dtype: triton_type(torch.empty(2, dtype=dtype, device="meta")) for dtype in POINTED}
    assert kinds[torch.bfloat16] == "*bf16"
    assert kinds[torch.int64] == "*i64"
    assert kinds[torch.uint8] == "*u8"
    assert len({*kinds.values()}) == len(POINTED)


def compiled_all(operator: Any, architecture: str) -> list[compiler.TritonCubin]:
    kernel = kernel_of(operator)
    return [
        compiler.compile_specialization(kernel.source, operator.name, each, architecture)
        for each in specializations(kernel)
    ]


def test_what_was_compiled_is_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled_all(pixel_sums, "sm_80")
    assert [each.source for each in first] == ["built"] * 3
    assert all(each.cubin.read_bytes().startswith(CUBIN_MAGIC) for each in first)
    assert [each.source for each in compiled_all(pixel_sums, "sm_80")] == ["memory"] * 3
    other = Cache(cache)
    monkeypatch.setattr(compiler, "cache_on_disk", lambda: other)
    found = compiled_all(pixel_sums, "sm_80")
    assert [each.source for each in found] == ["disk"] * 3
    assert [each.resources for each in found] == [each.resources for each in first]
    found[0].cubin.write_bytes(b"not a cubin")
    again = Cache(cache)
    monkeypatch.setattr(compiler, "cache_on_disk", lambda: again)
    fixed = compiled_all(pixel_sums, "sm_80")
    assert [each.source for each in fixed] == ["built", "disk", "disk"]
    assert fixed[0].cubin.read_bytes() == first[0].cubin.read_bytes()


def test_what_is_told_of_one() -> None:
    [first, *_] = triton_usage(kernel_of(softmax), ["sm_90"])
    assert first.operator == "triton_kernels::softmax"
    assert first.kernel == "softmax_kernel"
    assert first.instance == (
        "x_ptr: *bf16, result_ptr: *bf16, x_size_1: i32, x_stride_0: i32, x_stride_1=1, BLOCK=16, num_warps=2"
    )
    assert (first.threads, first.faults) == (64, ())


def declared(name: str, function: Any, **words: Any) -> Any:
    @opsmith.operator(f"triton_ahead::{name}")
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    copied.samples(lambda make: [(make(8),)])
    return copied.kernel("cuda", triton=function, grid=1, **words)


def test_a_kernel_that_spills_is_told() -> None:
    def greedy_kernel(x, result, N: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, N)
        tl.store(result + at, tl.cumsum(tl.load(x + at), 0))

    words = {"N": 1024, "num_warps": 1, "maxnreg": 16}
    operator = declared("greedy", greedy_kernel, constants=words, dtypes=torch.float32)
    [used] = triton_usage(kernel_of(operator), ["sm_80"])
    assert used.registers <= 24
    assert used.spill_stores > 0
    assert used.stack >= used.spill_stores // 2


def test_an_unknown_architecture_is_refused() -> None:
    for name in ("sm_70", "90", "gfx942", "sm_"):
        with pytest.raises(errors.UsageError) as caught:
            list(triton_usage(kernel_of(softmax), [name]))
        assert caught.value.message().splitlines() == [
            "Triton does not compile for this architecture",
            "  argument: architecture",
            "  expected: sm_80 or a later architecture, such as `sm_90`",
            f"  got: {name!r}",
            "  hint: name the architecture of your GPU: `sm_80` for an A100, `sm_90` for an H100",
        ]


def test_without_samples_nothing_says_what_to_compile() -> None:
    operator = declared("unsampled", kernel_of(tuned).source.function, constants={"BLOCK": 16, "EVEN": False})
    operator._specification = replace(operator.specification, samples=None)
    with pytest.raises(
        errors.MissingSamplesError, match="there are no samples for which its kernel could be compiled"
    ):
        list(triton_usage(kernel_of(operator), ["sm_80"]))


def copy_kernel(x, result, x_numel):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 8)
    tl.store(result + at, tl.load(x + at, mask=at < x_numel), mask=at < x_numel)


def test_floating_samples_are_cast_to_the_dtypes_of_the_kernel() -> None:
    operator = declared("halves", copy_kernel, dtypes=[torch.float16, torch.bfloat16])
    operator.samples(lambda: [(torch.ones(8),)])
    kinds = [each.signature["x"] for each in specializations(kernel_of(operator))]
    assert sorted(kinds) == ["*bf16", "*fp16"]


def test_samples_that_the_kernel_does_not_take_are_refused() -> None:
    operator = declared("untaken", copy_kernel, dtypes=[torch.float16, torch.bfloat16])
    operator.samples(lambda: [(torch.ones(8, dtype=torch.complex64),)])
    with pytest.raises(errors.MissingSamplesError) as caught:
        list(triton_usage(kernel_of(operator), ["sm_80"]))
    assert caught.value.message().splitlines() == [
        "triton_ahead::untaken: its Triton kernel takes none of the samples, so nothing is compiled",
        "  got: `x` is complex64, but the kernel takes bfloat16 or float16",
        f"  where: {kernel_of(operator).where}",
        "  hint: in `@operator.samples`, yield arguments that the kernel takes; only floating-point tensors "
        "are cast to the dtypes of the kernel",
    ]


def test_a_compile_error_shows_the_author_s_line_and_column() -> None:
    def wrong_kernel(x, result):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 8)
        tl.store(result + at, undefined + tl.load(x + at))  # noqa: F821

    operator = declared("wrong", wrong_kernel)
    with pytest.raises(errors.CompileError) as caught:
        list(triton_usage(kernel_of(operator), ["sm_90"]))
    first = wrong_kernel.__code__.co_firstlineno
    lines = caught.value.message().splitlines()
    assert lines[0] == "triton_ahead::wrong: Triton's compiler refuses the kernel"
    assert lines[1] == f"  got: {__file__}:{first + 2}:31: NameError('undefined is not defined')"
    assert lines[2].endswith("tl.store(result + at, undefined + tl.load(x + at))  # noqa: F821")
    assert lines[2][lines[3].index("^")] == "u"
    assert lines[4] == f"  where: {__file__}:{first + 2}"


def test_an_error_in_a_function_that_a_kernel_calls_is_told_at_the_call() -> None:
    @triton.jit
    def helper(x):  # type: ignore[no-untyped-def]
        return x + missing  # noqa: F821

    @triton.jit
    def calling_kernel(x, result):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 8)
        tl.store(result + at, helper(tl.load(x + at)))

    operator = declared("calling", calling_kernel)
    with pytest.raises(errors.CompileError) as caught:
        list(triton_usage(kernel_of(operator), ["sm_90"]))
    assert "missing is not defined" in str(caught.value)
    assert caught.value.where == f"{__file__}:{calling_kernel.fn.__code__.co_firstlineno + 3}"


def test_what_the_assembler_refuses_is_told() -> None:
    def bogus_kernel(x, result):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 8)
        code: tl.constexpr = "bogus.instruction $0, $1;"
        told = tl.inline_asm_elementwise(code, "=f,f", [tl.load(x + at)], tl.float32, True, 1)
        tl.store(result + at, told)

    operator = declared("bogus", bogus_kernel, dtypes=torch.float32)
    with pytest.raises(errors.CompileError) as caught:
        list(triton_usage(kernel_of(operator), ["sm_80"]))
    assert caught.value.problem == "Triton's compiler refuses the kernel"
    assert "ptxas" in str(caught.value.got)
    assert caught.value.where == f"{__file__}:{bogus_kernel.__code__.co_firstlineno}"
    assert caught.value.hint == "simplify the kernel"


@pytest.mark.parametrize("name", ["times", "softmax", "product", "picked"])
def test_it_is_what_triton_would_compile_at_a_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types, constants and divisibility, beside those that Triton finds itself; its driver is a stand-in."""
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver))
    kernel, operator = kernel_of(OPERATORS[name]), OPERATORS[name]
    dtype = torch.float32
    for call in samples_of(
        operator.specification.samples, opsmith.Make(dtype), operator.specification.schema, ""
    ):
        values = operator.specification.schema.call_values(call.args, call.kwargs)
        arguments = kernel.prepare(values).arguments
        launched = JITFunction(kernel.source.function).run(
            grid=(1,), warmup=True, **arguments, **compiler_options()
        )
        mine = specialization_of(kernel.source, arguments)
        constants = {(list(mine.signature).index(name),): value for name, value in mine.constants.items()}
        divisible = {(list(mine.signature).index(name),) for name in mine.divisible}
        assert launched.src.signature == mine.signature
        assert launched.src.constants == constants
        assert {place for place, attributes in launched.src.attrs.items() if attributes} == divisible
        assert launched.metadata.num_warps == mine.options.get("num_warps", 4)
