"""A kernel in Triton: launched on a GPU, put into compiled code, or interpreted on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.build.form import Form
from opsmith.build.triton.diagnostics import told_of_launch
from opsmith.build.triton.installed import missing_triton, triton_module
from opsmith.build.triton.interpreter import interpret
from opsmith.build.triton.source import TritonSource
from opsmith.core.calls import tensors_in
from opsmith.core.kernels import VisibleKernel
from opsmith.core.operator import Operator
from opsmith.kernels.choosing import plain, scattered
from opsmith.kernels.forms import forms_of
from opsmith.kernels.from_source import KernelFromSource
from opsmith.kernels.memory import Memory, form_of_call, is_open
from opsmith.kernels.triton_binding import Binding, bind, names_in
from opsmith.kernels.triton_grid import check_grid, check_launchable, shape_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What a kernel takes of floating tensors where its author says nothing."""
MOST_ELEMENTS = 2**31 - 1
"""How far a tensor may reach: a kernel counts its elements in 32 bits, and would wrap around unseen."""
Launch = Callable[[Any, dict[str, Any]], None]
"""Runs a kernel, given its grid and all its arguments."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be launched.

    Attributes:
        grid: How many programs; a function of what `triton.autotune` chooses, where that is used.
        arguments: Values of the kernel's parameters, and what Triton is told beside.
        results: What it writes into.
    """

    grid: Any
    arguments: dict[str, Any]
    results: list[Tensor]


class TritonKernel(KernelFromSource[TritonSource], VisibleKernel):
    """A function that computes an operator by a kernel in Triton.

    Args:
        operator: Whose kernel it is.
        source: The kernel.
        grid: How many programs: numbers, or a function of what it names.
        constants: Values of parameters, or functions of what they name.
        layouts: In which layout a tensor is wanted, where it is not told by the parameters.
        dtypes: Floating dtypes that it takes, and integers if it names any.
        strict: Whether it is an error that Triton is missing, or a call that it does not take, and not only a
            reason to run the reference.

    Attributes:
        copied: How often each argument, and the results, were copied for their layout.
    """

    def __init__(
        self,
        operator: Operator[..., Any],
        source: TritonSource,
        *,
        grid: Any,
        constants: Mapping[str, Any],
        layouts: Mapping[str, str],
        dtypes: frozenset[torch.dtype],
        strict: bool,
    ) -> None:
        schema = operator.specification.schema
        super().__init__(operator, source, strict=strict)
        self._dtypes = dtypes
        self.binding: Binding = bind(source, schema, constants, layouts, operator.name)
        seen = dict.fromkeys((*schema.names, *(result.name for result in schema.results)))
        self._constants = {
            name: self._given(value, seen, f"the constant `{name}`") for name, value in constants.items()
        }
        meta = {parameter.name: None for parameter in source.parameters if parameter.constant}
        self._grid = self._given(grid, {**seen, **dict.fromkeys(constants), **meta}, "the grid")
        if not callable(grid):
            check_grid(shape_of(grid), operator.name, source.where)

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Floating dtypes that it takes, and integers if it names any."""
        return self._dtypes

    def _given(self, value: Any, known: Mapping[str, Any], what: str) -> Callable[[Mapping[str, Any]], Any]:
        """What computes a grid or constant from a call, by name."""
        if not callable(value):
            return lambda values: value
        names = names_in(value, known, what, self.source, self.operator.name)
        return lambda values: value(**{name: values[name] for name in names})

    def _forget(self) -> None:
        self._missing: str | None = None
        self._looked = False
        self._forms: Memory[tuple[Form, ...]] = Memory()
        self.copied: Counter[str] = Counter()

    def _read(self) -> TritonSource:
        return self.source  # a function in Python is read anew by declaring it again

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Why it does not take a call with these argument values; None where it does.

        Raises:
            ToolchainError: If Triton is missing, and the kernel is strict.
        """
        if not self._looked:
            if self.strict:
                triton_module()
            self._missing, self._looked = missing_triton(), True
        return self._missing or scattered(values) or self.misfit(values)

    def misfit(self, values: Sequence[Any]) -> str | None:
        """What it does not take of these argument values, whether or not Triton is there."""
        for name, value in zip(self.operator.specification.schema.names, values, strict=False):
            for tensor in tensors_in([value]):
                if not self._takes(tensor.dtype):
                    taken = " or ".join(sorted(map(plain, self.dtypes)))
                    return f"`{name}` is {plain(tensor.dtype)}, and it takes {taken}"
            wanted = self.binding.takes.get(name)
            if wanted is None:
                continue
            fault = wanted.dim_fault(name, value)
            if fault is not None:
                return fault
            if isinstance(value, Tensor) and wanted.reach(value) > MOST_ELEMENTS:
                return f"`{name}` reaches over more than 2**31 elements, which it cannot count"
        return None

    def _takes(self, dtype: torch.dtype) -> bool:
        """Whole numbers, as indices, are taken unless dtypes of them are declared."""
        if dtype in self.dtypes:
            return True
        exact = not (dtype.is_floating_point or dtype.is_complex)
        return exact and all(each.is_floating_point for each in self.dtypes)

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The arguments and results that it copies, as it takes another layout than theirs."""
        schema = self.operator.specification.schema
        copied = [
            f"`{name}`, which is not {self.binding.takes[name].layout}"
            for name, value in zip(schema.names, values, strict=True)
            if name in self.binding.takes and not self.binding.takes[name].lies_right(value)
        ]
        for result, form in zip(schema.results, self._forms_of(values), strict=True):
            wanted = self.binding.takes[result.name]
            if wanted.room_for(form, torch.device("meta")).stride() != form.stride:
                copied.append(f"`{result.name}`, which the reference does not give {wanted.layout}")
        return tuple(copied)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a GPU."""
        return self._run(args, kwargs, self._launch, count=True)

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator where torch traces: its compiler sees the kernel, and the copies beside it."""
        return self._run(args, kwargs, self._wrapped)

    def interpreted(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on the CPU, in Triton's interpreter."""
        return self._run(args, kwargs, self._interpret)

    def programs(self, values: Sequence[Any]) -> int:
        """How many programs the interpreter runs for a call with these argument values."""
        prepared = self.prepared(values)
        return prod(self._interpretable(prepared.grid, prepared.arguments)[0])

    def prepared(self, values: Sequence[Any], *, count: bool = False) -> Prepared:
        """Lay out the arguments of a call, make memory for its results, and fill the kernel's parameters."""
        specification = self.operator.specification
        schema = specification.schema
        laid = dict(zip(schema.names, values, strict=True))
        device = tensors_in(list(values))[0].device
        for name, wanted in self.binding.takes.items():
            if name in laid and not wanted.lies_right(laid[name]):
                laid[name] = wanted.laid_out(laid[name])
                if count:
                    self.copied[name] += 1
        forms = self._forms_of(values)
        results = [
            self.binding.takes[result.name].room_for(form, device)
            for result, form in zip(schema.results, forms, strict=True)
        ]
        for result, form in zip(schema.results, forms, strict=True):
            self._check_result(result.name, form)
        laid.update(zip((result.name for result in schema.results), results, strict=True))
        given = {name: constant(laid) for name, constant in self._constants.items()}
        everything = {**laid, **given}
        arguments = {bound.parameter: bound.of(everything) for bound in self.binding.bounds}
        arguments |= {name: given[name] for name in self.binding.options}
        grid: Any
        if self.source.filled:  # which is known only when it is launched
            grid = lambda meta: shape_of(self._grid({**everything, **meta}))
        else:
            grid = shape_of(self._grid({**everything, **_defaults(self.source)}))
        return Prepared(grid, arguments, results)

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], launch: Launch, *, count: bool = False
    ) -> Any:
        schema = self.operator.specification.schema
        values = schema.call_values(args, kwargs)
        prepared = self.prepared(values, count=count)
        if self._has_programs(prepared):
            launch(prepared.grid, prepared.arguments)
        results = [
            self._as(result, form, described.name, count=count)
            for result, form, described in zip(
                prepared.results, self._forms_of(values), schema.results, strict=True
            )
        ]
        return results[0] if schema.single else tuple(results)

    def _has_programs(self, prepared: Prepared) -> bool:
        """Whether there is anything to run: results without elements need no kernel, others need one."""
        if not callable(prepared.grid):
            check_grid(prepared.grid, self.operator.name, self.where)
        described = self.operator.specification.schema.results
        filled = [
            (each.name, result)
            for each, result in zip(described, prepared.results, strict=True)
            if result.numel()
        ]
        if filled and not callable(prepared.grid) and not all(prepared.grid):
            name, result = filled[0]
            raise errors.LaunchError(
                f"the grid of the Triton kernel has no programs, and nothing writes `{name}`",
                operator=self.operator.name,
                argument=name,
                expected="a grid with a program for each part of each result",
                got=f"grid {prepared.grid}, `{name}` {list(result.shape)}",
                where=self.where,
                hint="count the programs by the results, as in `grid=lambda result: ...`",
            )
        return bool(filled)

    def _launch(self, grid: Any, arguments: dict[str, Any]) -> None:
        if not callable(grid):
            check_launchable(grid, self.operator.name, self.where)
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        launched = self.source.launched()
        with torch.cuda.device(device):  # Triton launches on the stream of the current one
            try:
                launched[grid](**arguments)
            except Exception as error:
                told = told_of_launch(error, self.source, self.operator.name)
                if told is None:
                    raise
                raise told from error

    def _wrapped(self, grid: Any, arguments: dict[str, Any]) -> None:
        torch.library.wrap_triton(self.source.launched())[grid](**arguments)

    def _interpret(self, grid: Any, arguments: dict[str, Any]) -> None:
        shape, arguments = self._interpretable(grid, arguments)
        interpret(self.source, shape, arguments, self.operator.name)

    def _interpretable(self, grid: Any, arguments: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """A grid in numbers, and the arguments of the function alone, with what decorators would add."""
        arguments = {name: value for name, value in arguments.items() if name not in self.binding.options}
        for config in self.source.configs[:1]:  # nothing can be timed here
            arguments |= config.kwargs
        for name, heuristic in self.source.heuristics.items():
            arguments[name] = heuristic(arguments)
        shape = grid({**_defaults(self.source), **arguments}) if callable(grid) else grid
        check_grid(shape, self.operator.name, self.where)
        return shape, arguments

    def _check_result(self, name: str, form: Form) -> None:
        wanted = self.binding.takes[name]
        if wanted.dim not in (None, len(form.shape)):
            raise errors.KernelSignatureError(
                "the Triton kernel does not write the result that the reference gives",
                operator=self.operator.name,
                argument=name,
                expected=f"{len(form.shape)} dimensions",
                got=f"sizes or strides of {wanted.dim}",
                where=self.where,
                hint="take the sizes and strides of as many dimensions as the result has",
            )

    def _forms_of(self, values: Sequence[Any]) -> tuple[Form, ...]:
        specification = self.operator.specification
        form = form_of_call(values)
        if is_open(form):  # and another one each time
            return forms_of(specification, values)
        return self._forms.obtain(specification, form, lambda: forms_of(specification, values))

    def _as(self, result: Tensor, form: Form, name: str, *, count: bool) -> Tensor:
        """A result in the strides that it has in the end."""
        if result.stride() == form.stride:
            return result
        if count:
            self.copied[name] += 1
        copy = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=result.device)
        return copy.copy_(result)


def _defaults(source: TritonSource) -> dict[str, Any]:
    """What a grid sees of parameters that nobody fills."""
    code = source.function.__defaults__ or ()
    named = source.parameters[len(source.parameters) - len(code) :]
    return {parameter.name: value for parameter, value in zip(named, code, strict=True)}
