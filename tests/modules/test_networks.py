"""A network of generated modules through what networks go through: saving, copying, moving, transforms."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_layers import Affine, affine, network
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import opsmith
from opsmith import errors


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)


def through_state_dict(model: nn.Module) -> nn.Module:
    other = network()
    for each in other.parameters():
        nn.init.constant_(each, 7.0)
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    return other


def through_assigned_state_dict(model: nn.Module) -> nn.Module:
    with torch.device("meta"):
        other = network()
    other.load_state_dict(model.state_dict(), assign=True)
    other[2].var = torch.ones(4, dtype=torch.float64)  # it is not in the state_dict
    assert {each.device.type for each in other.parameters()} == {"cpu"}
    assert all(isinstance(each, nn.Parameter) for each in other.parameters())
    return other


def through_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def through_saved_weights(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = network()
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def through_meta(model: nn.Module) -> nn.Module:
    empty = copy.deepcopy(model).to("meta")
    assert empty(torch.empty(5, 3, device="meta", dtype=torch.float64)).shape == (5, 2)
    other = empty.to_empty(device="cpu")
    for each in other.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    other.load_state_dict(model.state_dict())
    return other


def through_bfloat16(model: nn.Module) -> nn.Module:
    low = copy.deepcopy(model).to(torch.bfloat16)
    assert {each.dtype for each in low.state_dict().values()} == {torch.bfloat16}
    assert low(torch.ones(2, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    return copy.deepcopy(model).float().double()


WAYS = {
    "state_dict": through_state_dict,
    "assigned state_dict": through_assigned_state_dict,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_save,
    "saved weights": through_saved_weights,
    "meta": through_meta,
    "dtypes": through_bfloat16,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_back_computes_the_same(way: str, x: Tensor) -> None:
    model = network()
    twin = WAYS[way](model)
    assert repr(twin) == repr(model)
    assert [type(each) for each in twin.modules()] == [type(each) for each in model.modules()]
    low = torch.finfo(torch.float32).eps if way == "dtypes" else 0.0
    assert_close(twin(x), model(x), rtol=64 * low, atol=64 * low)
    before = [each.detach().clone() for each in model.parameters()]
    twin(x).sum().backward()
    gradients = [each.grad for each in twin.parameters()]
    assert len(gradients) == len(before)
    assert all(each is not None for each in gradients)
    for each in twin.parameters():
        nn.init.zeros_(each)
    shared = way in ("copy", "assigned state_dict")  # as of any module
    assert all(each.equal(old) for each, old in zip(model.parameters(), before, strict=True)) is not shared


def test_a_copy_of_a_single_layer() -> None:
    layer = Affine(3, 2)
    shallow, deep = copy.copy(layer), copy.deepcopy(layer)
    assert shallow.weight is layer.weight
    assert deep.weight is not layer.weight
    assert deep.weight.equal(layer.weight)
    memo: dict[int, Any] = {}
    both = copy.deepcopy([layer, layer], memo)
    assert both[0] is both[1]


def test_a_class_of_a_function_is_copied() -> None:
    Local = affine.module(
        sizes={"M": "i", "N": "o"}, parameters=("weight",), init=opsmith.init.ones, name="Local"
    )
    layer = Local(3, 2)
    assert copy.deepcopy(layer).weight.equal(layer.weight)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    layer.load_state_dict(torch.load(file, weights_only=True))


def test_a_bias_from_outside() -> None:
    """A parameter that is not the module's stays an argument of `forward`."""
    Weighted = affine.module(
        sizes={"M": "i", "N": "o"}, parameters=("weight",), init=opsmith.init.ones, name="Weighted"
    )
    assert Weighted(3, 2)(torch.ones(1, 3), torch.ones(2)).tolist() == [[4.0, 4.0]]
    assert Weighted(3, 2)(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]


@pytest.mark.slow
def test_a_pickle_in_a_process_that_imported_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_layers.py").write_text(
        "import torch, opsmith\n"
        "@opsmith.operator('elsewhere::scale')\n"
        "def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:\n"
        "    return x * weight\n"
        "init = opsmith.init.constant(2.0)\n"
        "Scale = scale.module(sizes=('n',), parameters={'weight': ('n',)}, init=init)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    here = importlib.import_module("my_layers")
    (tmp_path / "layer.pkl").write_bytes(pickle.dumps((here.Scale(3), here.scale)))
    program = (
        "import pickle; layer, scale = pickle.load(open('layer.pkl', 'rb'));"
        "import torch; print(layer, layer(torch.ones(3)).tolist(), layer.operator is scale)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Scale(n=3) [2.0, 2.0, 2.0] True\n"), done.stderr


def test_a_pickle_whose_operator_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python names the module and the class that are missing; opsmith, the operator and what to import."""
    (tmp_path / "gone_layers.py").write_text(
        "import torch, opsmith\n"
        "@opsmith.operator('gone::scale')\n"
        "def scale(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
        "Scale = scale.module()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    here = importlib.import_module("gone_layers")
    layer, handle = pickle.dumps(here.Scale()), pickle.dumps(here.scale)
    monkeypatch.delattr(here, "Scale")
    with pytest.raises(AttributeError, match="Can't get attribute 'Scale' on <module 'gone_layers'"):
        pickle.loads(layer)
    lost = handle.replace(b"gone::scale", b"gone::scalf")
    with pytest.raises(errors.OperatorNotFoundError, match="import the module that declares it first"):
        pickle.loads(lost)


def test_functional_call_and_gradients_of_each_example(x: Tensor) -> None:
    model = network()
    parameters = dict(model.named_parameters())

    def loss(weights: Any, example: Tensor) -> Tensor:
        answer: Tensor = functional_call(model, weights, (example[None],)).square().sum()
        return answer

    each = vmap(grad(loss), (None, 0))(parameters, x)
    loss_of_all = model(x).square().sum()
    expected = torch.autograd.grad(loss_of_all, list(parameters.values()))
    assert_close([each[name].sum(0) for name in parameters], list(expected))


def test_an_ensemble(x: Tensor) -> None:
    layers = [Affine(3, 2, dtype=torch.float64) for _ in range(4)]
    stacked, _ = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
    answers = vmap(lambda weights: functional_call(layers[0], weights, (x,)))(stacked)
    assert_close(answers, torch.stack([layer(x) for layer in layers]))


@pytest.mark.slow
@pytest.mark.compile
def test_compiled(x: Tensor) -> None:
    model = network()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    answer, expected = compiled(x), model(x)
    assert_close(answer, expected)
    answer.sum().backward()
    expected.sum().backward()
    assert_close([each.grad for each in compiled.parameters()], [each.grad for each in model.parameters()])


@pytest.mark.slow
def test_exported(x: Tensor) -> None:
    model = network()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("layers.affine.default") == 3
    assert "layers.convolution.default" in targets
    more = torch.cat([x, -x])
    assert_close(program.module()(more), model(more))
    assert program.state_dict.keys() == model.state_dict().keys()
