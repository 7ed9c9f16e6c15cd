"""A file is verified as it is handed over, on three inputs; what did not run is never verified."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_operators as of
import onnxruntime
import pytest
import torch
from onnx_files import Made
from onnx_operators import Calls
from torch import Tensor

import opsmith
import opsmith.onnx
from opsmith import errors
from opsmith.exporting.other_values import other_values

Exported = Callable[..., Made]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@opsmith.operator("verified::row_lse")
def row_lse(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


def test_three_inputs_are_compared_and_one_is_unlike(export: Exported) -> None:
    made = export(row_lse, X, dynamic={"x": {0: "n"}}).export
    assert made.verified
    assert (made.unverified, made.left_out) == ("", ())
    assert [(each.sizes["n"], each.values) for each in made.comparisons] == [
        (4, "of the example"),
        (4, "like the example's values"),
        (4, "of both signs, up to twice as large as the example's values"),
        (5, "of the example"),
        (8, "of the example"),
    ]
    assert "  result at n 4, on 3 inputs: off by " in str(made)
    assert "  result at n 5: off by " in str(made)


VALUES: dict[str, tuple[Tensor, list[str]]] = {
    "floating": (X, ["like", "of both signs, up to twice", "half", "of both signs, up to half"]),
    "zeros": (torch.zeros(3), ["of both signs, up to twice", "of both signs, up to half"]),
    "one-number": (torch.tensor(-2.0), ["of both signs, up to twice", "half", "of both signs, up to half"]),
    "half-precision": (X.half(), ["like", "of both signs, up to twice", "half", "of both signs, up to half"]),
    "indices": (torch.tensor([3, 0, 0, 2]), ["like", "drawn again", "drawn once more"]),
    "offsets": (torch.tensor([0, 0, 5, 9]), ["like", "drawn again", "drawn once more"]),
    "one-index": (torch.zeros(3, dtype=torch.int64), []),
    "mask": (torch.tensor([True, True, True]), ["drawn again", "drawn once more"]),
    "empty": (torch.zeros(0, 3), []),
}


@pytest.mark.parametrize("name", VALUES)
def test_other_values_stay_in_the_domain_of_the_example(name: str) -> None:
    given, expected = VALUES[name]
    found = list(other_values([given]))
    assert [words.startswith(start) for (words, _), start in zip(found, expected, strict=True)] == [
        True
    ] * len(expected)
    for words, (made,) in found:
        assert (made.shape, made.dtype) == (given.shape, given.dtype)
        assert not torch.equal(made, given)
        if words.startswith("of both signs"):
            first = (made.flatten()[0], given.flatten()[0])
            assert first[0].sign() != first[1].sign()
            assert made.abs().max() <= 2 * (given.abs().max() if given.any() else 1)
        if not given.is_floating_point():
            assert given.dtype == torch.bool or given.min() <= made.min() <= made.max() <= given.max()
            assert name != "offsets" or torch.equal(made, made.sort().values)
    again = [each for _, (each,) in other_values([given])]
    assert all(map(torch.equal, again, (each for _, (each,) in found)))


def refusing(x: Tensor, allowed: Callable[[Tensor], bool]) -> Tensor:
    if not torch.compiler.is_compiling() and type(x) is Tensor and not allowed(x):
        raise ValueError("it does not take these numbers")
    return x * 2


def test_numbers_that_the_model_refuses_are_left_out(export: Exported) -> None:
    made = export(Calls(lambda x: refusing(x, lambda x: bool((x >= 0).all()))), X.abs()).export
    assert made.verified
    values = [each.values for each in made.comparisons]
    assert values == ["of the example", "like the example's values", "half of the example's values"]
    signs = "values of both signs, up to twice as large as the example's values"
    assert made.left_out == (f"{signs}: it does not take these numbers",)
    assert f"left out: {signs}" in str(made)


def test_results_that_are_not_finite_say_nothing(export: Exported) -> None:
    made = export(Calls(torch.log), X.abs() + 1).export
    assert made.verified
    assert made.left_out == (
        "values of both signs, up to twice as large as the example's values: the results are not finite",
    )


def test_a_model_that_takes_its_example_alone_is_not_verified(tmp_path: Path) -> None:
    model, path = Calls(lambda x: refusing(x, lambda x: bool(torch.equal(x, X)))), tmp_path / "model.onnx"
    reason = (
        "0 of 2 other inputs could be compared: values of both signs, up to half of the example's values: "
        "it does not take these numbers"
    )
    with pytest.warns(UserWarning, match="is not verified") as warned:
        made = opsmith.export_onnx(model, X, path)
    assert [str(each.message) for each in warned] == [
        f"`model.onnx` is not verified: {reason}; `verify=False` removes this warning"
    ]
    assert (made.verified, made.unverified) == (False, reason)
    assert len(made.left_out) == 4
    assert path.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the hint is followed
        again = opsmith.export_onnx(model, X, path, verify=False)
    assert (again.verified, again.unverified) == (False, "`verify=False`")


def test_whole_numbers_that_are_all_alike_need_another_example(tmp_path: Path, export: Exported) -> None:
    """No kernel gets an index that the example does not show; the hint is followed."""
    model = torch.nn.Embedding(3, 2).eval()
    with pytest.warns(UserWarning, match="could be compared: all numbers of the example are equal"):
        assert not opsmith.export_onnx(model, torch.tensor([1, 1]), tmp_path / "model.onnx").verified
    (tmp_path / "model.onnx").unlink()
    assert export(model, torch.tensor([0, 2, 0, 2])).export.verified


def test_an_axis_of_which_no_other_size_runs_is_not_verified(tmp_path: Path) -> None:
    model = Calls(lambda x: refusing(x, lambda x: x.shape[0] == 4))
    with pytest.warns(UserWarning, match=r"0 of 2 other inputs could be compared: n 1: it does not take"):
        made = opsmith.export_onnx(
            model, X, tmp_path / "model.onnx", input_names=["x"], dynamic={"x": {0: "n"}}
        )
    assert not made.verified


def test_each_form_says_what_its_file_holds(tmp_path: Path) -> None:
    """The report, the JSON, `verified` and the file agree, for stock ONNX Runtime as the consumer."""
    for body in ("function", "inline", "node"):
        path = tmp_path / f"{body}.onnx"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = opsmith.export_onnx(row_lse, X, path, body=body)
        held = [f"{node.domain}::{node.op_type}" for node in onnx.load(path).graph.node if node.domain]
        told = made.to_dict()
        assert dict(made.nodes) == told["nodes"] == {name: held.count(name) for name in held}
        assert made.calls == {"verified::row_lse": 1}
        assert ("  nodes: 1 of verified::row_lse" in str(made)) == bool(held)
        assert ("  inlined: 1 of verified::row_lse" in str(made)) == (body == "inline")
        try:
            onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            loads = True
        except Exception:  # its exceptions share no base class
            loads = False
        assert made.verified == told["verified"] == loads == (body != "node")
        assert told["unverified"] == made.unverified
        assert bool(made.comparisons) == loads == (not caught) == ("off by" in str(made))
    assert made.unverified == (
        "ONNX Runtime has no kernel for a node of `node.onnx`: Fatal error: verified:row_lse(-1) is not a "
        "registered function/op; with bodies the results are PyTorch's, but the file has no bodies; a "
        "`library=` has kernels"
    )
    assert f"  not verified: {made.unverified}" in str(made)


def test_nodes_that_onnx_runtime_has_kernels_for_need_no_bodies(export: Exported) -> None:
    """The domain decides nothing: the file is loaded as it is."""

    class Gelu(torch.autograd.Function):
        @staticmethod
        def symbolic(g: Any, x: Any) -> Any:
            return g.op("com.microsoft::Gelu", x)

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x)

    made = export(opsmith.adopt(Gelu, "verified::gelu"), X, body="node")
    assert made.export.verified
    assert [(node.domain, node.op_type) for node in made.model.graph.node] == [("com.microsoft", "Gelu")]
    torch.testing.assert_close(made.in_runtime(X)[0], torch.nn.functional.gelu(X))
    relu = export(torch.nn.ReLU().eval(), X, body="node")
    assert relu.export.verified


def test_a_node_with_a_wrong_reference_is_found_by_its_body(tmp_path: Path) -> None:
    with pytest.raises(
        errors.ExportMismatchError, match="the file and PyTorch compute different values of `result`"
    ):
        opsmith.export_onnx(of.off, X, tmp_path / "model.onnx", body="node")


WITHOUT_RUNTIME = """
import json, sys, warnings
sys.modules["onnxruntime"] = None
import onnx, torch
from typer.testing import CliRunner
import opsmith
from opsmith.cli.app import app
from opsmith import errors
folder = sys.argv[1]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    made = opsmith.export_onnx(opsmith.ops.exp, torch.ones(3), folder + "/exp.onnx")
told = {"export": made.to_dict(), "words": str(made), "warnings": [str(each.message) for each in caught]}
told["nodes"] = [node.op_type for node in onnx.load(folder + "/exp.onnx").graph.node]
try:
    import opsmith.onnx
    opsmith.onnx.load(folder + "/exp.onnx")
except errors.MissingExtraError as error:
    told["load"] = str(error)
for name, more in (("plain", []), ("json", ["--json"]), ("unasked", ["--no-verify"])):
    done = CliRunner().invoke(app, ["export", "opsmith.ops:exp", f"{folder}/{name}.onnx", *more])
    told[name] = done.exit_code, done.stdout, done.stderr
print(json.dumps(told))
"""


@pytest.mark.slow
def test_without_onnx_runtime_nothing_is_verified(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RUNTIME, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    reason = told["export"]["unverified"]
    assert reason.startswith("ONNX Runtime cannot be imported: ")
    assert reason.endswith("; pip install '.[onnx]' in a checkout of opsmith")
    assert not told["export"]["verified"]
    assert told["nodes"] == ["exp"]
    assert f"not verified: {reason}" in told["words"]
    assert told["warnings"] == [f"`exp.onnx` is not verified: {reason}; `verify=False` removes this warning"]
    assert told["load"].startswith("ONNX Runtime cannot be imported: ")
    assert "hint: pip install '.[onnx]'" in told["load"]
    status, words, said = told["plain"]
    assert (status, said) == (1, "")
    assert f"not verified: {reason}" in words
    status, words, said = told["json"]
    assert (status, said) == (1, "")
    assert (json.loads(words)["verified"], json.loads(words)["unverified"]) == (False, reason)
    status, words, said = told["unasked"]
    assert (status, said) == (0, "")
    assert "not verified: `verify=False`" in words
    assert {each.name for each in tmp_path.iterdir()} == {
        "exp.onnx",
        "plain.onnx",
        "json.onnx",
        "unasked.onnx",
    }
