"""Compare a file with PyTorch, at the given sizes and others, and find the first node that differs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.exporting.capture import first_line, where_called
from opsmith.exporting.model import Axes, other_sizes
from opsmith.exporting.model_file import PREFIX, save
from opsmith.exporting.report import Comparison
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.tolerance import (
    Rounding,
    Tolerance,
    difference,
    explained,
    in_coarser,
    in_float64,
    tolerance,
)
from opsmith.exporting.translation import OPERATOR

OTHER_SIZES = 2
"""Number of other sizes of each dynamic axis at which the file is compared."""


def refuse_random(used: Iterable[Specification]) -> None:
    """Refuse to compare random operators.

    Raises:
        ExportError: For the first random operator.
    """
    for each in used:
        if each.random:
            raise errors.ExportError(
                "it draws from a random state, and ONNX Runtime has another: the two cannot be compared",
                operator=each.name,
                where=each.where,
                hint="write `verify=False`, or let it take what is drawn as an argument",
            )


@dataclass(frozen=True)
class Verification:
    """A comparison of a file with PyTorch.

    Args:
        model: The model in PyTorch, from tensors to tensors.
        inputs: The given inputs.
        returned: The results of the model for them.
        axes: The dynamic axes.
        outputs: Names of the outputs.
        rounding: The nodes that round.
        program: torch's program and the model that it was translated to, for the search of the first node
            that differs.
        renamed: torch's name of each value that has another name in the file.
    """

    model: torch.nn.Module
    inputs: Sequence[Tensor]
    returned: Sequence[Tensor]
    axes: Axes
    outputs: Sequence[str]
    rounding: Rounding
    program: Any
    renamed: Mapping[str, str]

    def compare(
        self, runtime: Runtime, *, library: Path | None = None
    ) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
        """Compare at every choice of sizes; return the comparisons, and the sizes that PyTorch refuses.

        Args:
            runtime: The file.
            library: The library of kernels that it was loaded with.

        Raises:
            ExportMismatchError: If the results differ.
            OnnxRuntimeError: If ONNX Runtime refuses inputs that PyTorch takes.
        """
        found = list(self._compared(runtime, self.inputs, _on_cpu(self.returned), library))
        left_out: list[str] = []
        for name in self.axes.names:
            done = 0
            reason = ""
            for size in other_sizes(self.axes.sizes(self.inputs)[name]):
                inputs = self.axes.at(self.inputs, {name: size})
                try:
                    expected = self._expected(inputs)
                except Exception as error:  # the model refuses the size in any way
                    reason = f"{name} {size}: {first_line(error)}"
                    continue
                found += self._compared(runtime, inputs, expected, library)
                done += 1
                if done == OTHER_SIZES:
                    break
            if done < OTHER_SIZES:
                left_out.append(reason)
        return tuple(found), tuple(left_out)

    def _expected(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return _on_cpu(self.model(*(each.clone() for each in inputs)))  # it may write into them

    def _compared(
        self, runtime: Runtime, inputs: Sequence[Tensor], expected: Sequence[Tensor], library: Path | None
    ) -> Iterator[Comparison]:
        given = dict(zip(self.axes.inputs, inputs, strict=True))
        known = {name for name, _, _ in runtime.inputs}
        results = runtime.run({name: tensor for name, tensor in given.items() if name in known})
        for at, (name, got, wanted) in enumerate(zip(self.outputs, results, expected, strict=True)):
            off, allowed = difference(got, wanted), tolerance(wanted.dtype, self.rounding.nodes)
            if off > allowed.relative:
                explanation = self._explained(inputs, at, got, wanted)
                if explanation is None:
                    raise self._mismatch(name, got, wanted, off, allowed, inputs, library)
                allowed = explanation
            sizes, native = self.axes.sizes(inputs), library is not None
            yield Comparison(sizes, name, off, allowed.relative, allowed.reason, native)

    def _explained(self, inputs: Sequence[Tensor], at: int, got: Tensor, wanted: Tensor) -> Tolerance | None:
        """The tolerance that explains a large difference of an output; None if none does."""
        truth = in_float64(self.model, inputs)
        found = None if truth is None else explained(got, wanted, truth[at])
        if found is not None:
            return found
        coarsest = self.rounding.coarsest.get(self.outputs[at])
        coarse = in_coarser(wanted.dtype, coarsest, self.rounding.nodes)
        return coarse if coarse is not None and difference(got, wanted) <= coarse.relative else None

    def _mismatch(
        self,
        name: str,
        got: Tensor,
        wanted: Tensor,
        off: float,
        allowed: Tolerance,
        inputs: Sequence[Tensor],
        library: Path | None,
    ) -> errors.ExportMismatchError:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.axes.sizes(inputs).items())
        first = first_difference(
            self.program, self.renamed, self.axes.inputs, inputs, self.rounding, library=library
        )
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            found = f"{got.dtype} {list(got.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
        else:
            found = f"off by {off:.1e} of the largest value"
        return errors.ExportMismatchError(
            f"the file computes another `{name}` than PyTorch{f' at {sizes}' if sizes else ''}"
            f"{', with the library of kernels' if library is not None else ''}",
            operator=None if first is None else first.operator,
            argument=name,
            expected=f"at most {allowed.relative:.1e}: {allowed.reason}",
            got=found if first is None else f"{found}; the first node that differs is {first}",
            where=None if first is None else first.where,
            hint=f"no file was left; {self._hint(first)}",
        )

    def _hint(self, first: NodeDifference | None) -> str:
        written = self.program.exported_program.graph_signature.buffers_to_mutate.values()
        if written:
            names = ", ".join(f"`{name.removeprefix(PREFIX)}`" for name in written)
            return f"the model writes into {names}, and a file keeps nothing from one run to the next"
        if first is not None and first.operator:
            return "compare the operator's kernel with its reference: `opsmith check`"
        return "give inputs that are more like real ones, or report it to torch with the model"


def _on_cpu(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.detach().cpu() for each in results)


@dataclass(frozen=True)
class NodeDifference:
    """A node whose output differs from PyTorch's.

    Args:
        kind: The type of the node.
        value: The name of the output.
        operator: Our operator that the node calls; None for another node.
        where: The source line in the model.
        difference: The relative difference.
    """

    kind: str
    value: str
    operator: str | None
    where: str | None
    difference: float

    def __str__(self) -> str:
        return f"`{self.kind}`, whose output `{self.value}` is off by {self.difference:.1e}"


class _Recording(torch.fx.Interpreter):
    """Run a program of torch, and record the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node, and record its value."""
        value = super().run_node(n)
        self.seen[n.name] = value
        return value


def first_difference(
    translated: Any,
    renamed: Mapping[str, str],
    names: Sequence[str],
    inputs: Sequence[Tensor],
    rounding: Rounding,
    *,
    library: Path | None = None,
) -> NodeDifference | None:
    """The first node whose output differs; None if no output does, or the comparison is impossible.

    Args:
        translated: The result of torch's exporter, with the bodies of our nodes.
        renamed: torch's name of each value that has another name in the file.
        names, inputs: The inputs of the file.
        rounding: The nodes that round.
        library: A library of kernels for ONNX Runtime.
    """
    program = translated.exported_program
    recorded = _recorded(program, inputs)
    calls = {node.name: node for node in program.graph.nodes}
    candidates = [
        (node, value, renamed.get(value.name, value.name))
        for node in translated.model.graph
        for value in node.outputs
    ]
    candidates = [each for each in candidates if isinstance(recorded.get(each[2]), Tensor)]
    try:
        runtime = _every_value(translated.model, [value for _, value, _ in candidates], library)
        known = {name for name, _, _ in runtime.inputs}
        given = {name: tensor for name, tensor in zip(names, inputs, strict=True) if name in known}
        results = runtime.run(given)
    except (errors.OnnxRuntimeError, ValueError, OSError):
        return None  # an output cannot have such a value, or the disk is full
    for (node, value, name), got in zip(candidates, results, strict=True):
        wanted = recorded[name].detach().cpu()
        off, allowed = difference(got, wanted), tolerance(wanted.dtype, rounding.nodes)
        allowed = in_coarser(wanted.dtype, rounding.coarsest.get(value.name), rounding.nodes) or allowed
        if off > allowed.relative:
            kind, operator = node.op_type, node.metadata_props.get(OPERATOR)
            return NodeDifference(kind, name, operator, where_called(calls[name]), off)
    return None


def _every_value(model: Any, values: Sequence[Any], library: Path | None) -> Runtime:
    """A runtime for a model with these values as outputs."""
    outputs = list(model.graph.outputs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.graph.outputs[:] = values
            save(model, Path(folder) / "values.onnx")
        finally:
            model.graph.outputs[:] = outputs
        return Runtime(Path(folder) / "values.onnx", "every node", library=library)


def _recorded(program: Any, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """The value of each node of a program for these inputs."""
    rest = iter(inputs)
    held = {**program.state_dict, **program.constants}
    users = set(program.graph_signature.user_inputs)
    given = [
        next(rest) if each.arg.name in users else held[each.target]
        for each in program.graph_signature.input_specs
    ]
    recording = _Recording(program.graph_module)
    with torch.no_grad():
        recording.run(*given)
    return recording.seen
