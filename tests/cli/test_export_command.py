"""`opsmith export` writes a file of ONNX, and says how it compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from typer.testing import Result

from opsmith.build import toolchain

SOURCE = '''
import torch, opsmith
from torch import Tensor

@opsmith.operator("{space}::twice")
def twice(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by

twice.samples(lambda make: [(make(3, 2), 3.0)])

@opsmith.operator("{space}::bare")
def bare(x: Tensor) -> Tensor:
    return x + x

@opsmith.operator("{space}::rough")
def rough(x: Tensor) -> Tensor:
    return x + x

rough.kernel("cpu", lambda x: x * 2.01)
rough.samples(lambda make: [(make(3),)])

class Network(torch.nn.Module):
    def forward(self, x, *, shift):
        return twice(x) + shift

def model():
    return Network().eval(), (torch.ones(4, 3),), {"shift": torch.ones(3)}

@opsmith.operator("{space}::native", shapes="x: n -> n")
def native(x: Tensor) -> Tensor:
    return -x

native.kernel("cpu", cpp="""
void native(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  for (int64_t i = 0; i < x.size(0); i++) y[i] = -x[i];
}
""")
native.samples(lambda make: [(make(3),)])

def nothing():
    return 3
'''


@pytest.fixture
def file(write: Callable[..., Path]) -> Path:
    return write(SOURCE)


def test_an_operator_as_its_first_sample_calls_it(
    file: Path, opsmith: Callable[..., Result], tmp_path: Path, space: str
) -> None:
    path = tmp_path / "twice.onnx"
    done = opsmith("export", f"{file}:twice", str(path), "--dynamic", "x:0=rows")
    assert done.exit_code == 0, done.output
    assert f"nodes: 1 of {space}::twice" in done.stdout
    assert "result at rows 4: off by 0.0e+00" in done.stdout
    (node,) = onnx.load(path).graph.node
    assert (node.domain, node.op_type, node.attribute[0].f) == (space, "twice", 3.0)


@pytest.mark.slow
def test_a_model_and_its_arguments_as_json(
    file: Path, opsmith: Callable[..., Result], tmp_path: Path, space: str
) -> None:
    path = tmp_path / "model.onnx"
    done = opsmith("export", f"{file}:model", str(path), "--json", "--body", "inline", "--opset", "18")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["schema"] == 2
    assert (told["path"], told["body"], told["opset"]) == (str(path), "inline", 18)
    assert (told["inputs"], told["outputs"]) == (["x", "shift"], ["output"])
    assert (told["nodes"], told["calls"]) == ({}, {f"{space}::twice": 1})
    assert (told["verified"], told["unverified"]) == (True, "")
    assert [each["difference"] for each in told["comparisons"]] == [0.0] * 3
    assert len({each["values"] for each in told["comparisons"]}) == 3


@pytest.mark.slow
def test_a_library_of_kernels(file: Path, opsmith: Callable[..., Result], tmp_path: Path, space: str) -> None:
    path, library = tmp_path / "native.onnx", tmp_path / "ops.so"
    done = opsmith("export", f"{file}:native", str(path), "--library", str(library), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["library"], told["native"]) == (str(library), {f"{space}::native": 1})
    assert told["left_to_bodies"] == {}
    assert [each["library"] for each in told["comparisons"]] == [False] * 3 + [True] * 3
    assert library.read_bytes().startswith(b"\x7fELF")
    node = opsmith(
        "export", f"{file}:native", str(path), "--library", str(library), "--json", "--body", "node"
    )
    assert (node.exit_code, json.loads(node.stdout)["verified"]) == (0, True)
    done = opsmith("export", f"{file}:twice", str(path), "--library", str(library))
    assert done.exit_code == 1
    assert "no operator of the model can be packaged into a library" in done.stderr


def test_a_file_that_onnx_runtime_cannot_load_has_status_1(
    file: Path, opsmith: Callable[..., Result], tmp_path: Path, space: str
) -> None:
    path = tmp_path / "node.onnx"
    done = opsmith("export", f"{file}:twice", str(path), "--body", "node", "--json")
    assert (done.exit_code, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    assert (told["verified"], told["nodes"], told["comparisons"]) == (False, {f"{space}::twice": 1}, [])
    assert f"{space}:twice(-1) is not a registered function/op" in told["unverified"]
    assert [node.op_type for node in onnx.load(path).graph.node] == ["twice"]
    done = opsmith("export", f"{file}:twice", str(path), "--body", "node")
    assert (done.exit_code, done.stderr) == (1, "")
    assert f"  not verified: {told['unverified']}" in done.stdout
    assert "off by" not in done.stdout
    done = opsmith("export", f"{file}:twice", str(path), "--body", "node", "--no-verify")
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:.*the reference runs in place of its kernel:RuntimeWarning")
def test_a_library_without_a_compiler_has_status_2(
    file: Path, opsmith: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    toolchain._toolchain.cache_clear()
    path, library = tmp_path / "native.onnx", tmp_path / "ops.so"
    done = opsmith(
        "export", f"{file}:native", str(path), "--library", str(library), "--body", "node", "--json"
    )
    toolchain._toolchain.cache_clear()
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"].startswith("there is no C++ compiler")
    assert "there is no C++ compiler" in done.stderr
    assert not path.exists()
    assert not library.exists()


@pytest.mark.slow
def test_a_file_that_differs_has_status_1(file: Path, opsmith: Callable[..., Result], tmp_path: Path) -> None:
    done = opsmith("export", f"{file}:rough", str(tmp_path / "rough.onnx"))
    assert done.exit_code == 1
    assert "the file and PyTorch compute different values of `result`" in done.stderr
    assert not (tmp_path / "rough.onnx").exists()
    done = opsmith("export", f"{file}:rough", str(tmp_path / "rough.onnx"), "--no-verify")
    assert done.exit_code == 0
    assert "not verified: `verify=False`" in done.stdout


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("", (), "must name an object to export"),
        (":nothing", (), "must return a model with its arguments"),
        (":bare", (), "it is exported with the arguments of its first sample, but it has no samples"),
        (":absent", (), "absent"),
        (":twice", ("--dynamic", "x=rows"), "`x=rows` must name a dynamic axis"),
        (":twice", ("--body", "outline"), "unknown form of an operator's body"),
    ],
    ids=["name", "function", "samples", "absent", "dynamic", "body"],
)
def test_usage_errors_have_status_2(
    file: Path, opsmith: Callable[..., Result], tmp_path: Path, name: str, more: tuple[str, ...], says: str
) -> None:
    done = opsmith("export", f"{file}{name}", str(tmp_path / "x.onnx"), *more)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
