"""The forward and the backward of a function as graphs, and libraries that Inductor compiles from them."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from opsmith.torch_library.capabilities.private import steady_device_guard

Taken = tuple[Literal["input", "result", "hidden", "shape"], int]
"""A value that the backward takes, with its position: an input, a result, a hidden result, or a tensor that
has only the shape of an input."""


@dataclass(frozen=True)
class FusedGraphs:
    """The graphs of a function.

    Args:
        forward: Takes the tensors; returns the results, then the hidden results.
        backward: Takes the values in `taken`, then the gradients of the differentiable results; returns the
            gradients in `gradients`. None without gradients.
        differentiable: For each result, True if it has a gradient.
        hidden: For each hidden result, the name of its dtype, and its sizes in Python, with the sizes of the
            tensors `L['t0']`, ... in them.
        taken: Values that the backward takes.
        gradients: Positions of the tensors whose gradients the backward returns.
        fakes: The tensors, with symbols for their sizes.
    """

    forward: GraphModule
    backward: GraphModule | None
    differentiable: tuple[bool, ...]
    hidden: tuple[tuple[str, str], ...]
    taken: tuple[Taken, ...]
    gradients: tuple[int, ...]
    fakes: tuple[Tensor, ...]

    @property
    def condition(self) -> str:
        """Conditions in Python on the sizes of the tensors `L['t0']`, ...; more come with a compilation."""
        return str(_shapes_of(self.fakes).produce_guards_expression(list(self.fakes)))


def fused_graphs(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], needed: Collection[int]
) -> FusedGraphs:
    """Make the graphs of a function, in which every size except 1 is a symbol.

    A thread makes them, because the caller's modes, transforms and grad mode would be in them.

    Args:
        function: Takes the tensors, and returns its results.
        tensors: Tensors of a call.
        needed: Positions of the tensors that need a gradient.
    """
    with ThreadPoolExecutor(max_workers=1, initializer=steady_device_guard) as thread:
        return thread.submit(_fused_graphs, function, tensors, needed).result()


def _fused_graphs(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], needed: Collection[int]
) -> FusedGraphs:
    # The compiler's modules take seconds to import, and nothing else needs them.
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    config: Any = _config  # torch installs its methods at run time
    mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False, duck_shape=False))
    # Otherwise each comparison of a size with 1, for which the result is the same, would restrict the sizes.
    with config.patch(backed_size_oblivious=True):
        fakes = [_fake(mode, tensor, at, at in needed) for at, tensor in enumerate(tensors)]
        differentiable: list[bool] = []

        def traced(*given: Tensor) -> tuple[Tensor, ...]:
            results = function(*given)
            differentiable[:] = [each.requires_grad for each in results]
            return tuple(_without_alias(each) for each in results)

        with mode:
            joint: Any = aot_export_joint_simple(
                traced, tuple(fakes), trace_joint=bool(needed), decompositions=select_decomp_table()
            )
            if not needed:
                count = (False,) * len(_outputs(joint))
                return FusedGraphs(joint, None, count, (), (), (), tuple(fakes))
            forward, backward = min_cut_rematerialization_partition(
                joint, fakes, num_fwd_outputs=len(differentiable)
            )
            return _parted(forward, backward, fakes, tuple(differentiable))


def compile_graph(graph: GraphModule, path: Path, compiler: str) -> None:
    """Compile a graph into a library.

    Args:
        graph: A graph of `fused_graphs`.
        path: File of the library. A file of the same name with `.json` describes the operations that eager
            kernels compute, if there are any.
        compiler: Program that compiles C++.
    """
    import torch._inductor
    from torch._inductor import config

    inputs = tuple(each.meta["val"].detach() for each in _inputs(graph))
    options = {
        "cpp.cxx": (None, compiler),
        "fx_graph_cache": False,
        "compile_threads": 1,
        "cpp.dynamic_threads": True,
    }
    with config.patch(options), warnings.catch_warnings():
        # Inductor calls deprecated names of torch, and warns of complex numbers, which eager kernels compute.
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            library = Path(scratch, path.name)
            torch._inductor.aot_compile(graph, inputs, options={"aot_inductor.output_path": str(library)})
            library.rename(path)
            for described in Path(scratch).glob("*.json"):
                if not described.stem.endswith("_metadata"):
                    described.rename(path.with_suffix(".json"))  # of operations that eager kernels compute


def load_graph(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """Load a library, and return the function that computes its graph."""
    from torch._C import _aoti

    run: Callable[[list[Tensor]], list[Tensor]] = _aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
    return run


def _sizes(fake: Tensor) -> Sequence[Any]:
    return fake.shape


def _shapes_of(fakes: Sequence[Any]) -> Any:
    return fakes[0].fake_mode.shape_env


def _fake(mode: FakeTensorMode, tensor: Tensor, at: int, needed: bool) -> Tensor:
    from torch._dynamo.source import LocalSource

    sizes = [DimDynamic.STATIC if size == 1 else DimDynamic.DYNAMIC for size in tensor.shape]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    given = tensor.detach().requires_grad_(needed)
    return mode.from_tensor(given, source=LocalSource(f"t{at}"), symbolic_context=context)


def _without_alias(result: Tensor) -> Tensor:
    """Return a result; a copy if it is a view, which a graph must not return. Inductor drops most copies."""
    return result.clone() if result._is_view() else result


def _inputs(graph: GraphModule) -> list[Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _outputs(graph: GraphModule) -> list[Any]:
    [output] = graph.graph.find_nodes(op="output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def _storage(node: Node) -> int:
    value = node.meta["val"]
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _whole(node: Node) -> Node:
    """The value of which a node is an alias."""
    aliases = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
    while node.target in aliases and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _own_memory(nodes: Sequence[Node], others: Sequence[Node]) -> list[Node]:
    """Return the nodes; a copy of each that is a view of another one, which an operator must not return."""
    memory = {_storage(each) for each in others}
    found = []
    for node in nodes:
        found.append(_copied(node) if _storage(node) in memory else node)
        memory.add(_storage(node))
    return found


def _copied(node: Node) -> Node:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"].clone()
    return copy


def _return(graph: GraphModule, values: Sequence[Node]) -> GraphModule:
    [output] = graph.graph.find_nodes(op="output")
    output.args = (tuple(values),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _parted(
    forward: GraphModule, backward: GraphModule, fakes: list[Tensor], differentiable: tuple[bool, ...]
) -> FusedGraphs:
    """Give the graphs their final inputs and outputs: tensors alone, each saved value once."""
    outputs, count = _outputs(forward), len(differentiable)
    saved = {each.name: _whole(each) for each in outputs[count:] if isinstance(each.meta["val"], Tensor)}
    places: dict[Node, Taken] = {each: ("result", at) for at, each in enumerate(outputs[:count])}
    places |= {each: ("input", at) for at, each in enumerate(_inputs(forward))}
    hidden = [each for each in dict.fromkeys(saved.values()) if each not in places]
    places |= {each: ("hidden", at) for at, each in enumerate(hidden)}
    taken = [places[saved[each.name]] for each in _tensors(backward)[: -sum(differentiable)]]
    taken = [*_name_sizes(backward, taken, fakes), *taken]
    gradients = [each if isinstance(each, Node) else None for each in _outputs(backward)]
    given = [*_inputs(forward), *outputs[:count]]
    return FusedGraphs(
        _return(forward, [*outputs[:count], *_own_memory(hidden, given)]),
        _return(backward, _own_memory([each for each in gradients if each is not None], _tensors(backward))),
        differentiable,
        tuple(_described(each, fakes) for each in hidden),
        tuple(taken),
        tuple(at for at, each in enumerate(gradients) if each is not None),
        tuple(fakes),
    )


def _tensors(graph: GraphModule) -> list[Node]:
    return [each for each in _inputs(graph) if isinstance(each.meta["val"], Tensor)]


def _owners(fakes: Sequence[Tensor]) -> dict[Any, tuple[int, int]]:
    """The position of a tensor, and a dimension, for each symbol of a size."""
    return {
        size.node.expr: (at, dim)
        for at, fake in reversed([*enumerate(fakes)])
        for dim, size in enumerate(_sizes(fake))
        if isinstance(size, torch.SymInt)
    }


def _described(node: Node, fakes: Sequence[Tensor]) -> tuple[str, str]:
    """The dtype of a hidden result, and its sizes in Python."""
    value, owners = node.meta["val"], _owners(fakes)
    names = {str(symbol): "L['t{}'].size()[{}]".format(*owner) for symbol, owner in owners.items()}
    sizes = ", ".join(
        re.sub(r"\bs\d+\b", lambda found: names[found[0]], str(each.node.expr))
        if isinstance(each, torch.SymInt)
        else str(each)
        for each in _sizes(value)
    )
    return str(value.dtype).removeprefix("torch."), f"({sizes},)" if sizes else "()"


def _name_sizes(backward: GraphModule, taken: list[Taken], fakes: list[Tensor]) -> list[Taken]:
    """Compute the sizes that the backward takes from the shapes of tensors, which a library takes.

    Returns:
        The tensors of which the backward takes only the shape; they come first.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    sizes = [each for each in _inputs(backward) if not isinstance(each.meta["val"], Tensor)]
    if not sizes:
        return []
    owners = _owners(fakes)
    symbols = {symbol for each in sizes for symbol in each.meta["val"].node.expr.free_symbols}
    wanted = sorted({owners[_shapes_of(fakes).replace(symbol)][0] for symbol in symbols})
    graph, added = backward.graph, []
    place = {at: node for node, (kind, at) in zip(_tensors(backward), taken, strict=False) if kind == "input"}
    first = _inputs(backward)[0]
    for at in wanted:
        if at in place:
            continue
        with graph.inserting_before(first):
            place[at] = graph.placeholder(f"shape_of_{at}")
        place[at].meta["val"] = fakes[at].detach().new_empty(()).expand(fakes[at].shape)
        added.append(at)
    last = _inputs(backward)[-1]
    with graph.inserting_after(last):
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        known = {}
        for symbol in symbols:
            at, dim = owners[_shapes_of(fakes).replace(symbol)]
            node = graph.call_function(torch.ops.aten.sym_size.int, (place[at], dim))
            known[symbol] = torch.fx.Proxy(node, tracer)
    computed = {proxy.node for proxy in known.values()}
    body = next(each for each in graph.nodes if each.op != "placeholder" and each not in computed)
    with graph.inserting_before(body):
        for each in sizes:
            found = sympy_interp(PythonReferenceAnalysis, known, each.meta["val"].node.expr)
            each.replace_all_uses_with(found.node if isinstance(found, torch.fx.Proxy) else found)
            graph.erase_node(each)
    return [("shape", at) for at in added]


def self_test() -> None:
    """The graphs of a function compute its results and gradients, for every size."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp().sum(-1),)

    graphs = fused_graphs(function, [torch.ones(2, 3)], [0])
    x = torch.rand(4, 5, requires_grad=True)
    results = graphs.forward(x.detach())
    values = {"input": [x.detach()], "result": results[:1], "hidden": results[1:], "shape": [x.detach()]}
    assert graphs.backward is not None
    (gradient,) = graphs.backward(*(values[kind][at] for kind, at in graphs.taken), torch.ones(4))
    torch.testing.assert_close(results[0], x.exp().sum(-1))
    torch.testing.assert_close(gradient, x.exp())
    assert "t0" in graphs.condition
