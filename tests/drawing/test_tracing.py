"""Tracing: nodes, names, source locations, saved tensors; of results and of recorded calls."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import Network, Square, network, plain, row_e1
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import opsmith
from opsmith.drawing import Graph, Node, Options, trace

HERE = Path(__file__).name


def node_of(graph: Graph, label: str) -> Node:
    return next(node for node in graph.nodes if node.label == label)


def labels(graph: Graph, *kinds: str) -> list[str]:
    return [node.label for node in graph.nodes if node.kind in kinds]


def test_the_variables_of_the_caller_name_tensors(tmp_path: Path) -> None:
    y, named = row_e1()
    w, b, x = named.values()
    graph = opsmith.draw(y, tmp_path / "graph.json")
    assert labels(graph, "input") == ["b", "w", "x"]
    assert labels(graph, "output") == ["y"]
    assert (graph.title, w.grad, b.grad, x.grad) == ("autograd graph of y", None, None, None)
    given = opsmith.draw({"loss": y}, tmp_path / "graph.json", names={"weight": w})
    assert labels(given, "input") == ["b", "weight", "x"]
    assert labels(given, "output") == ["loss"]


def test_a_module_names_its_parameters() -> None:
    layer = torch.nn.Linear(2, 1)
    graph = trace(layer(torch.ones(1, 2)), Options(names=layer))
    assert sorted(labels(graph, "parameter")) == ["bias", "weight"]
    nested = trace(layer(torch.ones(1, 2)), Options(names={"net": layer}))
    assert sorted(labels(nested, "parameter")) == ["net.bias", "net.weight"]


def test_every_node_comes_after_what_leads_to_it() -> None:
    graph = trace(network(), Options(inputs=torch.rand(3, 4), training=True))
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    flow = [edge for edge in graph.edges if edge.kind == "flow"]
    assert flow
    assert all(place[edge.source] < place[edge.target] for edge in flow)


def test_edges_into_an_operator_name_its_arguments() -> None:
    y, _ = row_e1()
    graph = trace(y)
    into = {edge.label for edge in graph.edges if edge.target == node_of(graph, "opsmith::add").id}
    assert into == {"x", "y"}


def test_memory_is_counted_once_and_by_who_has_it_anyway() -> None:
    w = torch.rand(10, requires_grad=True)
    x = torch.rand(10)
    middle = w * x  # keeps x
    y = middle.exp()  # keeps its result, which sin keeps again
    z = y.sin() * w  # keeps the result of sin, and w
    graph = trace(z, Options(names={"w": w, "x": x}))
    assert graph.kept_bytes == 4 * 40  # x, the result of exp, that of sin, w
    assert graph.own_bytes == 2 * 40
    saved = {(node.label, each.name): each for node in graph.nodes for each in node.saved}
    assert saved["MulBackward0", "other"].of in ("x", "w")
    assert not saved["SinBackward0", "self"].counted
    assert saved["SinBackward0", "self"].storage == saved["ExpBackward0", "result"].storage
    assert [node.label for node in graph.heaviest()] == ["ExpBackward0", "MulBackward0"]


def test_what_a_variable_has_and_was_computed_is_no_input(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    flat = x.view(-1)  # lies in the memory of x
    h = x.exp()
    y = (h * flat).sqrt()
    graph = opsmith.draw(y, tmp_path / "graph.json", show_saved=True)
    saved = {str(each) for node in graph.nodes for each in node.saved}
    assert saved == {
        "result [3] float32 12 B (h)",
        "other [3] float32 12 B (input x)",
        "self [3] float32 12 B (h, counted elsewhere)",
        "result [3] float32 12 B (output y)",
    }
    assert (graph.kept_bytes, graph.own_bytes) == (36, 12)
    kinds = {node.label: node.kind for node in graph.nodes if not node.label.endswith("0")}
    assert (kinds["x"], kinds["h"], kinds["y"]) == ("input", "saved", "output")


def test_what_a_function_keeps_as_variable_is_no_leaf() -> None:
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.variable = x.detach() * 2
            ctx.save_for_backward(w)
            return x * w

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], grads[0]

    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    graph = trace({"y": Keeping.apply(x, w)}, Options(names={"x": x, "w": w}))
    (node,) = [node for node in graph.nodes if node.kind == "function"]
    assert node.label == "Keeping"
    sources = [graph.by_id[edge.source] for edge in graph.edges if edge.target == node.id]
    assert [each.kind for each in sources] == ["accumulate", "accumulate", "input", "saved"]
    recorded = trace(lambda x, w: Keeping.apply(x, w) * 2, Options(inputs=(x, w), training=True))
    assert [node.label for node in recorded.nodes if node.kind == "function"] == ["Keeping"]


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("training", [None, False, True])
def test_nothing_is_kept_once_it_is_drawn(training: bool | None, tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def computed(x: Tensor) -> Tensor:
        h = x * 2
        made.append(weakref.ref(h))
        return h.sum()

    def drawn() -> None:
        x = torch.ones(3, requires_grad=True)
        if training is None:
            opsmith.draw(computed(x), tmp_path / "graph.json")
        else:
            opsmith.draw(computed, tmp_path / "graph.json", inputs=x, training=training)

    drawn()
    gc.collect()
    gc.disable()
    try:
        drawn()
        assert made[-1]() is None
    finally:
        gc.enable()


def test_a_saved_view_keeps_its_whole_storage() -> None:
    w = torch.rand(100, requires_grad=True)
    long = w.exp().detach()
    graph = trace(w[:2] * long[:2])
    assert graph.own_bytes == 400


def test_what_is_given_to_a_checkpoint_is_packed_and_not_computed_again() -> None:
    runs: list[int] = []

    def segment(x: Tensor) -> Tensor:
        runs.append(1)
        return x.exp().sin()

    y = checkpoint(segment, torch.rand(3, requires_grad=True), use_reentrant=False)
    graph = trace(y)
    assert [str(each) for node in graph.nodes for each in node.saved] == [
        "result (packed by a hook)",
        "self (packed by a hook)",
    ]
    assert graph.summary() == "5 nodes; keeps nothing; not counted: 2 tensors packed by hooks"
    assert runs == [1]
    y.sum().backward()


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.double, ctx.parts, ctx.again, ctx.power = x * 2, [x.sin(), x.cos()], x, 2
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.double


@pytest.mark.parametrize("training", [True, False])
def test_what_a_function_puts_on_its_ctx_is_kept_too(training: bool) -> None:
    x = torch.rand(10, requires_grad=True)
    graph = trace(Careless.apply, Options(inputs=x, names={"x": x}, training=training))
    assert (graph.kept_bytes, graph.own_bytes) == (4 * 40, 3 * 40)
    (keeping,) = [node for node in graph.nodes if node.saved]
    assert keeping.recorded == "CarelessBackward"
    names = [each.name for each in keeping.saved]
    assert names[1:] == ["ctx.double", "ctx.parts[0]", "ctx.parts[1]", "ctx.again"]


def test_what_a_function_keeps_is_not_told_of_what_comes_after_it() -> None:
    graph = trace(lambda x: Careless.apply(x).sin(), Options(inputs=torch.rand(10, requires_grad=True)))
    kept = {node.label: node.kept_bytes for node in graph.nodes if node.saved}
    assert kept == {"mul": 4 * 40, "sin": 40}  # the product is what `Careless` returns


def test_a_backward_inside_leaves_nothing_kept() -> None:
    def slope(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.exp().sum(), x)
        return found * x

    x = torch.rand(3, requires_grad=True)
    graph = trace(slope, Options(inputs=x))
    assert graph.kept_bytes == 12  # what the product keeps: `found`, and neither `x` nor what `exp` kept


def test_forms_are_those_of_the_results() -> None:
    graph = trace(torch.rand(2, 3, requires_grad=True).double().sum(0))
    assert [str(form) for form in node_of(graph, "SumBackward1").forms] == ["[3] float64"]


def test_what_was_written_to_since_is_noted() -> None:
    middle = torch.rand(3, requires_grad=True) * 1
    y = middle * middle
    assert trace(y).notes == ()
    with torch.no_grad():
        middle.add_(1)
    (note,) = trace(y).notes
    assert note == "tensors that MulBackward0 saved were modified later: a backward raises"


def test_anomaly_mode_tells_the_lines() -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=False):
        y = torch.rand(3, requires_grad=True).exp()
    node = node_of(trace(y), "ExpBackward0")
    assert Path(node.where.partition(":")[0]).name == HERE
    assert node.source == "y = torch.rand(3, requires_grad=True).exp()"


def test_attributes_have_signs() -> None:
    node = node_of(trace(torch.rand(2, 3, requires_grad=True).softmax(-1)), "SoftmaxBackward0")
    assert ("dim", "-1") in node.attributes


def test_a_function_that_nobody_adopted_is_told_from_operations() -> None:
    square: Any = Square.apply
    graph = trace(square(torch.rand(3, requires_grad=True)))
    expected = "Square"
    assert labels(graph, "function") == [expected]
    assert labels(graph, "operation") == []


# Calls


def test_a_network_is_drawn_call_by_call_in_its_modules() -> None:
    graph = trace(network(), Options(inputs=torch.rand(3, 4)))
    calls = ["opsmith::linear", "batch_norm", "relu", "linear", "relu", "drawn::plain", "relu", "argmax"]
    assert labels(graph, "operation", "operator") == calls
    groups = {group.id: group.label for group in graph.groups}
    assert list(groups.values()) == ["first", "last", "first.0", "first.1"]
    assert groups[node_of(graph, "opsmith::linear").group or ""] == "first.0"
    assert [node.name for node in graph.nodes if node.label == "relu"] == [
        "first.2",
        "activation",
        "activation #2",
    ]
    weight = node_of(graph, "first.0.weight")
    assert (weight.kind, groups[weight.group or ""]) == ("parameter", "first.0")
    assert labels(graph, "output") == ["output['y']", "output['best']"]


def test_calls_have_their_lines_and_arguments() -> None:
    graph = trace(network(), Options(inputs=torch.rand(3, 4)))
    node = node_of(graph, "argmax")
    lines, start = inspect.getsourcelines(Network.forward)
    number = start + next(at for at, line in enumerate(lines) if "argmax" in line)
    assert Path(node.where).name == f"drawn.py:{number}"
    assert node.source == lines[number - start].strip()
    assert ("argument 1", "-1") in node.attributes


def test_a_training_graph_stands_in_the_modules_that_made_it() -> None:
    graph = trace(network(), Options(inputs=torch.rand(3, 4), training=True))
    groups = {group.id: group for group in graph.groups}
    assert groups[node_of(graph, "opsmith::linear").group or ""].label == "first.0"
    # Autograd has recorded what this operator consists of; it stands out all the same.
    sine = groups[node_of(graph, "SinBackward0").group or ""]
    assert (sine.label, sine.kind) == ("drawn::plain", "operator")
    assert graph.title == "training graph of Network"
    assert labels(graph, "output") == ["output['y']"]


def test_a_trace_changes_nothing() -> None:
    net, x = network(), torch.rand(3, 4)
    dropping = torch.nn.Sequential(net.first, torch.nn.Dropout())
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    kept = dict(net.named_buffers())
    waiting = dropping(x).sum()  # its graph holds the buffers
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    state = torch.get_rng_state()
    trace(dropping, Options(inputs=x, training=True))
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in net.named_buffers():
        assert buffer is kept[name]
        assert torch.equal(buffer, buffers[name])
    waiting.backward()
    assert dropping.training


def test_a_module_that_raises_leaves_nothing_behind() -> None:
    class Failing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"after {self.inner(x).sum() > -1e9}")

    net = Failing()
    buffer = net.inner.running_mean
    with pytest.raises(RuntimeError, match="after"):
        trace(net, Options(inputs=torch.rand(2, 3)))
    assert net.inner.running_mean is buffer
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_module_is_compiled_without_a_warning_once_one_was_drawn() -> None:
    trace(torch.nn.Linear(2, 2), Options(inputs=torch.rand(2, 2)))
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.rand(2, 2))


def test_what_depends_on_data_is_drawn_as_it_went() -> None:
    def counting(x: Tensor) -> Tensor:
        while float(x.sum()) < 10:
            x = x + 1
        return x

    graph = trace(counting, Options(inputs=torch.zeros(3)))
    assert labels(graph, "operation").count("add") == 4
    assert labels(graph, "operation").count("float") == 5


def test_writes_are_followed_through_views() -> None:
    def filling(x: Tensor) -> Tensor:
        y = torch.zeros(2, 3)
        row = y[0]
        row.add_(x)
        y[1] = x.exp()
        return y.sum()

    graph = trace(filling, Options(inputs=torch.ones(3)))
    assert labels(graph, "operation") == ["zeros", "getitem", "add_", "exp", "setitem", "sum"]
    into = {edge.target: [] for edge in graph.edges}
    for edge in graph.edges:
        into[edge.target].append(graph.by_id[edge.source].label)
    assert into[node_of(graph, "sum").id] == ["setitem"]
    assert sorted(into[node_of(graph, "setitem").id]) == ["add_", "exp"]


def test_what_no_output_depends_on_is_left_out_and_told() -> None:
    def idle(x: Tensor) -> Tensor:
        x.exp()
        return x.sin()

    graph = trace(idle, Options(inputs=torch.ones(3)))
    assert labels(graph, "operation") == ["sin"]
    assert graph.notes == ("1 call that no output depends on is left out",)


def test_what_cannot_be_seen_is_not_said_to_be_useless() -> None:
    graph = trace(torch.vmap(torch.sin), Options(inputs=torch.ones(3)))
    (note,) = graph.notes
    assert note == (
        "`output` comes from no recorded call: transforms of torch.func are not recorded, and 1 call is "
        "not drawn"
    )


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:FutureWarning")  # torch 2.15
def test_a_module_in_torchscript_is_one_call() -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            example = (torch.ones(2, 3),)
            self.inner = torch.jit.trace(torch.nn.Linear(3, 3), example)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * 2

    graph = trace(Around(), Options(inputs=torch.rand(2, 3)))
    (call, _) = [node for node in graph.nodes if node.kind == "operation"]
    assert call.name == "inner"
    assert call.attributes == (("inside", "not seen: it does not run in Python"),)


def test_tensors_from_elsewhere_are_constants() -> None:
    mask = torch.ones(3)
    graph = trace(lambda x: x * mask, Options(inputs=torch.rand(3)))
    assert [node.kind for node in graph.nodes] == ["input", "constant", "operation", "output"]


def test_a_graph_from_before_is_not_taken_for_the_call_s() -> None:
    before = torch.rand(3, requires_grad=True).exp()
    graph = trace(
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()), Options(inputs=before, training=True)
    )
    places = {node.label: node.name for node in graph.nodes if node.kind == "operation"}
    assert places == {"ExpBackward0": "", "ReluBackward0": "0", "SigmoidBackward0": "1"}


def test_operators_without_formulas_are_operations_where_nobody_watched() -> None:
    graph = trace(plain(torch.rand(3, requires_grad=True)))
    assert labels(graph, "operation") == ["MulBackward0", "SinBackward0", "AddBackward0"]


def test_a_compiled_module_is_drawn_as_it_was_written() -> None:
    net = torch.compile(network())
    graph = trace(net, Options(inputs=torch.rand(3, 4)))
    assert node_of(graph, "opsmith::linear").kind == "operator"
    assert "first.0" in {group.label for group in graph.groups}


def test_packages_whose_names_begin_with_torch_are_not_torch() -> None:
    from opsmith.core.location import short_path, user_line_of_traceback

    torch_folder, ours = Path(torch.__file__).parent, Path(opsmith.__file__).parent
    vision = torch_folder.with_name("torchvision") / "models" / "resnet.py"
    entries = [f'  File "{place}", line 3, in call' for place in (vision, torch_folder / "nn" / "a.py")]
    file, line = user_line_of_traceback("\n".join(entries)) or ("", 0)
    assert (short_path(file), line) == ("torchvision/models/resnet.py", 3)
    beside = ours.with_name("opsmith_models") / "net.py"
    entries = [f'  File "{place}", line 7, in call' for place in (beside, ours / "core" / "a.py")]
    assert user_line_of_traceback("\n".join(entries)) == (str(beside), 7)
    assert user_line_of_traceback(entries[1]) is None
