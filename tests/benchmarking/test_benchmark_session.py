"""`opsmith.benchmark`: what is timed of whom, what is kept of it, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarked import bare, count, gate, native, ranks, scaled, unshaped, windows, wrong
from briefly import BRIEF, left_out, passed, timed
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.benchmarking import Benchmark, benchmarker, machine, measurement
from opsmith.benchmarking.contenders import fresh_compiled
from opsmith.benchmarking.sizes import SizedCall, sizes_of
from opsmith.benchmarking.templates import elements
from opsmith.benchmarking.timing import Call, ProcessorClock
from opsmith.checking import Outcome, Report

Measure = Callable[..., Benchmark]


def test_operator_and_reference_are_timed_in_every_direction_beside_controls(measure: Measure) -> None:
    found = measure(gate)
    assert [case.role for case in found.cases] == ["call", "size", "size"]
    for case in found.cases:
        names = ("operator", "reference", "copy", "multiply")
        assert timed(case) == {(name, each) for name in names for each in ("forward", "backward", "both")}
        assert all(len(each.seconds) == 3 and min(each.seconds) > 0 for each in case.timings)
        assert (case.dtype, case.device) == ("float32", "cpu")
    last = found.cases[-1]
    assert (last.label, last.arguments, last.elements) == ("B=24 M=32", ("x [24, 32]", "y [24, 32]"), 1536)
    assert [each.by.partition(", ")[0] for each in last.contenders] == ["reference and formulas", "PyTorch"]


@pytest.mark.slow
def test_what_there_is_to_do_is_counted_by_direction(measure: Measure) -> None:
    case = measure(gate, memory=True).cases[-1]
    forward, backward, both = case.work
    each = 4 * 24 * 32
    assert (forward.bytes, forward.flops) == (3 * each, 2 * 24 * 32)  # x and y, and the result
    assert backward.bytes == 5 * each  # what came, two gradients, and x and y, which are saved
    assert (both.bytes, both.flops) == (forward.bytes + backward.bytes, forward.flops + backward.flops)
    assert {each.contender: each.beyond for each in case.memory} == {"operator": 0, "reference": each}
    assert {each.contender: each.saved for each in case.memory} == {
        "operator": 2 * each,
        "reference": 2 * each,
    }


@pytest.mark.slow
def test_what_there_is_to_do_is_the_same_whether_memory_is_looked_at_or_not(measure: Measure) -> None:
    with_memory, without = (measure(gate, memory=memory, sizes={"B M": 4}) for memory in (True, False))
    assert with_memory.cases[-1].work == without.cases[-1].work
    assert without.cases[-1].memory == ()


@pytest.mark.slow
def test_no_change_of_modes_is_timed_with_a_call(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = False

    class Clock(ProcessorClock):
        def seconds(self, calls: list[Call]) -> float:
            nonlocal timing
            timing = True
            taken = super().seconds(calls)
            timing = False
            return taken

    class Mode(torch.set_grad_enabled):
        def __init__(self, mode: bool) -> None:
            assert not timing, "while a call is timed"
            super().__init__(mode)

    modes: dict[str, set[bool]] = {"results": set()}

    def baseline(x: Tensor, y: Tensor) -> Tensor:
        modes["results"].add(torch.is_grad_enabled())
        return x * y.tanh()

    monkeypatch.setattr(measurement, "clock_of", lambda device: Clock())
    for name in ("set_grad_enabled", "no_grad", "enable_grad"):
        fixed = {"set_grad_enabled": (), "no_grad": (False,), "enable_grad": (True,)}[name]
        monkeypatch.setattr(torch, name, lambda *mode, fixed=fixed: Mode(*(fixed or mode)))
    found = measure(gate, baselines={"baseline": baseline}, sizes={"B M": 4})
    assert left_out(found.cases[-1]) == {}
    assert modes["results"] == {True, False}


@pytest.mark.slow
def test_a_kernel_makes_it_native_and_is_named(measure: Measure) -> None:
    case = measure(native).cases[-1]
    own = case.contenders[0]
    assert (own.name, own.kind) == ("native", "operator")
    assert own.by.startswith("kernel for cpu, ")
    assert "benchmarked.py:" in own.by
    assert ("native", "both") in timed(case)


@pytest.mark.slow
def test_all_are_called_with_the_same_tensors(measure: Measure) -> None:
    seen: dict[str, set[int]] = {}

    def baseline(name: str) -> Callable[..., Tensor]:
        def call(x: Tensor, y: Tensor) -> Tensor:
            seen.setdefault(name, set()).add(x.data_ptr())
            return x * y.tanh()

        return call

    measure(gate, baselines={"one": baseline("one"), "two": baseline("two")}, sizes={"B M": 6})
    assert seen["one"] == seen["two"]
    assert len(seen["one"]) == 2  # the call, and the size


@pytest.mark.slow
def test_results_without_gradients_and_hidden_ones(measure: Measure) -> None:
    assert left_out(measure(ranks).cases[-1]) == {}
    assert ("reference", "both") in timed(measure(ranks).cases[-1])
    case = measure(scaled).cases[-1]
    assert left_out(case) == {}
    forward = measure(count).cases[-1]
    assert {direction for _, direction in timed(forward)} == {"forward"}
    assert forward.notes == ("no result of the reference has a gradient: only forward is timed",)
    assert forward.work_of("forward") is not None


@pytest.mark.slow
def test_an_opaque_operator_is_timed_forward(measure: Measure) -> None:
    @opsmith.operator("session::opaque", opaque=True)
    def opaque(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    opaque.fake(lambda x: torch.empty_like(x))
    opaque.samples(lambda make: [(make(5),)])
    case = measure(opaque, compiled=True, directions=["forward"]).cases[-1]
    assert [each.name for each in case.contenders] == ["operator", "reference"]
    assert left_out(case) == {}


@pytest.mark.slow
def test_directions_dtypes_threads_and_the_seed_are_kept(measure: Measure) -> None:
    before = torch.get_num_threads()
    found = measure(
        gate,
        directions=["both", "forward"],
        dtypes=[torch.float64, torch.bfloat16],
        threads=2,
        seed=3,
        sizes={"B M": 4},
    )
    assert torch.get_num_threads() == before
    assert (found.threads, found.seed, found.effort, found.operator) == (2, 3, "quick", gate.name)
    assert [case.dtype for case in found.cases] == ["float64", "float64", "bfloat16", "bfloat16"]
    assert {case.directions for case in found.cases} == {("forward", "both")}
    assert {each.dtype for each in found.ceilings if each.kind == "multiply"} == {"float64", "bfloat16"}
    assert found.environment["torch"] == torch.__version__
    assert "of them" in found.environment["processor"]


def test_the_flops_that_an_author_gives_are_taken(measure: Measure) -> None:
    work = measure(gate, flops=lambda x, y: 7 * x.numel(), sizes={"B M": 4}).cases[-1].work
    assert (work[0].flops, work[0].counted) == (7 * 16, "by the author's formula")
    assert work[2].counted.startswith("by the author's formula; the backward of the reference")


@pytest.mark.parametrize(
    ("flops", "got"),
    [
        (lambda: 1, "TypeError: <lambda>() takes 0 positional arguments but 2 were given"),
        (lambda x, y: None, "TypeError: int() argument must be a string"),
    ],
    ids=["takes nothing", "returns nothing"],
)
def test_flops_that_count_nothing_are_refused(measure: Measure, flops: Any, got: str) -> None:
    with pytest.raises(errors.UsageError, match="`flops` must count the operations of a call") as caught:
        measure(gate, flops=flops, sizes={"B M": 4})
    assert (caught.value.operator, caught.value.argument) == (gate.name, "flops")
    assert str(caught.value.got).startswith(got)


@pytest.mark.parametrize("frozen", [False, True], ids=["unfrozen", "frozen"])
def test_the_objects_that_were_there_are_frozen_while_it_measures_as_the_caller_had_them_after(
    measure: Measure, frozen: bool
) -> None:
    seen: list[int] = []

    def other(x: Tensor, y: Tensor) -> Tensor:
        seen.append(gc.get_freeze_count())
        return x * y

    gc.unfreeze()
    if frozen:
        gc.freeze()
    try:
        measure(gate, baselines={"other": other}, sizes={"B M": 4})
        assert min(seen) > 1000
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_what_the_caller_has_set_is_no_matter(measure: Measure) -> None:
    with torch.no_grad():
        assert ("operator", "both") in timed(measure(gate).cases[-1])
    with torch.inference_mode():
        assert ("operator", "both") in timed(measure(gate).cases[-1])
    assert gc.isenabled()


@pytest.mark.slow
def test_the_callers_random_numbers_go_on_as_they_would(measure: Measure) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure(gate)
    assert torch.equal(torch.rand(3), expected)


def test_larger_sizes_are_left_out_where_a_call_takes_too_long(measure: Measure) -> None:
    found = measure(gate, effort=replace(BRIEF, slowest_s=0.0), sizes={"B": 2, "M": [2, 4, 8]})
    assert len(found.cases) == 1
    assert found.remarks[-1].startswith("left out, because a call took 0.0 s at a call, ")
    assert found.remarks[-1].endswith("the limit at quick effort is 0 s: B=2 M=2, B=2 M=4, B=2 M=8")


def test_a_size_whose_calls_would_take_too_long_is_grown_less() -> None:
    sizes, _ = sizes_of(gate, None, None, 0, replace(BRIEF, elements=(256, 1 << 16)))
    large, remarks = sizes[-1], list[str]()
    effort = replace(BRIEF, grown_s=0.5)
    assert elements(large.sample.flat) == 98304

    def in_time(*done: tuple[int, float]) -> SizedCall:
        remarks.clear()
        return benchmarker._in_time(large, done, effort, remarks)

    # A call takes 1 ms, and 10 microseconds for each element.
    smaller = in_time((100, 0.002), (384, 0.00484))
    assert elements(smaller.sample.flat) == 49152
    assert smaller.sample.flat[0].shape == smaller.sample.flat[1].shape
    assert remarks == [
        f"measured {smaller.label} instead of {large.label}: a call with {large.label} was expected to take "
        f"1.0 s; "
        f"to measure {large.label}, give it with `sizes=` or `samples=`"
    ]
    # What it costs without elements is not multiplied.
    assert in_time((100, 0.3), (384, 0.3)) is large
    assert in_time((384, 0.4)) is large  # of one size nobody knows
    assert in_time((384, 0.1), (384, 0.2)) is large
    assert in_time((100, 0.1), (384, 0.9)) is large  # not even a smaller one is in time
    assert remarks == []
    given = replace(large, smaller=None)
    assert benchmarker._in_time(given, [(100, 0.002), (384, 0.00484)], effort, remarks) is given


@pytest.mark.slow
def test_a_busy_machine_is_remarked(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load", lambda: 3.0)
    monkeypatch.setattr(benchmarker, "processors", lambda: 2)
    busy = measure(gate)
    assert busy.load == {"processors": 2.0, "before": 3.0, "after": 3.0}
    assert busy.remarks[-1] == "the machine was busy before the benchmark: a load of 3 on 2 processors"
    monkeypatch.setattr(machine, "load", lambda: None)
    unknown = measure(gate)
    assert unknown.load == {"processors": 2.0}
    assert not any("busy" in each for each in unknown.remarks)


def test_progress_is_told(measure: Measure) -> None:
    told: list[tuple[str, int, int]] = []
    measure(gate, sizes={"B M": 4}, progress=lambda *each: told.append(each))
    assert told == [("a call, x [3, 4], y [3, 4], float32", 0, 2), ("B=4 M=4, float32", 1, 2), ("", 2, 2)]


@pytest.mark.slow
def test_an_operator_that_fails_its_check_is_not_benchmarked() -> None:
    with pytest.raises(errors.NotPassedError, match="it fails its check") as raised:
        opsmith.benchmark(wrong, effort=BRIEF)
    assert raised.value.operator == wrong.name
    assert (raised.value.got or "").splitlines()[0].startswith("FAILED: gradient")
    assert "gradient of `x`: sign" in (raised.value.got or "")
    assert raised.value.hint == "run `opsmith check`, fix the operator, then measure"


def test_one_without_samples_of_its_own_is_checked_on_the_smallest_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[Any] = []

    def check(operator: Any, **options: Any) -> Report:
        checked.append(options["samples"])
        return passed(operator)

    monkeypatch.setattr("opsmith.benchmarking.benchmarker.check", check)
    opsmith.benchmark(bare, samples=[(torch.ones(9),), (torch.ones(4),)], effort=BRIEF, compiled=False)
    ((call,),) = checked
    assert call.args[0].shape == (4,)
    opsmith.benchmark(gate, sizes={"B M": 4}, effort=BRIEF, compiled=False)
    assert checked[1] is None


def test_a_report_saves_the_check_if_it_is_the_operators_and_nothing_failed(measure: Measure) -> None:
    failed = Report(gate.name, (Outcome("forward", "failed"), Outcome("gradient", "passed")), seed=0)
    with pytest.raises(errors.NotPassedError):
        measure(gate, report=failed)
    for other, got in ((passed(native), "a report on `benchmarked::native`"), ("passed", "str 'passed'")):
        with pytest.raises(errors.UsageError, match="the report must be about the operator") as raised:
            measure(gate, report=other)
        assert raised.value.got == got


@pytest.mark.slow
def test_gradients_that_could_not_be_checked_are_not_timed(measure: Measure) -> None:
    report = Report(gate.name, (Outcome("forward", "passed"), Outcome("gradient", "skipped", "why")), seed=0)
    found = measure(gate, report=report)
    assert found.cases[-1].directions == ("forward",)
    assert "its gradients could not be checked: only forward is timed" in found.remarks


def test_a_reference_that_raises_at_a_size_is_told(measure: Measure) -> None:
    with pytest.raises(errors.SampleError, match=r"its reference raises RuntimeError at x \[3\]") as raised:
        measure(unshaped, samples=[(torch.ones(3), torch.ones(2, 4))])
    assert "give valid calls with" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("options", "problem", "argument"),
    [
        ({"effort": "lazy"}, "there is no such level of effort", "effort"),
        ({"baselines": [len]}, "baselines must be functions by name", "baselines"),
        ({"baselines": {"sum": 3}}, "baselines must be functions by name", "baselines"),
        ({"baselines": {"": len}}, "baselines must be functions by name", "baselines"),
        ({"baselines": {"compiled": len}}, "a baseline must not be named `compiled`", "baselines"),
        ({"directions": []}, "`directions` must be directions", "directions"),
        ({"directions": ["sideways"]}, "`directions` must be directions", "directions"),
        ({"directions": 3}, "`directions` must be directions", "directions"),
        ({"dtypes": []}, "`dtypes` must be floating dtypes", "dtypes"),
        ({"dtypes": torch.int64}, "`dtypes` must be floating dtypes", "dtypes"),
        ({"dtypes": ["float32"]}, "`dtypes` must be floating dtypes", "dtypes"),
        ({"dtypes": 32}, "`dtypes` must be floating dtypes", "dtypes"),
        ({"threads": 0}, "the number of threads must be positive", "threads"),
        ({"threads": 1.5}, "the number of threads must be positive", "threads"),
        ({"threads": True}, "the number of threads must be positive", "threads"),
        ({"device": "meta"}, "nothing can be timed on the device `meta` here", "device"),
    ],
)
def test_bad_arguments_are_refused(
    measure: Measure, options: dict[str, Any], problem: str, argument: str
) -> None:
    with pytest.raises(errors.UsageError) as raised:
        measure(gate, **options)
    assert (raised.value.problem, raised.value.argument) == (problem, argument)
    assert raised.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_timed(measure: Measure) -> None:
    with pytest.raises(errors.UsageError, match="nothing can be timed on the device `cuda` here"):
        measure(gate, device="cuda")
    with pytest.raises(errors.DeviceNameError):
        measure(gate, device="gpu")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, by: Any) -> Any:
        ctx.by = by
        if by < 0:
            raise ValueError("negative")
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None


def test_an_adopted_class_that_was_never_called_learns_its_types_from_samples(measure: Measure) -> None:
    scaled = opsmith.adopt(Scaled, "session::scaled")
    with pytest.raises(errors.NotPassedError, match="it does not run on its samples") as raised:
        measure(scaled, samples=[(torch.ones(4), -2.0)])
    assert (raised.value.got, raised.value.operator) == ("ValueError: negative", "session::scaled")
    assert str(raised.value.where).startswith(__file__)
    assert measure(scaled, samples=[(torch.ones(4), 2.0)]).cases[-1].arguments == ("x [4]", "by=2.0")


@pytest.mark.parametrize("given", [len, torch.nn.functional.relu, None])
def test_what_is_no_operator_is_refused(given: Any) -> None:
    with pytest.raises(errors.UsageError, match="only an operator of opsmith can be benchmarked") as raised:
        opsmith.benchmark(given)
    assert "opsmith.adopt" in (raised.value.hint or "")


@pytest.mark.slow
def test_arguments_by_keyword_reach_everyone(measure: Measure) -> None:
    @opsmith.operator("session::keyword")
    def keyword(x: Tensor, *, by: float) -> Tensor:
        return x * by

    keyword.samples(lambda make: [make.call(make(5), by=3.0)])
    case = measure(keyword, baselines={"baseline": lambda x, by: x * by}).cases[-1]
    assert left_out(case) == {}
    assert case.arguments[-1] == "by=3.0"
    assert measure(windows).cases[-1].arguments[-1] == "times=2"


@pytest.mark.slow
@pytest.mark.compile
def test_the_compiled_reference_is_timed_and_its_compiling_is_told_apart(measure: Measure) -> None:
    found = measure(gate, compiled=True, sizes={"B M": 9}, memory=True)
    assert ("compiled", "both") in timed(found.cases[-1])
    for case in found.cases:
        (compiled,) = (each for each in case.contenders if each.kind == "compiled")
        assert compiled.left_out == ""
        assert (compiled.compile_s or 0) > max(
            max(each.seconds) for each in case.timings if each.contender == "compiled"
        )


@pytest.mark.slow
@pytest.mark.compile
def test_every_size_is_compiled_anew_beyond_the_forms_that_torch_keeps() -> None:
    traced: list[bool] = []

    def doubled(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * 3
        return x * 2

    # torch compiles so many forms of one function, and then runs it as it is.
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(3, 7):
            traced.append(bool((fresh_compiled(doubled)(torch.ones(size)) == 3).all()))
    assert all(traced)


@pytest.mark.slow
@pytest.mark.compile
def test_a_reference_that_computes_something_else_where_it_is_compiled_is_told(measure: Measure) -> None:
    @opsmith.operator("session::uncompiled")
    def uncompiled(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * 3
        return x * 2

    uncompiled.samples(lambda make: [(make(4),)])
    case = measure(uncompiled, compiled=True, directions=["forward"]).cases[-1]
    assert left_out(case)["compiled"].startswith("it computes something else: its result: at [")
    assert ("operator", "forward") in timed(case)


@pytest.mark.gpu
def test_on_a_gpu_everyone_is_timed_there(measure: Measure) -> None:
    found = measure(gate, device="cuda", memory=True)
    case = found.cases[-1]
    assert case.device == "cuda"
    assert left_out(case) == {}
    assert all(each.peak is not None for each in case.memory)
    assert {each.device for each in found.ceilings} == {"cuda"}
