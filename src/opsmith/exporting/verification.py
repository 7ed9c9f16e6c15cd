"""Compare a file with PyTorch at the given sizes and at other sizes, and find the first differing node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.exporting.capture import first_line, where_called
from opsmith.exporting.closeness import Closeness, Rounding, closeness, in_float64
from opsmith.exporting.model import Axes, other_sizes
from opsmith.exporting.model_file import PREFIX, save
from opsmith.exporting.other_values import other_values
from opsmith.exporting.report import GIVEN, Comparison, Export
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.translation import OPERATOR
from opsmith.judging.answer import Answer

OTHERS = 2
"""Number of inputs with other values (one of them unlike the example), and of other sizes of each axis."""


def refuse_random(used: Iterable[Specification]) -> None:
    """Refuse to compare random operators.

    Raises:
        ExportError: For the first random operator.
    """
    for each in used:
        if each.random:
            raise errors.ExportError(
                "it draws random numbers, but ONNX Runtime draws different numbers: they cannot be compared",
                operator=each.name,
                where=each.where,
                hint="write `verify=False`, or pass the random numbers to the operator as an argument",
            )


@dataclass(frozen=True)
class Verification:
    """A comparison of a file with PyTorch.

    Args:
        model: The model in PyTorch, from tensors to tensors.
        inputs: The given inputs.
        returned: The results of the model for these inputs.
        axes: The dynamic axes.
        outputs: Names of the outputs.
        rounding: The nodes that round.
        program: torch's program and the translated model, to search for the first node that differs.
        renamed: torch's name of each value that has a different name in the file.
    """

    model: torch.nn.Module
    inputs: Sequence[Tensor]
    returned: Sequence[Tensor]
    axes: Axes
    outputs: Sequence[str]
    rounding: Rounding
    program: Any
    renamed: Mapping[str, str]

    def compare(self, export: Export, runtime: Runtime) -> Export:
        """Compare on the given inputs, on other values of the same sizes, and at other sizes of dynamic axes.

        Returns:
            The export with the comparisons, and with the sizes and values that PyTorch refuses.

        Raises:
            ExportMismatchError: If the results differ.
            OnnxRuntimeError: If ONNX Runtime refuses inputs that PyTorch takes.
        """
        found = [*self._compared(runtime, GIVEN, self.inputs, _on_cpu(self.returned))]
        left_out: list[str] = []
        unverified = ""
        for needed, choices in self._choices():
            done, refused = 0, "all numbers of the example are equal, so no other numbers are in their range"
            for values, inputs in choices:
                expected = self._expected(inputs)
                if isinstance(expected, str):
                    refused = f"{self._named(values, inputs)}: {expected}"
                    left_out.append(refused)
                    continue
                found += self._compared(runtime, values, inputs, expected)
                done += 1
                if done == OTHERS:
                    break
            if done < needed:
                unverified = unverified or f"{done} of {OTHERS} other inputs could be compared: {refused}"
        found = [*export.comparisons, *found]
        return replace(export, comparisons=tuple(found), left_out=tuple(left_out), unverified=unverified)

    def _choices(self) -> Iterator[tuple[int, Iterable[tuple[str, Sequence[Tensor]]]]]:
        """Inputs with other values, then with other sizes of each axis: the needed number and the choices."""
        if any(each.numel() for each in self.inputs):
            yield OTHERS, other_values(self.inputs)
        for name, size in self.axes.sizes(self.inputs).items():
            yield 1, ((GIVEN, self.axes.at(self.inputs, {name: other})) for other in other_sizes(size))

    def _named(self, values: str, inputs: Sequence[Tensor]) -> str:
        """The values of inputs in words; the sizes of their axes if the values are the given ones."""
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.axes.sizes(inputs).items())
        return sizes if values == GIVEN else f"values {values}"

    def _expected(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | str:
        """PyTorch's results, or the reason in words why these inputs cannot be compared."""
        try:
            with torch.no_grad():
                results = _on_cpu(self.model(*(each.clone() for each in inputs)))  # a model may write
        except Exception as error:  # the model may raise any exception
            return first_line(error)
        finite = all(bool(each.isfinite().all()) for each in results)
        if not finite and all(bool(each.isfinite().all()) for each in self.returned):
            return "the results are not finite"
        return results

    def _compared(
        self, runtime: Runtime, values: str, inputs: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> Iterator[Comparison]:
        results = runtime.run(dict(zip(self.axes.inputs, inputs, strict=True)))

        @cache
        def truths(dtype: torch.dtype) -> Sequence[Answer] | None:
            found = in_float64(self.model, inputs)
            return None if found is None else found.at(inputs, dtype)

        for at, (name, got, wanted) in enumerate(zip(self.outputs, results, expected, strict=True)):

            def truth(dtype: torch.dtype, at: int = at) -> Answer | None:
                answers = truths(dtype)
                return None if answers is None else answers[at]

            rounding = self.rounding
            found = closeness(got, wanted, rounding.nodes, rounding.coarsest.get(name), truth)
            if not found.close:
                raise self._mismatch(name, got, wanted, found, values, inputs, runtime.library)
            sizes, native = self.axes.sizes(inputs), runtime.library is not None
            yield Comparison(sizes, values, name, found.difference, found.allowed, found.reason, native)

    def _mismatch(
        self,
        name: str,
        got: Tensor,
        wanted: Tensor,
        found: Closeness,
        values: str,
        inputs: Sequence[Tensor],
        library: Path | None,
    ) -> errors.ExportMismatchError:
        sizes = self._named(GIVEN, inputs)
        first = self._first_difference(inputs, library)
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            words = f"{got.dtype} {list(got.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
        else:
            words = f"off by {found.difference:.1e} of the largest value"
        return errors.ExportMismatchError(
            f"the file and PyTorch compute different values of `{name}`{f' at {sizes}' if sizes else ''}"
            f"{f' for {self._named(values, inputs)}' * (values != GIVEN)}"
            f"{', with the library of kernels' * (library is not None)}",
            operator=None if first is None else first.operator,
            argument=name,
            expected=f"at most {found.allowed:.1e}: {found.reason}",
            got=words if first is None else f"{words}; the first node that differs is {first}",
            where=None if first is None else first.where,
            hint=f"no file was left; {self._hint(values, first)}",
        )

    def _first_difference(self, inputs: Sequence[Tensor], library: Path | None) -> NodeDifference | None:
        """The first node whose output differs; None if no output differs, or the comparison is impossible."""
        program, rounding = self.program.exported_program, self.rounding
        recorded = _recorded(program, inputs)
        calls = {node.name: node for node in program.graph.nodes}
        candidates = [
            (node, value, self.renamed.get(value.name, value.name))
            for node in self.program.model.graph
            for value in node.outputs
        ]
        candidates = [each for each in candidates if isinstance(recorded.get(each[2]), Tensor)]
        try:
            runtime = _every_value(self.program.model, [value for _, value, _ in candidates], library)
            results = runtime.run(dict(zip(self.axes.inputs, inputs, strict=True)))
        except (errors.OnnxRuntimeError, ValueError, OSError):
            return None  # ONNX Runtime cannot output a value of this kind, or the disk is full
        for (node, value, name), got in zip(candidates, results, strict=True):
            wanted = recorded[name].detach().cpu()
            found = closeness(got, wanted, rounding.nodes, rounding.coarsest.get(value.name))
            if not found.close:
                kind, operator = node.op_type, node.metadata_props.get(OPERATOR)
                return NodeDifference(kind, name, operator, where_called(calls[name]), found.difference)
        return None

    def _hint(self, values: str, first: NodeDifference | None) -> str:
        written = self.program.exported_program.graph_signature.buffers_to_mutate.values()
        if written:
            names = ", ".join(f"`{name.removeprefix(PREFIX)}`" for name in written)
            return f"the model writes into {names}, and a file keeps no state between runs"
        traced = (
            "no code may read the numbers of tensors during the trace, or catch the errors of these reads"
        )
        kernel = "compare the operator's kernel with its reference: `opsmith check`"
        hints = [f"the file is right for the example, so {traced}"] * (values != GIVEN)
        hints += [kernel] * (first is not None and first.operator is not None)
        report = "give inputs that are more like real inputs, or report the fault to torch with the model"
        return "; or ".join(hints) or report


def _on_cpu(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.detach().cpu() for each in results)


@dataclass(frozen=True)
class NodeDifference:
    """A node whose output differs from PyTorch's.

    Args:
        kind: The type of the node.
        value: The name of the output.
        operator: The opsmith operator that the node calls; None if it calls none.
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


def _every_value(model: Any, values: Sequence[Any], library: Path | None) -> Runtime:
    """A runtime for a model, with these values as its outputs."""
    outputs = list(model.graph.outputs)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.graph.outputs[:] = values
            save(model, Path(folder) / "values.onnx")
        finally:
            model.graph.outputs[:] = outputs
        return Runtime(Path(folder) / "values.onnx", "every node", library=library)


def _recorded(program: Any, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """The value of each node of a program, run on these inputs."""
    rest = iter(inputs)
    held = {**program.state_dict, **program.constants}
    users = set(program.graph_signature.user_inputs)
    given = [
        next(rest) if each.arg.name in users else held[each.target]
        for each in program.graph_signature.input_specs
    ]
    run = torch.fx.Interpreter(program.graph_module, garbage_collect_values=False)
    with torch.no_grad():
        run.run(*given)
    return {node.name: value for node, value in run.env.items()}
