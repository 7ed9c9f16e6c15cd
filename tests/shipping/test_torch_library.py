"""Libraries that compute operators without Python: called in a process that never imports opsmith."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from served_operators import EVERY, add_into, combined, doubled_channels, increase_, moments, scaled
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.build.processor import levels
from opsmith.core.samples import Make, samples_of
from opsmith.core.shape_samples import samples_for
from opsmith.core.tensors import map_tensors
from opsmith.shipping import TorchLibrary, build_torch_library
from opsmith.torch_library.registration import HIDDEN_SUFFIX

pytestmark = pytest.mark.slow  # each C++ library takes ten seconds

CALLER = Path(__file__).parent / "call_served.py"
x = torch.arange(12.0).reshape(3, 4) - 5
image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
wide = torch.arange(40.0).reshape(5, 8) / 7

CALLS: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "a default": (scaled, [x], {}),
    "an optional tensor": (scaled, [x, 0.5, torch.arange(4.0)], {}),
    "an optional tensor by name": (scaled, [x], {"shift": wide[0, ::2]}),
    "another dtype": (scaled, [x.double(), 0.5, torch.arange(4.0).double()], {}),
    "one dimension": (scaled, [x[0]], {}),
    "four dimensions": (scaled, [image, 3.0, torch.arange(5.0)], {}),
    "rows of a wider tensor": (scaled, [wide[:, 1:5]], {}),
    "each second element": (scaled, [wide[::2, ::2]], {}),
    "no elements": (scaled, [x[:0]], {}),
    "rows without elements": (scaled, [x[:, :0]], {}),
    "a dimension of one": (scaled, [x[:, :1]], {}),
    "several results": (moments, [x], {}),
    "names alone": (moments, [x], {"offset": 1, "absolute": True, "mode": "mean"}),
    "a turned tensor": (moments, [x.T], {"mode": "mean"}),
    "an expanded tensor": (moments, [x[:1].expand(3, 4)], {}),
    "lists": (combined, [[x, wide[:, 4:]], [0.5, 2.0], [2, 0], [False, True]], {}),
    "turned tensors in a list": (combined, [[x.T, x.T], [1.0, 1.0], [1, 3], [True, True]], {}),
    "in place": (increase_, [x, 2.5], {}),
    "in place, copied and back": (increase_, [wide[:, ::2], 2.5], {}),
    "in place, without a result": (add_into, [x[0], wide[0, ::2]], {}),
    "in place, rows that interleave": (increase_, [torch.zeros(9).as_strided((2, 3), (3, 2)), 2.5], {}),
    "in place, rows": (add_into, [x[0], x[1]], {}),
    "in place, without elements": (add_into, [x[0, :0], x[0, :0]], {}),
    "channels last": (doubled_channels, [image.contiguous(memory_format=torch.channels_last)], {}),
    "channels first": (doubled_channels, [image], {}),
    "one channel": (doubled_channels, [image[:, :1]], {}),
    "gaps and channels last": (doubled_channels, [image[:, :, ::2].transpose(1, 3)], {}),
}
inference = torch.ones(2)

REFUSED: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "sizes": ("served::scaled", [x, 1.0, torch.ones(3)], {}, "its tensors do not fit one another"),
    "a layout": ("served::scaled", [x.T], {}, "only Python knows the layout of its results"),
    "an overlap": (
        "served::scaled",
        [torch.ones(9).as_strided((3, 4), (2, 1))],
        {},
        "expected: strides that decrease",
    ),
    "a dtype": ("served::scaled", [x.int()], {}, "expected: float32 or float64\n  got: int32"),
    "a dtype, with two kernels": (
        "served::narrow",
        [x[0]],
        {},
        "expected: bfloat16 or float16\n  got: float32",
    ),
    "mixed dtypes": ("served::scaled", [x, 1.0, torch.ones(4).double()], {}, "argument: shift"),
    "dimensions": ("served::moments", [x[0]], {}, "expected: 2 dimensions\n  got: 1 dimension\n"),
    "an exception": ("served::scaled", [x, 7.0], {}, "the kernel threw: `by` is 7, of all numbers"),
    "sizes that throw": ("served::moments", [x], {"offset": 3}, "the kernel threw: offset 3 leaves no row"),
    "sizes that no memory holds": (
        "served::moments",
        [x],
        {"offset": -(2**62)},
        "its kernel cannot write a result of the computed sizes\n  expected: sizes that fit into memory\n"
        f"  got: [{2**62}]\n  hint: check the sizes of its tensors, and `sizes` of its kernel",
    ),
    "memory that torch does not give": (
        "served::moments",
        [x],
        {"offset": -(2**50)},
        "torch failed: aoti_torch_empty_strided",
    ),
    # The plan of rows is known by now: it serves other memory, too.
    "one tensor twice": ("served::add_into", [x[0], x[0]], {}, "shares elements with another argument"),
    "expanded memory": ("served::increase_", [x[:1].expand(3, 4)], {}, "share the same memory"),
    "overlapping rows": (
        "served::increase_",
        [torch.zeros(5).as_strided((3, 3), (1, 1))],
        {},
        "share the same memory\n  argument: x\n  expected: a tensor that is not expanded\n"
        "  got: sizes [3, 3], strides [1, 1]",
    ),
    "memory that cannot be copied": (
        "served::add_into",
        [wide[0, ::2], x[0]],
        {},
        "expected: contiguous memory",
    ),
    "sizes, in place": ("served::add_into", [torch.zeros(3), torch.ones(1)], {}, "do not fit one another"),
}


def call_in_child(
    library: Path, cases: list[Any], folder: Path, python: str = sys.executable
) -> tuple[str, list[Any]]:
    """Version of torch, and outcome of each call: results and arguments afterwards, or a message."""
    torch.save(cases, folder / "cases.pt")
    command = [python, str(CALLER), str(library), str(folder / "cases.pt"), str(folder / "outcomes.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    version, outcomes = torch.load(folder / "outcomes.pt")
    if not version.startswith(
        ("2.11", "2.12")
    ):  # these print each exception that passes through a C function
        assert done.stderr == ""
    return version, outcomes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> TorchLibrary:
    return build_torch_library(EVERY, tmp_path_factory.mktemp("library") / "libserved.so")


@pytest.fixture(scope="module")
def outcomes(library: TorchLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls = {key: (operator.name, args, kwargs) for key, (operator, args, kwargs) in CALLS.items()}
    calls |= {key: (name, args, kwargs) for key, (name, args, kwargs, _) in REFUSED.items()}
    calls["hidden"] = (moments.name + HIDDEN_SUFFIX, [x], {"offset": 1})
    _, found = call_in_child(library.path, list(calls.values()), tmp_path_factory.mktemp("calls"))
    return dict(zip(calls, found, strict=True))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    assert expected.is_contiguous(), "compiled code has these strides"


@pytest.mark.parametrize("call", CALLS)
def test_a_call_returns_what_the_reference_does(outcomes: dict[str, Any], call: str) -> None:
    operator, given, kwargs = CALLS[call]
    assert not isinstance(outcomes[call], str), outcomes[call]
    results, written = outcomes[call]
    args = copy.deepcopy(given)
    expected = operator.reference(*args, **kwargs)
    schema = operator.specification.schema
    if schema.returns is not None:
        assert results[0].data_ptr() == written[0].data_ptr()
    elif schema.results:
        listed = list(expected) if isinstance(expected, tuple) else [expected]
        for found, position in zip(results, schema.visible, strict=True):
            same(found, listed[position])
    else:
        assert results == []
    torch.testing.assert_close(written, args)


def test_hidden_results_have_an_operator_of_their_own(outcomes: dict[str, Any]) -> None:
    results, _ = outcomes["hidden"]
    for found, expected in zip(results, moments.reference(x, offset=1), strict=True):
        same(found, expected)


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_is_refused_by_name(outcomes: dict[str, Any], call: str) -> None:
    name, _, _, message = REFUSED[call]
    assert outcomes[call].startswith(
        f"{name}: " if name != "served::increase_" else "served::increase__void: "
    )
    assert message in outcomes[call]


def test_the_library_names_what_it_serves(library: TorchLibrary) -> None:
    names = ["scaled", "moments", f"moments{HIDDEN_SUFFIX}", "combined", "increase__void", "add_into"]
    assert library.served == (*(f"served::{name}" for name in names), "served::doubled_channels")
    assert library.inlined == ()


SAME = """
void {name}(Contiguous<const float, 2> x, Contiguous<float, 2> y) {{
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i];
}}
"""


def declared(name: str, function: Any = None, **options: Any) -> Any:
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    reference = function or copied
    reference.__qualname__ = name
    return opsmith.operator(f"unserved::{name}", **options)(reference)


def turned(x: Tensor) -> Tensor:
    return x.T.clone(memory_format=torch.preserve_format)


def in_python(x: Tensor) -> Tensor:
    return x.clone()


def one_of_each() -> list[Any]:
    """Operators that no library serves."""
    random = declared("random", random=True)
    python = declared("python")
    python.kernel("cpu", in_python)
    opaque = declared("opaque", opaque=True)
    kept = declared("kept", inline=False)
    unsized = declared("unsized")
    transposed = declared("transposed", turned, shapes="x: N M -> M N")
    without_samples = declared("without_samples", shapes="x: N M -> N M")
    without_samples.samples(lambda make: [])
    for operator in (random, unsized, transposed, without_samples):
        operator.kernel("cpu", cpp=SAME.format(name=operator.specification.short_name))
    return [random, python, opaque, kept, unsized, transposed, without_samples]


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    with pytest.raises(errors.ServingError) as caught:
        build_torch_library([*one_of_each(), scaled], path)
    message = str(caught.value)
    assert "7 of 8 operators cannot be served without Python" in message
    for name, reason in {
        "random": "it draws from torch's random state",
        "python": "is in Python",
        "opaque": "it has no kernel in C++, and compiled code does not contain its reference",
        "kept": "it has no kernel in C++, and compiled code does not contain its reference",
        "unsized": "only Python knows the sizes of its results: give the operator `shapes=`, or its kernel "
        "`sizes` in C++",
        "transposed": "no samples show that its results are contiguous",
        "without_samples": "no samples show that its results are contiguous",
    }.items():
        (line,) = [line for line in message.splitlines() if f"unserved::{name}, " in line]
        assert reason in line
    assert "served::scaled" not in message
    assert not path.exists()


def test_a_class_that_was_adopted_is_refused(tmp_path: Path) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    adopted = opsmith.adopt(Twice, "unserved::twice", signature="(x: Tensor) -> Tensor")
    with pytest.raises(
        errors.ServingError, match="it is adopted from existing code that already computes it"
    ):
        build_torch_library([adopted], tmp_path / "lib.so")


def test_an_operator_without_a_kernel_is_left_to_compiled_code(tmp_path: Path) -> None:
    plain = declared("plain")
    assert build_torch_library([plain, add_into], tmp_path / "lib.so").inlined == ("unserved::plain",)
    with pytest.raises(errors.ServingError, match="none of the operators has a kernel"):
        build_torch_library([plain], tmp_path / "lib.so")


def test_flags_for_other_instructions_are_refused_for_a_level(tmp_path: Path) -> None:
    wide = declared("wide", shapes="x: N M -> N M")
    wide.kernel("cpu", cpp=SAME.format(name="wide"), flags=["-mavx2"])
    with pytest.raises(errors.UsageError, match="has the flag `-mavx2`, which some processors"):
        build_torch_library([wide], tmp_path / "lib.so", processor=next(iter(levels())))


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="there is no folder"):
        build_torch_library([scaled], tmp_path / "none" / "lib.so")


def test_the_library_needs_torch_alone(library: TorchLibrary) -> None:
    """It has no other path of this machine, no symbol of Python and no name of torch's C++ interface."""
    content = library.path.read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"_Py" not in content
    assert b"_ZN3c10" not in content
    assert b"_ZN2at" not in content


BUNDLED = [
    opsmith.ops.involution,
    opsmith.find_operator("opsmith::involution_input_gradient"),
    opsmith.find_operator("opsmith::involution_weight_gradient"),
    opsmith.ops.rms_norm,
    opsmith.ops.add_rms_norm_,
    opsmith.ops.rope_,
    opsmith.ops.swiglu_,
    opsmith.ops.write_kv_cache,
    opsmith.ops.paged_attention,
    opsmith.ops.adamw_,
]


@pytest.mark.slow
def test_bundled_operators_compute_what_their_references_do(tmp_path: Path) -> None:
    library = build_torch_library(BUNDLED, tmp_path / "libbundled.so")
    cases: list[Any] = []
    expected: list[Any] = []
    for operator in BUNDLED:
        schema = operator.specification.schema
        source = samples_for(operator.specification)
        for call in samples_of(source, Make(torch.float32), schema, operator.name):
            values = schema.call_values(call.args, call.kwargs)
            for lay_out in (Tensor.contiguous, lambda x: x.mT.contiguous().mT if x.dim() > 1 else x):
                laid = map_tensors(lay_out, values)
                given = schema.dispatched(laid)
                cases.append((operator.specification.dispatched_name, *given))
                written = copy.deepcopy(laid)
                positional, named = schema.split(written)
                results = operator.reference(*positional, **named)
                expected.append((results, written))
    _, outcomes = call_in_child(library.path, cases, tmp_path)
    refused = 0
    for case, outcome, (results, written) in zip(cases, outcomes, expected, strict=True):
        if isinstance(outcome, str):
            refused += 1
            assert "only Python knows the layout of its results" in outcome, case[0]
            continue
        operator = opsmith.find_operator(case[0].removesuffix("_void"))
        schema = operator.specification.schema
        listed = list(results) if isinstance(results, tuple) else [results]
        found, args = outcome
        if schema.results:
            for one, position in zip(found, schema.visible, strict=True):
                torch.testing.assert_close(one, listed[position])
                assert one.is_contiguous()
        torch.testing.assert_close(args, schema.split(written)[0])
    assert refused < len(cases) / 4
