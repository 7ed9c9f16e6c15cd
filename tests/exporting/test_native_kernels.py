"""A library of an operator's kernels: ONNX Runtime uses them in the place of bodies, without torch."""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_operators as of
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_operators import Calls
from torch import Tensor

import opsmith
import opsmith.onnx
from opsmith.exporting import Export
from opsmith.exporting.translation import attribute, bits
from opsmith.ops.rednet import rednet

Native = Callable[..., Export]
N = {"x": {0: "n"}}
SLOW = pytest.mark.slow


@pytest.fixture
def native(tmp_path: Path) -> Native:
    """Export a model with a library, both beside one another."""

    def native(model: Any, args: Any, **options: Any) -> Export:
        paths = [tmp_path / "model.onnx", tmp_path / "ops.so"]
        made = opsmith.export_onnx(model, args, paths[0], library=paths[1], **options)
        assert sorted(tmp_path.iterdir()) == paths
        return made

    return native


def loaded(made: Export) -> opsmith.onnx.OnnxModule:
    return opsmith.onnx.load(made.path, library=made.library)


def session_of(made: Export, model: bytes) -> onnxruntime.InferenceSession:
    """A session of stock ONNX Runtime with the library, which writes no errors."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(made.library))
    return onnxruntime.InferenceSession(model, options)


def close(got: Any, want: Any) -> bool:
    pairs = zip(*((each,) if isinstance(each, Tensor) else each for each in (got, want)), strict=True)
    return all(
        one.dtype == two.dtype and torch.allclose(one, two, atol=1e-6, rtol=1e-5) for one, two in pairs
    )


class Three(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return of.scaled(of.scaled(x, 0.1), 0.3, x) + torch.relu(of.halved(x))


WITHOUT_TORCH = """
import json, sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.register_custom_ops_library(sys.argv[2])
options.optimized_model_filepath = sys.argv[3]
session = onnxruntime.InferenceSession(sys.argv[1], options)
x = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
told = [session.run(None, {"x": x})[0].tolist()]
for count in (400, 333):
    try:
        session.run(None, {"x": numpy.ones((count, 3), numpy.float32)})
    except Exception as error:
        told.append(str(error))
maps = open("/proc/self/maps").read()
told += ["torch" in sys.modules, "libtorch" in maps]
print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_runtime_without_torch_uses_the_kernels_and_tells_their_errors(
    native: Native, tmp_path: Path
) -> None:
    made = native(Three().eval(), torch.randn(4, 3), dynamic=N)
    assert made.native == {"native::scaled": 2, "native::halved": 1}
    assert [each.library for each in made.comparisons] == [False] * 5 + [True] * 5
    assert made.left_to_bodies == {}
    assert "library: " in str(made)
    assert ", by the library: off by" in str(made)
    told = made.to_dict()
    assert (told["library"], told["native"]) == (str(made.library), dict(made.native))
    arguments = [str(made.path), str(made.library), str(tmp_path / "optimised.onnx")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    got, many, thrown, *torch_there = json.loads(done.stdout)
    assert close(torch.tensor(got), Three()(torch.arange(6.0).reshape(2, 3)))
    assert "native::scaled: the kernel threw: it takes fewer than 1000 numbers" in many
    assert "native::scaled: the kernel threw: it threw something that is no std::exception" in thrown
    assert torch_there == [False, False]
    graph = onnx.load(tmp_path / "optimised.onnx").graph
    types = [node.op_type for node in graph.node if node.domain == "native"]
    assert sorted(types) == ["halved", "scaled", "scaled_2"]
    x = torch.randn(5, 3)
    assert close(opsmith.onnx.load(made.path)(x), Three()(x))  # by its bodies
    again = pickle.loads(pickle.dumps(loaded(made)))
    assert again.library == made.library
    assert close(again(x), Three()(x))


def test_numbers_that_single_precision_changes_have_their_bits_beside_them() -> None:
    one, several = (
        of.scaled.specification.schema.by_name["by"],
        of.described.specification.schema.by_name["weights"],
    )
    made = bits(one, 0.1)
    assert (made.name, struct.pack("<q", made.as_int())) == ("by_float64_bits", struct.pack("<d", 0.1))
    assert [bits(one, value) for value in (0.5, 3, math.inf, -math.inf, math.nan, None)] == [None] * 6
    largest = bits(one, sys.float_info.max)  # which single precision has as inf
    assert struct.pack("<q", largest.as_int()) == struct.pack("<d", sys.float_info.max)
    assert struct.pack("<2q", *bits(several, [0.5, 0.3]).as_ints()) == struct.pack("<2d", 0.5, 0.3)
    assert bits(of.described.specification.schema.by_name["count"], 16777217) is None


def test_a_text_is_written_as_it_is() -> None:
    specification = of.described.specification
    written = attribute(specification, specification.schema.by_name["word"], "torch.sum")
    assert written.as_string() == "torch.sum"


@SLOW
@pytest.mark.parametrize("body", ["function", "node"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attributes_lists_and_several_results(native: Native, body: str, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            one = of.described([x, y], [0.25, 0.1], [3, 4], [True, False, True], word="süm", missing=0.3)
            two = of.described([x, y, x], [1.0, 0.5, 0.75], [], [], count=5, also=False)
            return (*one, *two)

    args = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype)
    dynamic = {"x": {0: "n"}, "y": {0: "n"}}
    # torch's exporter makes constants of single precision of numbers in bodies.
    made = native(Model().eval(), args, dynamic=dynamic, body=body, verify=dtype == torch.float32)
    assert made.native == {"native::described": 2}
    larger = torch.randn(9, 6).to(dtype), torch.randn(9, 6).to(dtype)
    for got, want in zip(loaded(made)(*larger), Model()(*larger), strict=True):
        eps = 0 if want.dtype == torch.int64 else torch.finfo(dtype).eps
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= 64 * eps


@SLOW
def test_neither_file_says_in_which_folders_it_was_made(native: Native) -> None:
    @opsmith.operator("native::asserting", shapes="x: N -> N")
    def asserting(x: Tensor) -> Tensor:
        return x * 3

    asserting.kernel(
        "cpu",
        cpp="""
#include <cassert>
void asserting(Contiguous<const float, 1> x, Contiguous<float, 1> y) {
  assert(x.size(0) == y.size(0));
  for (int64_t i = 0; i < x.numel(); i++) y[i] = x[i] * 3;
}
""",
    )
    made = native(asserting, torch.randn(4))
    files = [made.path.read_bytes(), Path(made.library or "").read_bytes()]
    assert f"\0{Path(__file__).name}\0".encode() in files[1]
    for folder in (Path(__file__).parent, Path(opsmith.__file__).parent, made.path.parent, Path.home()):
        assert not any(f"{folder}/".encode() in each for each in files)


@SLOW
def test_nodes_of_one_type_with_and_without_a_tensor_in_two_dtypes(native: Native) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return of.scaled(x, 0.5), of.scaled(x, 0.5, x), of.scaled(y, 0.5), of.scaled(y, 0.5, y)

    args = torch.randn(4), torch.randn(5).double()
    made = native(Model().eval(), args, body="node", dynamic=N)
    assert made.native == {"native::scaled": 4}
    assert close(loaded(made)(*args), Model()(*args))


@SLOW
def test_channels_that_lie_side_by_side_and_results_that_nobody_asks_for(native: Native) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return of.pooled(x) + of.pooled(x, (2, 2)) * 2

    made = native(Model().eval(), torch.randn(2, 3, 6, 8), dynamic={"x": {0: "b", 2: "h", 3: "w"}})
    x = torch.randn(3, 3, 4, 10)
    assert close(loaded(made)(x), Model()(x))


@SLOW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_and_sizes_that_nobody_tells_in_cpp(native: Native, dtype: torch.dtype) -> None:
    # Of 0, 1, 2 there are no two other examples in the same range and order.
    args = torch.tensor([2, 0, 5]).to(dtype), torch.tensor([1, 0]).to(dtype)
    dynamic = {"x": {0: "n"}, "y": {0: "m"}}
    made = native(of.joined, args, dynamic=dynamic, body="node")
    assert made.verified
    assert {each.library for each in made.comparisons} == {True}
    larger = torch.arange(7).to(dtype), torch.arange(5).to(dtype)
    assert torch.equal(loaded(made)(*larger), of.joined(*larger))


@SLOW
def test_a_dtype_that_no_kernel_takes_is_left_to_the_body_and_told(native: Native) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return of.single(x), of.halved(x)

    args = torch.randn(4).double(), torch.randn(4)
    made = native(Model().eval(), args)
    assert made.native == {"native::halved": 1}
    assert made.left_to_bodies == {"native::single": "`x` is float64, but the kernel takes float32"}
    assert "by its body: native::single: `x` is float64, but the kernel takes float32" in str(made)
    assert made.to_dict()["left_to_bodies"] == dict(made.left_to_bodies)
    assert close(loaded(made)(*args)[0], args[0] + 1)


@SLOW
def test_operators_that_a_reference_calls(native: Native) -> None:
    made = native(of.nested, torch.randn(4), dynamic=N)
    assert made.native == {}
    assert made.left_to_bodies == {"native::nested": "it has no kernel in C++"}
    types = {(node.domain, node.op_type) for node in onnx.load(made.path).functions[-1].node if node.domain}
    assert types == {("native", "halved"), ("native", "scaled")}
    session = session_of(made, made.path.read_bytes())
    with pytest.raises(Exception, match="native::scaled: the kernel threw: it takes fewer than 1000 numbers"):
        session.run(None, {"x": np.ones(2000, np.float32)})


@SLOW
def test_an_opaque_operator_is_compared_with_the_library(native: Native) -> None:
    made = native(of.opaque, torch.randn(4), body="node", dynamic=N)
    assert made.verified
    x = torch.randn(5)
    assert torch.equal(loaded(made)(x), 2 * x)


@SLOW
def test_shapes_that_are_not_those_declared(native: Native) -> None:
    made = native(Calls(lambda x, y: of.joined(x, y)), (torch.randn(3), torch.randn(2)), body="node")
    model = onnx.load(made.path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    session = session_of(made, model.SerializeToString())
    names = [value.name for value in model.graph.input]
    unknown = (
        "native::joined: the sizes of its results are not known for these tensors\n"
        "  expected: the sizes and other arguments of a call in the exported model\n"
        "  got: x: [4], y: [4]\n"
        "  hint: export the model with dynamic axes"
    )
    with pytest.raises(Exception, match=re.escape(unknown)):
        session.run(None, {name: np.ones(4, np.float32) for name in names})
    refused = (
        "native::joined: no kernel of the library takes the call\n"
        "  argument: x\n"
        "  expected: 1 dimension\n"
        "  got: 2 dimensions\n"
    )
    with pytest.raises(Exception, match=re.escape(refused)):
        session.run(None, {name: np.ones((2, 2), np.float32) for name in names})
    for _ in range(2):  # by a new plan, and by the same
        (got,) = session.run(
            None, dict(zip(names, (np.ones(3, np.float32), np.zeros(2, np.float32)), strict=True))
        )
        assert got.tolist() == [1, 1, 1, 0, 0, 1, 1, 1]


class Twice(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = of.repeated(x, 2)
        return y


@SLOW
@pytest.mark.parametrize("count", [2**62, -1])
def test_hidden_results_of_sizes_that_no_memory_holds_are_refused(native: Native, count: int) -> None:
    made = native(Twice().eval(), torch.arange(3.0), body="node")
    model = onnx.load(made.path)
    (node,) = model.graph.node
    del node.attribute[:]
    node.attribute.append(onnx.helper.make_attribute("count", count))
    session = session_of(made, model.SerializeToString())
    refused = (
        "native::repeated: its kernel cannot write a result of the computed sizes\n"
        f"  expected: sizes that fit into memory\n  got: [{count}]\n"
        "  hint: check the sizes of its tensors, and `sizes` of its kernel"
    )
    with pytest.raises(Exception, match=re.escape(refused)):
        session.run(None, {model.graph.input[0].name: np.ones(3, np.float32)})


@SLOW
@pytest.mark.parametrize("body", ["function", "node"])
def test_the_bundled_involution_in_a_network(native: Native, body: str) -> None:
    torch.manual_seed(0)
    model, images = rednet(26, classes=10).eval(), torch.randn(4, 3, 64, 64)
    made = native(model, images[:2], body=body, dynamic={"images": {0: "batch"}})
    assert made.native == {"opsmith::involution": 9}
    assert made.difference <= 1e-5
    assert torch.equal(loaded(made)(images).argmax(1), model(images).argmax(1))
