"""A derived kernel for one kind of call: its libraries, the operators that call them, and its conditions."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opsmith.core.cached_property import cached_property
from opsmith.core.expression import ExpressionError, parse
from opsmith.core.formula import non_differentiable
from opsmith.core.kernels import BuiltKernel, Kernel
from opsmith.core.operator import Operator
from opsmith.declaration import operator
from opsmith.kernels.derived.conditions import (
    CONDITIONS,
    evaluated,
    exact_sizes,
    holds,
    read_conditions,
    read_sizes,
)
from opsmith.torch_library import capabilities
from opsmith.torch_library.compilation import EAGER

if TYPE_CHECKING:
    from opsmith.torch_library.capabilities import FusedGraphs

FACTS = "facts.json"
FORWARD, BACKWARD = "forward.so", "backward.so"

Traced = Callable[..., Sequence[Tensor]]
"""The reference as a function of tensors alone, which returns all results as tensors."""


@dataclass(frozen=True)
class Facts:
    """Facts about the graphs of a variant, which are stored beside its libraries.

    Args:
        forms: For each result, -1 for a tensor, the length of a list, None for no tensor.
        differentiable: For each tensor that is returned, True if it has a gradient.
        hidden: For each hidden result, its dtype, and an expression for its sizes.
        taken: Values that the backward takes; see `FusedGraphs`.
        gradients: Positions of the tensors whose gradients the backward returns.
        conditions: Conditions on the sizes of the tensors.
        sizes: Sizes of the tensors of the call for which it was built. The partitioner chooses by them.
    """

    forms: list[int | None]
    differentiable: list[bool]
    hidden: list[tuple[str, str]]
    taken: list[tuple[str, int]]
    gradients: list[int]
    conditions: list[str]
    sizes: list[list[int]]


def build_variant(
    folder: Path, graphs: FusedGraphs, forms: list[int | None], tensors: Sequence[Tensor], compiler: str
) -> None:
    """Compile the graphs of a kind of call into a folder.

    Args:
        folder: Folder of the libraries and the facts.
        graphs: The graphs.
        forms: See `Facts`.
        tensors: Tensors of a call of this kind.
        compiler: Program that compiles C++.
    """
    capabilities.compile_graph(graphs.forward, folder / FORWARD, compiler)
    if graphs.backward is not None:
        capabilities.compile_graph(graphs.backward, folder / BACKWARD, compiler)
    try:
        conditions = read_conditions(graphs.condition)  # a compilation adds some
    except (ExpressionError, SyntaxError):
        conditions = exact_sizes(tensors)
    facts = Facts(
        forms,
        [*graphs.differentiable],
        [(dtype, read_sizes(sizes)) for dtype, sizes in graphs.hidden],
        [*graphs.taken],
        [*graphs.gradients],
        conditions,
        [[*each.shape] for each in tensors],
    )
    (folder / FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")


class Variant:
    """A derived kernel for one kind of call.

    Args:
        name: `namespace::name` of the operator that makes the autograd node.
        reference: The reference of the operator from which it is derived.
        folder: Folder that `build_variant` has filled.
        traced: The reference as a function of tensors.
        example: Tensors of a call of this kind.
        needed: Positions of the tensors that need a gradient.

    Attributes:
        origin: Text that says where its libraries came from.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        folder: Path,
        traced: Traced,
        example: Sequence[Tensor],
        needed: Sequence[int],
        origin: str,
    ) -> None:
        self.facts = Facts(**json.loads((folder / FACTS).read_text(encoding="utf-8")))
        self._conditions = [parse(each, CONDITIONS) for each in self.facts.conditions]
        self._name, self._reference, self._traced, self._needed = name, reference, traced, needed
        self._dtypes = [each.dtype for each in example]
        self._forward = capabilities.load_graph(folder / FORWARD)
        self._backward = capabilities.load_graph(folder / BACKWARD) if needed else None
        self.origin = origin

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if it computes calls with tensors of these sizes."""
        return holds(self._conditions, tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the results from contiguous tensors, with an autograd node if a gradient is needed."""
        if self._backward is None:
            return self._forward([*tensors])
        results = self.operator(*tensors)
        return [results] if isinstance(results, Tensor) else [*results]

    def hidden_results(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the sizes, dtype and bytes of each hidden result in a call with these tensors."""
        found = []
        for dtype, text in self.facts.hidden:
            sizes = evaluated(parse(text, CONDITIONS), tensors)
            size = getattr(torch, dtype).itemsize * math.prod(sizes)
            found.append(f"a hidden result {[*sizes]} in {dtype} ({size} bytes)")
        return found

    @cached_property
    def _graphs(self) -> Any:
        """The graphs, derived again in this process: for fake tensors and for second-order gradients."""
        example = [
            torch.zeros(sizes, dtype=dtype)
            for sizes, dtype in zip(self.facts.sizes, self._dtypes, strict=True)
        ]
        return capabilities.fused_graphs(self._traced, example, self._needed)

    @cached_property
    def operator(self) -> Operator[..., Any]:
        """The operator of the forward with the hidden results, whose formula calls the backward."""
        facts = self.facts
        inputs = [f"t{at}" for at in range(len(self._dtypes))]
        results = [f"y{at}" for at in range(len(facts.differentiable))]
        hidden = [f"saved{at}" for at in range(len(facts.hidden))]
        roles = {
            name: ... if has else non_differentiable
            for name, has in zip(results, facts.differentiable, strict=True)
        }
        forward = self._declared(
            self._name, inputs, roles | dict.fromkeys(hidden, ...), hidden, "forward", self._forward
        )
        shapes = [f"{name}_shape" for name in inputs]
        names = {"input": inputs, "result": results, "hidden": hidden, "shape": shapes}
        taken = [names[kind][at] for kind, at in facts.taken]
        grads = [
            name
            for name, at in forward.specification.schema.gradient_position.items()
            if at < len(results) and facts.differentiable[at]
        ]
        answers = [inputs[at] for at in facts.gradients]
        backward = self._declared(
            f"{self._name}_backward",
            [f"t{at}" for at in range(len(taken) + len(grads))],
            dict.fromkeys([f"y{at}" for at in range(len(answers))], ...),
            [],
            "backward",
            self._backward,
        )

        def formula(**given: Any) -> dict[str, Tensor]:
            like = given[grads[0]]
            values = [
                like.new_empty(()).expand(given[name]) if name in shapes else given[name] for name in taken
            ]
            found = backward(*values, *(given[name].contiguous() for name in grads))
            return dict(zip(answers, [found] if isinstance(found, Tensor) else found, strict=True))

        _give_signature(formula, dict.fromkeys([*grads, *taken], inspect.Parameter.empty), None)
        forward.gradients(*answers)(formula)
        return forward

    def _declared(
        self,
        name: str,
        inputs: Sequence[str],
        roles: dict[str, Any],
        hidden: Sequence[str],
        graph: str,
        library: Any,
    ) -> Operator[..., Any]:
        """Declare an operator that a library computes, and whose reference is a graph."""

        def returned(found: Sequence[Tensor]) -> Any:
            return found[0] if len(roles) == 1 else tuple(found)

        def reference(*given: Tensor) -> Any:
            return returned(getattr(self._graphs, graph)(*given))

        results: Any = Tensor if len(roles) == 1 else tuple[(Tensor,) * len(roles)]  # type: ignore[misc]
        _give_signature(reference, dict.fromkeys(inputs, Tensor), results)
        named: Any = reference
        named.__module__, named.__qualname__ = self._reference.__module__, self._reference.__qualname__
        declared: Operator[..., Any] = operator(name, results=roles, hidden=[*hidden])(reference)
        declared.replace_kernels((Kernel("cpu", GraphKernel(declared, library)),))
        return declared


@dataclass(frozen=True)
class GraphSource:
    """The place of a library's graph, which Inductor has written."""

    where: str
    entry: str = "graph"
    text: str = ""


class GraphKernel(BuiltKernel[GraphSource]):
    """Kernel that calls a library.

    Args:
        operator: The operator of the graph.
        library: Function that computes the graph.
    """

    key, language = "derived", "Inductor"
    pure = True
    dtypes = None

    def __init__(self, operator: Operator[..., Any], library: Callable[[list[Tensor]], list[Tensor]]) -> None:
        source = GraphSource(operator.specification.where)
        super().__init__(operator, lambda: source, strict=False)
        self._library, self._single = library, operator.specification.schema.single

    def __call__(self, *tensors: Tensor) -> Any:
        """Compute the graph."""
        found = self._library([*tensors])
        return found[0] if self._single else tuple(found)

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Take every call with data: its variant has chosen it."""
        with_data = all(type(each) in EAGER for each in values)
        return None if with_data else "it takes only tensors with data"

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Return no tensor: the variant has copied them."""
        return ()

    def _forget(self) -> None:
        """Keep the library: its variant loads it."""


def _give_signature(function: Callable[..., Any], parameters: dict[str, Any], returned: Any) -> None:
    """Give a function named parameters, which declarations and formulas read."""
    kind = inspect.Parameter.KEYWORD_ONLY if returned is None else inspect.Parameter.POSITIONAL_OR_KEYWORD
    given: Any = function
    given.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=type_) for name, type_ in parameters.items()],
        return_annotation=inspect.Signature.empty if returned is None else returned,
    )
    given.__annotations__ = {
        **{name: type_ for name, type_ in parameters.items() if type_ is not inspect.Parameter.empty},
        **({} if returned is None else {"return": returned}),
    }
