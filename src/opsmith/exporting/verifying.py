"""A file beside PyTorch: on the inputs that were given, and at other sizes of every dynamic axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.specification import Specification
from opsmith.exporting.axes import Axes, other_sizes
from opsmith.exporting.bisecting import Culprit, first_difference
from opsmith.exporting.finishing import PREFIX
from opsmith.exporting.references import first_line
from opsmith.exporting.report import Comparison
from opsmith.exporting.rounding import Rounding
from opsmith.exporting.runtime import Runtime
from opsmith.exporting.tolerance import (
    Tolerance,
    difference,
    explained,
    in_coarser,
    in_float64,
    tolerance,
)

BESIDE = 2
"""How many other sizes of each axis are compared."""


def refuse_random(used: Iterable[Specification]) -> None:
    """Refuse to compare what draws: two runs of it are never alike.

    Raises:
        ExportError: Naming the operator.
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
    """What is compared.

    Args:
        model: Takes tensors and returns tensors, in PyTorch.
        inputs: What was given.
        returned: What the model returns for them.
        axes: Its dynamic axes.
        outputs: Names of the outputs.
        rounding: What rounds in the file.
        program: The program of torch that was translated, and the model that it became, in which the first
            node that differs is looked for.
        renamed: Torch's names of values, where they are others in the file.
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
        """Compare at every choice of sizes; and what was left out, since PyTorch refuses it.

        Args:
            runtime: The file.
            library: The library of kernels that it was loaded with.

        Raises:
            ExportMismatchError: If the file computes something else.
            OnnxRuntimeError: If ONNX Runtime refuses what PyTorch computes.
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
                except Exception as error:  # whatever a model says of a size that it does not take
                    reason = f"{name} {size}: {first_line(error)}"
                    continue
                found += self._compared(runtime, inputs, expected, library)
                done += 1
                if done == BESIDE:
                    break
            if done < BESIDE:
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
        for at, (name, got, want) in enumerate(zip(self.outputs, results, expected, strict=True)):
            off, allowed = difference(got, want), tolerance(want.dtype, self.rounding.nodes)
            if off > allowed.relative:
                more = self._explained(inputs, at, got, want)
                if more is None:
                    raise self._mismatch(name, got, want, off, allowed, inputs, library)
                allowed = more
            sizes, native = self.axes.sizes(inputs), library is not None
            yield Comparison(sizes, name, off, allowed.relative, allowed.reason, native)

    def _explained(self, inputs: Sequence[Tensor], at: int, got: Tensor, want: Tensor) -> Tolerance | None:
        """What explains that an output is far off; None if nothing does."""
        truth = in_float64(self.model, inputs)
        found = None if truth is None else explained(got, want, truth[at])
        if found is not None:
            return found
        coarsest = self.rounding.coarsest.get(self.outputs[at])
        coarse = in_coarser(want.dtype, coarsest, self.rounding.nodes)
        return coarse if coarse is not None and difference(got, want) <= coarse.relative else None

    def _mismatch(
        self,
        name: str,
        got: Tensor,
        want: Tensor,
        off: float,
        allowed: Tolerance,
        inputs: Sequence[Tensor],
        library: Path | None,
    ) -> errors.ExportMismatchError:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.axes.sizes(inputs).items())
        first = first_difference(
            self.program, self.renamed, self.axes.inputs, inputs, self.rounding, library=library
        )
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            told = f"{got.dtype} {list(got.shape)} in place of {want.dtype} {list(want.shape)}"
        else:
            told = f"off by {off:.1e} of the largest value"
        return errors.ExportMismatchError(
            f"the file computes another `{name}` than PyTorch{f' at {sizes}' if sizes else ''}"
            f"{', with the library of kernels' if library is not None else ''}",
            operator=None if first is None else first.operator,
            argument=name,
            expected=f"at most {allowed.relative:.1e}: {allowed.reason}",
            got=told if first is None else f"{told}; the first node that differs is {first}",
            where=None if first is None else first.where,
            hint=f"no file was left; {self._mend(first)}",
        )

    def _mend(self, first: Culprit | None) -> str:
        written = self.program.exported_program.graph_signature.buffers_to_mutate.values()
        if written:
            names = ", ".join(f"`{name.removeprefix(PREFIX)}`" for name in written)
            return f"the model writes into {names}, and a file keeps nothing from one run to the next"
        if first is not None and first.operator:
            return "hold the operator's kernel against its reference: `opsmith check`"
        return "give inputs that are more like real ones, or report it to torch with the model"


def _on_cpu(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.detach().cpu() for each in results)
