"""Libraries that launch CUDA kernels without Python: a driver on the CPU emulates what it is given."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import driver_file
from served_cuda_operators import declare
from torch import Tensor

import opsmith
from opsmith import errors
from opsmith.kernels.runtime import torch_library
from opsmith.shipping import TorchLibrary, build_torch_library
from opsmith.torch_library.served_libraries import ServedLibrary, is_same, operator_digest

HERE = Path(__file__).parent
OPERATORS = declare("served_cuda")
x = torch.arange(12.0).reshape(3, 4) - 5
image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
told = [x[0], [x, x[0], x[0, 0]], [5, 6, 7], [0.5, 2.0], [True, False], 2**40]

CALLS: dict[str, tuple[str, list[Any]]] = {
    "a default": ("scaled", [x]),
    "an optional tensor": ("scaled", [x, 0.5, torch.arange(8.0)[::2]]),
    "another dtype": ("scaled", [x.half(), 0.5, torch.arange(4.0).half()]),
    "four dimensions": ("scaled", [image, 3.0, torch.arange(5.0)]),
    "turned": ("scaled", [x.T]),
    "nothing to write": ("scaled", [x[:0]]),
    "scratch, constants of four": ("row_sums", [torch.arange(35.0).reshape(7, 5)]),
    "constants of two": ("row_sums", [x[:, :2]]),
    "another view": ("row_sums", [torch.arange(20.0).reshape(5, 4).T]),
    "every kind of argument": ("told", told),
    "all given": ("told", [*told, -4, 0.25, False, -7, 1e-3]),
    "empty lists": ("told", [x[0], [], [], *told[3:]]),
    "in place": ("increase_", [x, 2.5]),
    "in place, copied and back": ("increase_", [x[:, ::2], 2.5]),
    "a result of eight dimensions": ("paired", [torch.arange(2.0).reshape([1] * 6 + [2])]),
    "channels last": ("doubled", [image.contiguous(memory_format=torch.channels_last)]),
    "channels first": ("doubled", [image]),
    "a whole number of more than 53 bits fills a buffer": ("limited", [x[0], 9]),
}
OUTSIDE = "of its CUDA kernel is outside the limits of a GPU\n  expected: "
UNKNOWN = "of its CUDA kernel cannot be computed"
REFUSED: dict[str, tuple[str, list[Any], str]] = {
    "sizes": ("scaled", [x, 1.0, torch.ones(3)], "its tensors do not fit one another"),
    "a dtype": ("scaled", [x.double()], "expected: float32 or float16\n  got: float64"),
    "mixed dtypes": ("scaled", [x, 1.0, torch.ones(4).half()], "argument: shift"),
    "dimensions": (
        "scaled",
        [torch.ones([1] * 9)],
        "argument: x\n  expected: at most 8 dimensions\n  got: 9 dimensions",
    ),
    "dimensions of a result": (
        "paired",
        [torch.ones([1] * 8)],
        "has no room for a result\n  expected: at most 8 dimensions\n  got: 9 dimensions",
    ),
    "constants": (
        "row_sums",
        [x[:, :3]],
        "the library has no instance of its CUDA kernel for these sizes\n  got: WIDE = 3, BYTES = 4\n"
        "  hint: give the operator a sample of these sizes",
    ),
    "a long list": (
        "told",
        [told[0], [x] * 4, *told[2:]],
        "argument: xs\n  expected: a list of at most 3\n  got: 4",
    ),
    "a large int": (
        "told",
        [*told, 2**31],
        "argument: small\n  expected: an int of 32 bits\n  got: 2147483648",
    ),
    "one tensor twice": ("increase_", [x[:1].expand(3, 4)], "share the same memory"),
    "no blocks": (
        "limited",
        [x[0], 0],
        f"`grid` {OUTSIDE}1 to 2147483647 x 65535 x 65535\n  got: 0",
    ),
    "an initial value": (
        "limited",
        [x[0], 1200],
        f"`initial` {UNKNOWN}\n  got: it divides by zero, exceeds 64 bits, or reads a value that",
    ),
    "an initial value of another dtype": (
        "limited",
        [x[0], 77],
        f"`initial` {UNKNOWN}\n  got: 77/2, which is not a whole number",
    ),
    "a block": (
        "limited",
        [x[0], 65],
        f"`block` {OUTSIDE}at most 1024 threads together\n  got: 65 x 1 x 17",
    ),
    "a negative size": (
        "limited",
        [x[0], -4],
        f"`scratch` {UNKNOWN}\n  got: a negative size",
    ),
    "a grid": (
        "doubled",
        [image[:, :, :3]],
        f"`grid` {UNKNOWN}",
    ),
}


def run(library: Path, cases: list[Any], folder: Path) -> list[Any]:
    """The outcome of each call, in a process where the library alone computes."""
    torch.save(cases, folder / "cases.pt")
    driver = driver_file("libcuda.so.1")
    files = [str(each) for each in (driver, library, folder / "cases.pt", folder / "outcomes.pt")]
    done = subprocess.run(
        [sys.executable, str(HERE / "call_served_cuda.py"), *files],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "kernels" / "cuda"), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = torch.load(folder / "outcomes.pt")
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> TorchLibrary:
    """A library that takes tensors on the CPU as those of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torch_library.KEYS, "cuda", "CPU")
        folder = tmp_path_factory.mktemp("library")
        return build_torch_library(OPERATORS.values(), folder / "libserved.so", cuda="sm_80,sm_90")


@pytest.fixture(scope="module")
def outcomes(library: TorchLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    calls = {key: (name, args, "") for key, (name, args, *_) in (*CALLS.items(), *REFUSED.items())}
    calls = {"capture": ("increase_", [x], "capture"), **calls, "failure": ("increase_", [x], "failure")}
    calls["devices"] = ("scaled", [x, 1.0, torch.ones(4, device="meta")], "devices")
    named = [(dispatched(name), args, state) for name, args, state in calls.values()]
    found = run(library.path, named, tmp_path_factory.mktemp("calls"))
    return dict(zip(calls, found, strict=True))


def dispatched(name: str) -> str:
    return OPERATORS[name].name


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_call_returns_what_the_reference_does(outcomes: dict[str, Any], call: str) -> None:
    name, given = CALLS[call]
    assert not isinstance(outcomes[call], str), outcomes[call]
    results, written, launches = outcomes[call]
    args = copy.deepcopy(given)
    expected = OPERATORS[name].reference(*args)
    listed = list(expected) if isinstance(expected, tuple) else [expected]
    for found, wanted in zip(results, listed, strict=True):
        torch.testing.assert_close(found, wanted)
        if name != "increase_":
            assert found.is_contiguous()
    torch.testing.assert_close(written, args)
    assert bool(launches) == (call != "nothing to write")


@pytest.mark.slow
def test_the_launches_are_those_that_the_author_declares(outcomes: dict[str, Any]) -> None:
    assert outcomes["a default"][2] == [("scaled", (2, 1, 1), (8, 1, 1), 0)]
    assert outcomes["an optional tensor"][2] == [("scaled", (6, 1, 1), (8, 1, 1), 0)]
    assert outcomes["scratch, constants of four"][2] == [
        ("partial", (7, 1, 1), (4, 1, 1), 16),
        ("fold", (1, 1, 1), (32, 1, 1), 0),
    ]
    assert outcomes["empty lists"][2] == [("told", (2, 1, 1), (1, 1, 1), 0)]
    assert outcomes["channels first"][2] == [("doubled", (15, 1, 1), (2, 2, 1), 0)]


@pytest.mark.slow
@pytest.mark.parametrize("call", REFUSED)
def test_a_call_is_refused_by_name(outcomes: dict[str, Any], call: str) -> None:
    name, _, message = REFUSED[call]
    suffix = "_void" if name == "increase_" else ""
    assert outcomes[call].startswith(f"{dispatched(name)}{suffix}: ")
    assert message in outcomes[call]


@pytest.mark.slow
def test_a_kernel_is_not_loaded_while_a_graph_is_captured(outcomes: dict[str, Any]) -> None:
    assert (
        "it cannot be loaded while a CUDA graph is captured\n  hint: call the operator once"
        in outcomes["capture"]
    )


@pytest.mark.slow
def test_a_driver_that_refuses_a_launch_is_reported(outcomes: dict[str, Any]) -> None:
    assert outcomes["failure"] == (
        "served_cuda::increase__void: its CUDA kernel is not launched: cuLaunchKernel returns "
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch\n"
        "  got: grid (3, 1, 1), block (4, 1, 1), 0 bytes of shared memory, on sm_90"
    )


@pytest.mark.slow
def test_tensors_on_several_devices_are_refused(outcomes: dict[str, Any]) -> None:
    assert outcomes["devices"] == (
        "served_cuda::scaled: its tensors are on several devices\n"
        "  expected: all tensors on one GPU\n"
        "  hint: move them to the same device"
    )


@pytest.mark.slow
def test_a_library_names_what_it_computes_on_gpus(tmp_path: Path) -> None:
    made = build_torch_library([OPERATORS["scaled"]], tmp_path / "lib.so", cuda="sm_80")
    assert (made.served, made.cuda) == (("served_cuda::scaled",),) * 2
    program = """
import sys, torch
torch.ops.load_library(sys.argv[1])
for key in ("CUDA", "CPU"):
    print(key, torch._C._dispatch_has_kernel_for_dispatch_key("served_cuda::scaled", key))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(made.path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "CUDA True\nCPU False\n", done.stderr


NOT_LAUNCHED = "served_cuda::scaled: its CUDA kernel is not launched: "
CALL = """
import ctypes, os, sys, torch
library, *given = sys.argv[1:]
torch.ops.load_library(library)
if given:
    stream, part, name = given
    ctypes.CDLL(stream, ctypes.RTLD_GLOBAL)
for number in range(1 + bool(given)):
    try:
        torch.ops.served_cuda.scaled(torch.ones(2, 2))
    except RuntimeError as error:
        print(error)
    if given and not number:
        os.replace(part, name)
"""


def printed_by_calls(*arguments: Path, folder: Path) -> list[str]:
    """What the errors of calls say, in a process that looks for the driver in a folder first."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LD_LIBRARY_PATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def c_library(text: str, path: Path) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=text, text=True, check=True)
    return path


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a part for CUDA")
def test_without_torch_for_cuda_a_call_says_so(library: TorchLibrary, tmp_path: Path) -> None:
    assert printed_by_calls(library.path, folder=tmp_path)[0] == (
        f"{NOT_LAUNCHED}this torch has no part for CUDA"
    )


@pytest.mark.slow
def test_without_a_driver_or_with_another_a_call_says_so(library: TorchLibrary, tmp_path: Path) -> None:
    hidden = tmp_path / "libcuda.so.1"
    for path in (hidden, tmp_path / "libcuda.so"):
        path.write_text("no library")
    stream = "int aoti_torch_get_current_cuda_stream(int at, void** found) { *found = 0; return 0; }"
    given = c_library(stream, tmp_path / "stream.so"), c_library("int cuInit;", tmp_path / "part.so")
    lines = printed_by_calls(library.path, *given, hidden, folder=tmp_path)
    errors = [at for at, line in enumerate(lines) if line.startswith(NOT_LAUNCHED)]
    first, second = (lines[at].removeprefix(NOT_LAUNCHED) for at in errors)
    assert first == "there is no CUDA driver"
    assert lines[1] == "  expected: libcuda.so.1"
    assert lines[2].startswith(f"  got: {tmp_path / 'libcuda.so'}: ")
    assert second == "the CUDA driver has no function `cuDeviceGet`"


@pytest.mark.slow
def test_a_gpu_that_no_image_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_library.KEYS, "cuda", "CPU")
    made = build_torch_library([OPERATORS["increase_"]], tmp_path / "lib.so", cuda="sm_100a")
    (found,) = run(made.path, [(dispatched("increase_"), [x], "")], tmp_path)
    assert "the library has no code that this GPU runs\n  expected: one of sm_100a\n  got: sm_90\n" in found


def in_python(x: Tensor) -> Tensor:
    return x.clone()


def one_of_each() -> list[Any]:
    """Operators whose CUDA kernels no library holds."""
    text = "__global__ void f(Contiguous<const float> x, Contiguous<float> y) { y[0] = x[0]; }"
    made = {}
    for name, options in {
        "by_function": {"grid": lambda x: x.numel()},
        "constants": {"grid": 1, "constants": {"N": lambda x: 1}},
        "scratch": {"grid": 1, "scratch": {"s": (lambda x: x.numel(), torch.float32)}},
        "unsized": {"grid": 1},
        "large": {"grid": 2**63},
        "several": {"grid": 1, "initial": {"result": "(1, 2)"}},
        "python": {},
    }.items():

        def copied(x: Tensor) -> Tensor:
            return x.clone()

        copied.__qualname__ = name
        shapes = {} if name == "unsized" else {"shapes": "x: N -> N"}
        operator: Any = opsmith.operator(f"unserved_cuda::{name}", **shapes)(copied)
        if name == "python":
            operator.kernel("cuda", in_python)
        else:
            template = "template <int N> " if name == "constants" else ""
            operator.kernel("cuda", cuda=template + text, entry="f", **options)
        made[name] = operator

    @opsmith.operator("unserved_cuda::reads_text", shapes="x: N -> N")
    def reads_text(x: Tensor, mode: str = "copy") -> Tensor:
        return x.clone()

    launch = opsmith.Launch("f(x, result)", grid="len(mode)")
    reads_text.kernel("cuda", cuda=text, launches=[launch])

    @opsmith.operator("unserved_cuda::reads_float", shapes="x: N -> N")
    def reads_float(x: Tensor, by: float = 2.0) -> Tensor:
        return x.clone()

    launch = opsmith.Launch("f(x, result)", grid="ceil(x.numel / by)")
    reads_float.kernel("cuda", cuda=text, launches=[launch])
    return [*made.values(), reads_text, reads_float]


def test_what_a_library_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    operators = one_of_each()
    with pytest.raises(errors.ServingError) as caught:
        build_torch_library([*operators, OPERATORS["scaled"]], tmp_path / "lib.so", cuda="sm_90")
    message = str(caught.value)
    assert "9 of 10 operators cannot be served without Python" in message
    for name, reason in {
        "by_function": "is a function in Python: write it as an expression, such as `ceil(result.numel / "
        "256)`",
        "constants": "`constants['N']` of its CUDA kernel at ",
        "scratch": "`scratch['s']` of its CUDA kernel at ",
        "large": "has a number of more than 64 bits",
        "unsized": "only Python knows the sizes of its results on a GPU: give the operator `shapes=`",
        "python": "is in Python",
        "reads_text": "has `len(mode)`, which C++ does not compute: it takes arguments that are whole",
        "reads_float": "has `by`, which C++ does not compute",
        "several": "has `(1, 2)`, which C++ does not compute",
    }.items():
        (line,) = [line for line in message.splitlines() if f"unserved_cuda::{name}, " in line]
        assert reason in line


def test_python_knows_a_library_with_kernels_for_gpus_and_one_without() -> None:
    specification = OPERATORS["scaled"].specification
    digests = [operator_digest(specification, cuda=cuda) for cuda in (False, True)]
    assert digests[0] != digests[1]
    assert all(is_same(specification, ServedLibrary(each, "lib.so")) for each in digests)
    assert not is_same(
        specification, ServedLibrary(operator_digest(OPERATORS["told"].specification), "lib.so")
    )
