"""Whatever cannot be exported is refused with what is wrong and what to write; no file is left."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_operators as of
import pytest
import torch
from onnx_operators import Calls

import opsmith
import opsmith.onnx
from opsmith import errors
from opsmith.core.operator import Operator

X = torch.arange(24.0).reshape(4, 6)
N = {"x": {0: "n"}}


def line(function: Any, text: str) -> str:
    """`file:line` of the first line of a function that holds a text."""
    code = function.reference if isinstance(function, Operator) else function
    lines, start = inspect.getsourcelines(code)
    return f"{inspect.getsourcefile(code)}:{start + next(i for i, each in enumerate(lines) if text in each)}"


def called(function: Any) -> Calls:
    return Calls(function)


def fixed(x: torch.Tensor) -> torch.Tensor:
    y = opsmith.ops.exp(x)
    return y.reshape(4, 6) * 2


def written(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch.ops.foreign_nodes.writes(y)
    return y


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[errors.OpsmithError], str]] = {
    "opset": (
        lambda: (opsmith.ops.exp, X),
        {"opset": 11},
        errors.UsageError,
        """
        torch's exporter does not write this version of ONNX's operators
          argument: opset
          expected: 18 to 23
          got: 11
          hint: leave `opset=` out for version 20; `onnx.version_converter` may convert the file to an older \
version
        """,
    ),
    "body": (
        lambda: (opsmith.ops.exp, X),
        {"body": "outline"},
        errors.UsageError,
        """
        unknown form of an operator's body
          argument: body
          expected: `function`, `inline`, `node`
          got: 'outline'
          hint: leave `body=` out, or write `body="inline"`
        """,
    ),
    "verify": (
        lambda: (opsmith.ops.exp, X),
        {"verify": "yes"},
        errors.UsageError,
        """
        `verify` must be True or False
          argument: verify
          expected: True or False
          got: 'yes'
          hint: leave `verify=` out to compare the file with PyTorch
        """,
    ),
    "model": (
        lambda: (fixed, X),
        {},
        errors.UsageError,
        """
        `model` is neither a module nor an operator
          argument: model
          expected: an nn.Module, or an operator of opsmith
          got: function
          hint: put a function into the `forward` of a module
        """,
    ),
    "args": (
        lambda: (torch.nn.ReLU().eval(), (X, X)),
        {},
        errors.UsageError,
        """
        `args` do not fit the model: too many positional arguments
          argument: args
          expected: the arguments of `forward(input: torch.Tensor) -> torch.Tensor`
          hint: pass a tuple of the positional arguments as `args`, and a dict of the others as `kwargs=`
        """,
    ),
    "args-of-a-mapping": (
        lambda: (opsmith.ops.exp, {"x": X}),
        {},
        errors.UsageError,
        """
        `args` must be a tensor or a tuple
          argument: args
          expected: a tensor, or a tuple of the model's positional arguments
          got: dict
          hint: write `(x, y)`; keyword arguments go into `kwargs=`
        """,
    ),
    "kwargs-of-a-list": (
        lambda: (opsmith.ops.exp, X),
        {"kwargs": [X]},
        errors.UsageError,
        """
        `kwargs` must be a dict
          argument: kwargs
          expected: a dict of the model's keyword arguments
          got: list
          hint: write `{"y": y}`; positional arguments go into `args`
        """,
    ),
    "an-output-named-as-an-input": (
        lambda: (opsmith.ops.exp, X),
        {"output_names": ["x"]},
        errors.UsageError,
        """
        `x` is both the name of an input and the name of an output
          argument: output_names
          expected: names that differ from the names of the inputs
          got: x
          hint: rename the input or the output; `input_names=` names inputs
        """,
    ),
    "names": (
        lambda: (opsmith.ops.add, (X, X)),
        {"input_names": ["x"]},
        errors.UsageError,
        """
        `input_names` does not fit the model
          argument: input_names
          expected: 2 different names: x, y
          got: x
          hint: give a name for each tensor, in this order, or leave this argument out
        """,
    ),
    "dynamic": (
        lambda: (opsmith.ops.exp, X),
        {"dynamic": ["x"]},
        errors.UsageError,
        """
        the dynamic axes cannot be read
          argument: dynamic
          expected: a mapping from axis to name for each input
          got: ['x']
          hint: write `dynamic={"x": {0: "batch"}}`
        """,
    ),
    "dynamic-input": (
        lambda: (opsmith.ops.exp, X),
        {"dynamic": {"y": {0: "n"}}},
        errors.UsageError,
        """
        there is no input `y` whose axes could be dynamic
          argument: dynamic
          expected: x
          got: y
          hint: name one of these inputs
        """,
    ),
    "dynamic-axis": (
        lambda: (opsmith.ops.exp, X),
        {"dynamic": {"x": {2: "n"}}},
        errors.UsageError,
        """
        `x` has no such dynamic axis
          argument: dynamic
          expected: axes from -2 to 1, with identifiers as names
          got: {2: 'n'}
          hint: write `{0: "batch"}`
        """,
    ),
    "several-sizes": (
        lambda: (opsmith.ops.mul, (X, X[:1])),
        {"dynamic": {"x": {0: "n"}, "y": {0: "n"}}},
        errors.DynamicAxisError,
        """
        the axis `n` has several sizes in the given inputs
          argument: n
          expected: one size: axis 0 of `x`, axis 0 of `y`
          got: 1 and 4
          hint: give axes of different sizes different names
        """,
    ),
    "empty-axis": (
        lambda: (opsmith.ops.exp, X[:0]),
        {"dynamic": N},
        errors.DynamicAxisError,
        """
        the axis `n` has size 0 in the given inputs
          argument: n
          expected: at least 1: axis 0 of `x`
          got: 0
          hint: give inputs that are not empty; the file takes other sizes, too
        """,
    ),
    "fixed-by-the-model": (
        lambda: (called(fixed), X),
        {"dynamic": N, "input_names": ["x"]},
        errors.DynamicAxisError,
        f"""
        the model makes the axis `n` constant, but `dynamic=` names it
          argument: x
          expected: a computation for every size of axis 0 of `x`
          got: a computation for size 4 only
          where: {line(fixed, "reshape")}
          hint: compute with `x.shape` itself: do not compare it with numbers, and do not convert it to a \
number; or leave the axis out of `dynamic=`
        """,
    ),
    "fixed-by-the-reference": (
        lambda: (of.fixes_inside, X),
        {"dynamic": N},
        errors.DynamicAxisError,
        f"""
        nodes::fixes_inside: its reference makes axis 0 of `x` constant, but it varies in this call
          argument: x
          expected: a computation for every size
          got: a computation for size 4 only
          where: {line(of.fixes_inside, "== 4")}
          hint: compute with the sizes themselves, and do not compare them with numbers
        """,
    ),
    "opaque": (
        lambda: (of.opaque, X),
        {},
        errors.ExportError,
        f"""
        nodes::opaque: it is opaque: it has no reference in PyTorch from which a body could be derived
          where: {line(of.opaque, "@")}
          hint: write `body='node', verify=False`, and give the runtime a kernel for the operator
        """,
    ),
    "writing": (
        lambda: (called(written), X),
        {},
        errors.ExportError,
        """
        foreign_nodes::writes: the model calls an operator that writes into its arguments, or returns views \
of them; a node of ONNX cannot do this
          where: {here}
          hint: call an operator that returns new tensors, such as `op.functional` of an opsmith operator
        """,
    ),
    "unknown": (
        lambda: (called(torch.ops.foreign_nodes.unknown), X),
        {},
        errors.ExportError,
        f"""
        foreign_nodes::unknown: the model calls an operator that opsmith does not know, and ONNX has no node \
for it
          where: {line(Calls.forward, "return")}
          hint: adopt the operator first, with a reference: `opsmith.adopt(torch.ops.foreign_nodes.unknown, \
reference=f)`
        """,
    ),
    "type": (
        lambda: (opsmith.ops.exp, X.to(torch.complex64)),
        {},
        errors.ExportError,
        """
        ONNX has no inputs of this type
          argument: x
          expected: float32, uint8, int8, uint16, int16, int32, int64, bool, float16, float64, uint32, \
uint64, bfloat16
          got: torch.complex64, torch.strided
          hint: convert the tensor before the model: `torch.view_as_real(x)`, `x.to_dense()`
        """,
    ),
    "nothing-returned": (
        lambda: (called(lambda x: None), X),
        {},
        errors.ExportError,
        """
        the model returns no tensor
          expected: a tensor, or tuples, lists and dicts of tensors
          got: NoneType
          hint: return the tensors that the file should compute
        """,
    ),
    "random": (
        lambda: (of.drawn, X),
        {},
        errors.ExportError,
        f"""
        nodes::drawn: it draws random numbers, but ONNX Runtime draws different numbers: they cannot be \
compared
          where: {line(of.drawn, "@")}
          hint: write `verify=False`, or pass the random numbers to the operator as an argument
        """,
    ),
    "list-before-others": (
        lambda: (of.list_first, X),
        {},
        errors.ExportError,
        f"""
        nodes::list_first: it returns a list before another result, and a node of ONNX does not record where \
the list ends
          expected: tensors; the last result may be a list of tensors
          got: result0: list[Tensor], result1: Tensor
          where: {line(of.list_first, "@")}
          hint: return the list last, or its tensors one by one
        """,
    ),
    "attribute-of-an-axis": (
        lambda: (called(lambda x: of.scaled_by(x, x.shape[0] * 0.5)), X),
        {"dynamic": N, "input_names": ["x"]},
        errors.ExportError,
        f"""
        nodes::scaled_by: a non-tensor argument depends on a dynamic axis, but an attribute is constant
          argument: factor
          expected: int | float that is the same in every call
          got: mul
          where: {line(of.scaled_by, "@")}
          hint: let the reference read the number from a tensor's shape, or leave the axis out of `dynamic=`
        """,
    ),
    "number-fixed-by-the-reference": (
        lambda: (called(lambda x: of.fixes_a_number(x, x.shape[0])), X),
        {"dynamic": N, "input_names": ["x"]},
        errors.DynamicAxisError,
        f"""
        nodes::fixes_a_number: its reference makes `size` constant, but it varies in this call
          argument: size
          expected: a computation for every size
          got: a computation for size 4 only
          where: {line(of.fixes_a_number, "== 4")}
          hint: compute with the sizes themselves, and do not compare them with numbers
        """,
    ),
    "other-numbers": (
        lambda: (called(lambda x: of.off(x.cos()) + 1), X),
        {},
        errors.ExportMismatchError,
        """
        nodes::off: the file and PyTorch compute different values of `output`
          argument: output
          expected: at most 6.8e-07: (8 + 2 √3) roundings of the largest value in float32, for 3 nodes that \
round
          got: off by 4.5e-03 of the largest value; the first node that differs is `off`, whose output `off` \
is off by 9.9e-03
          where: {here}
          hint: no file was left; compare the operator's kernel with its reference: `opsmith check`
        """,
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    make, options, kind, message = REFUSED[name]
    model, args = make()
    file = tmp_path / "model.onnx"
    file.write_bytes(b"what was there")
    with pytest.raises(errors.OpsmithError) as caught:
        opsmith.export_onnx(model, args, file, **options)
    expected = textwrap.dedent(message).strip()
    if "{here}" in expected:
        assert caught.value.where is not None
        expected = expected.replace("{here}", caught.value.where)
    assert caught.value.message() == expected
    assert type(caught.value) is kind
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
    assert file.read_bytes() == b"what was there"


def test_a_reference_that_looks_at_values(tmp_path: Path) -> None:
    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(of.reads_values, X, tmp_path / "model.onnx")
    problem, *rest = caught.value.message().splitlines()
    assert problem.startswith("nodes::reads_values: torch cannot trace its reference: ")
    assert "data-dependent" in problem
    assert rest == [
        f"  where: {line(of.reads_values, 'item()')}",
        "  hint: write the reference in torch's operations on tensors, and do not read values out of "
        "tensors; or `body='node', "
        "verify=False`",
    ]


def test_a_type_that_onnx_runtime_does_not_compute(tmp_path: Path) -> None:
    with pytest.raises(errors.OnnxRuntimeError) as caught:
        opsmith.export_onnx(opsmith.ops.exp, X.bfloat16(), tmp_path / "model.onnx")
    assert str(caught.value).startswith(
        "opsmith::exp: ONNX Runtime does not load `model.onnx`: Could not find an implementation for Exp"
    )
    assert caught.value.got == f"x bfloat16 {list(X.shape)}"
    assert caught.value.hint == (
        "export the model in a dtype that ONNX Runtime computes on the CPU: float32, float64, often "
        "float16; or write `verify=False` for another runtime"
    )
    assert not list(tmp_path.iterdir())


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    packages = sys.modules["opsmith.exporting.packages"]
    with pytest.raises(errors.MissingExtraError) as caught:
        importlib.reload(packages)
    assert caught.value.message() == (
        "ONNX needs the packages `onnx`, `onnx_ir` and `onnxscript`\n"
        "  got: no module named 'onnxscript'\n"
        "  hint: pip install '.[onnx]' in a checkout of opsmith"
    )


@opsmith.operator("export_messages::added_", mutates=["x"], returns="x")
def added_(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@opsmith.operator("export_messages::raised", mutates=["x"])
def raised(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("operator", [added_, raised], ids=["it returns it", "it returns nothing"])
def test_an_operator_that_writes_is_refused_alone_and_its_functional_form_is_taken(
    operator: Any, tmp_path: Path
) -> None:
    file = tmp_path / "alone.onnx"
    with pytest.raises(errors.ExportError, match="it writes into its arguments") as caught:
        opsmith.export_onnx(operator, (torch.ones(3),), file)
    assert f"`{operator.__name__}.functional`" in (caught.value.hint or "")
    assert not file.exists()
    assert opsmith.export_onnx(operator.functional, (torch.ones(3),), file).verified


@opsmith.operator("export_messages::through_complex_numbers")
def through_complex_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.complex(x, x).exp()).clone()


def test_a_reference_that_torch_s_exporter_does_not_take_is_named(tmp_path: Path) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return through_complex_numbers(opsmith.ops.exp(x))

    for model in (through_complex_numbers, called(both)):
        with pytest.raises(errors.ExportError, match=r"refuses its reference: .*aten\.exp") as caught:
            opsmith.export_onnx(model, X, tmp_path / "complex.onnx")
        assert caught.value.operator == "export_messages::through_complex_numbers"
        assert (caught.value.where or "").startswith(__file__)
    assert not list(tmp_path.iterdir())
