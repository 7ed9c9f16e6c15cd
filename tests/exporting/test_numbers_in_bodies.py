"""A body is what the code computes: code that looks at numbers is refused with the line, or found."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_files import Made
from onnx_operators import Calls
from torch import Tensor
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

import opsmith
import opsmith.onnx
from opsmith import errors

pytestmark = pytest.mark.xdist_group("numbers_in_bodies")
Exported = Callable[..., Made]
EXAMPLE = -torch.ones(3)
OTHERS = (torch.full((3,), 2.0), torch.tensor([0.5, -1.5, 3.25]), torch.zeros(3))


def numpy_there(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().clip(0, None).copy())


def branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def float_of(x: Tensor) -> Tensor:
    return x * float(x.sum())


def bool_of(x: Tensor) -> Tensor:
    return x * 2 if bool((x > 0).any()) else x * 3


def branch_on_item(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def address(x: Tensor) -> Tensor:
    return x + (ctypes.c_float * 3).from_address(x.data_ptr())[0]


def array_of(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(x) * 2)


def equal(x: Tensor) -> Tensor:
    return x * 2 if torch.equal(x, x.abs()) else x * 3


def element_by_element(x: Tensor) -> Tensor:
    return torch.stack([each * 2 if each > 0 else each * 3 for each in x])


REFUSED = (
    numpy_there,
    branch,
    float_of,
    bool_of,
    branch_on_item,
    address,
    array_of,
    equal,
    element_by_element,
)


def item_in_a_formula(x: Tensor) -> Tensor:
    return x * x.sum().item()


def list_of_numbers(x: Tensor) -> Tensor:
    return x + sum(x.tolist())


def places(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_fill(0, torch.nonzero(x > 0)[:, 0], 1.0)


def printed(x: Tensor) -> Tensor:
    print(f"values: {x}")  # noqa: T201
    return x * 2


def branch_on_shape(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 3 and x.dtype is torch.float32 else x * 3


TAKEN = (item_in_a_formula, list_of_numbers, places, printed, branch_on_shape)


def text_of(x: Tensor) -> Tensor:
    return x * (3 if "FakeTensor" in repr(x) or "-1" in repr(x) else 2)


def caught(x: Tensor) -> Tensor:
    try:
        return numpy_there(x)
    except RuntimeError:
        return torch.zeros_like(x)


HIDDEN = (text_of, caught)


def adopted(function: Callable[[Tensor], Tensor], form: str, **options: Any) -> Any:
    """A class with this forward, adopted, in one of the forms that a class may have."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return function(x)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    def symbolic(g: Any, x: Any) -> Any:
        return g.op("numbers::Named", x)

    members: dict[str, Any] = {"forward": staticmethod(forward)}
    if form == "setup_context":
        members = {
            "forward": staticmethod(lambda x: function(x)),
            "setup_context": staticmethod(setup_context),
        }
    if form == "symbolic":
        members["symbolic"] = staticmethod(symbolic)
    made = type("Looks", (Function,), members)
    return opsmith.adopt(made, f"numbers::{form}_{function.__name__}", **options)


def declared(function: Callable[[Tensor], Tensor]) -> Any:
    made = opsmith.operator(f"numbers::declared_{function.__name__}")(function)
    made.fake(lambda x: torch.empty_like(x))
    return made


FORMS: dict[str, Callable[[Any], Any]] = {
    "class": lambda function: adopted(function, "class"),
    "setup_context": lambda function: adopted(function, "setup_context"),
    "symbolic": lambda function: adopted(function, "symbolic"),
    "declared": declared,
}


def line_of(function: Any) -> str:
    """`file:line` of the line of a function that looks at numbers, the first but for its `def`."""
    lines, start = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{start + len(lines) - 1}"


@pytest.mark.every(7)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", REFUSED)
def test_code_that_looks_at_numbers_is_refused_with_the_line(
    function: Any, form: str, tmp_path: Path
) -> None:
    operator = FORMS[form](function)
    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(Calls(lambda x: operator(x) + 1), EXAMPLE, tmp_path / "model.onnx")
    assert type(caught.value) is errors.ExportError
    assert caught.value.operator == operator.name
    what = "reference" if form == "declared" else "forward"
    assert caught.value.problem.startswith(f"torch cannot trace its {what}: ")
    assert caught.value.where == line_of(function)
    assert not list(tmp_path.iterdir())


def test_its_hint_is_followed(tmp_path: Path, export: Exported) -> None:
    refused = adopted(numpy_there, "hinted")
    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(refused, EXAMPLE, tmp_path / "model.onnx")
    assert caught.value.hint == (
        "write the forward in torch's operations on tensors, and do not read values out of tensors; or "
        "write the same mathematics in plain PyTorch: `adopt(..., reference=...)`; or `body='node', "
        "verify=False`"
    )
    given = adopted(numpy_there, "referenced", reference=lambda x: x.clamp(min=0))
    made = export(Calls(lambda x: given(x) + given(-x)), EXAMPLE)  # twice in one model
    assert made.export.verified
    assert made.export.nodes == {given.name: 2}
    for x in OTHERS:
        assert torch.equal(made.in_runtime(x)[0], numpy_there(x) + numpy_there(-x))
    alone = export(refused, EXAMPLE, body="node", verify=False)
    assert (alone.export.nodes, alone.export.unverified) == ({refused.name: 1}, "`verify=False`")


def test_a_body_for_an_opaque_class(export: Exported) -> None:
    opaque = adopted(array_of, "opaque", opaque=True, reference=lambda x: x * 2)
    made = export(opaque, EXAMPLE)
    assert made.export.verified
    for x in OTHERS:
        assert torch.equal(made.in_runtime(x)[0], x * 2)


@pytest.mark.every(7)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", TAKEN)
def test_numbers_that_are_computed_and_shapes_have_nodes(
    function: Any, form: str, export: Exported, capsys: pytest.CaptureFixture[str]
) -> None:
    made = export(FORMS[form](function), EXAMPLE)
    assert made.export.verified
    for x in OTHERS:
        torch.testing.assert_close(made.in_runtime(x)[0], function(x))


@pytest.mark.every(8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", HIDDEN)
def test_what_no_trace_sees_is_found_by_other_values(function: Any, form: str, tmp_path: Path) -> None:
    """For the example, whose result is zeros or as if traced, the file is right."""
    operator = FORMS[form](function)
    with pytest.raises(errors.ExportMismatchError) as caught:
        opsmith.export_onnx(operator, EXAMPLE, tmp_path / "model.onnx")
    assert caught.value.problem.startswith("the file and PyTorch compute different values of `")
    assert "for values of both signs, up to twice as large as the example's values" in caught.value.problem
    assert caught.value.hint == (
        "no file was left; the file is right for the example, so no code may read the numbers of tensors "
        "during the trace, or catch the errors of these reads; or compare the operator's kernel with its "
        "reference: "
        "`opsmith check`"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("trace", ["export", "make_fx"])
def test_no_trace_records_a_stand_in_that_knows_shapes_alone(trace: str) -> None:
    """It was memory that nothing had written. As a node the operator stays what it is."""
    operator = adopted(numpy_there, f"recorded_by_{trace}")

    def traced(function: Any) -> Any:
        if trace == "export":
            return torch.export.export(Calls(function), (EXAMPLE,)).module()
        return make_fx(function, tracing_mode="fake")(EXAMPLE)

    with pytest.raises(errors.TransformError) as caught:
        traced(operator.reference)
    assert (caught.value.operator, caught.value.got) == (
        operator.name,
        "RuntimeError: .numpy() is not supported for tensor subclasses.",
    )
    program = traced(operator)
    for x in OTHERS:
        assert torch.equal(program(x), numpy_there(x))


def test_a_class_in_a_reference_that_looks_at_numbers(tmp_path: Path) -> None:
    inner = adopted(float_of, "inner")

    @opsmith.operator("numbers::outer")
    def outer(x: Tensor) -> Tensor:
        result: Tensor = inner(x) + 1
        return result

    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(outer, EXAMPLE, tmp_path / "model.onnx")
    assert (caught.value.operator, caught.value.where) == (inner.name, line_of(float_of))


def test_a_model_that_looks_at_numbers_itself(tmp_path: Path) -> None:
    with pytest.raises(errors.ExportError) as caught:
        opsmith.export_onnx(Calls(branch), EXAMPLE, tmp_path / "model.onnx")
    assert caught.value.where == line_of(branch)


def test_a_class_whose_results_are_constant(export: Exported) -> None:
    """A computation may be constant: what counts is that the inputs differ."""
    made = export(adopted(torch.zeros_like, "zeros"), torch.zeros(3))
    assert made.export.verified
    assert made.in_runtime(OTHERS[0])[0].tolist() == [0.0, 0.0, 0.0]


def test_dropout_is_exported_as_it_evaluates(export: Exported) -> None:
    def doubled(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=False) * 2

    operator = adopted(doubled, "dropout")
    model = torch.nn.Sequential(Calls(operator), torch.nn.Dropout(0.5))
    with pytest.warns(UserWarning, match="the model is in training mode"):
        made = export(model.train(), EXAMPLE)
    assert made.export.verified
    assert torch.equal(made.in_runtime(OTHERS[1])[0], OTHERS[1] * 2)
