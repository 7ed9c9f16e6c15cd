"""A kernel in C++: compiled when it is first needed, and then one function among an operator's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.build.cpp.compiling import compiled
from opsmith.build.cpp.generating import DEFAULT
from opsmith.build.cpp.library import CppLibrary, Parameter
from opsmith.build.cpp.source import CppSource
from opsmith.core.calls import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.core.specification import Specification
from opsmith.kernels.choosing import choose_candidate, laid_out, lies_right, memory_format, plain
from opsmith.kernels.forms import Form, forms_of
from opsmith.kernels.signature import arguments_of, check_signature

REMEMBERED = 4096
"""Plans that are kept: a size that changes with each call must not fill the memory."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel that runs: its library, and the operator of the dispatcher that calls it."""

    library: CppLibrary
    overload: Any


@dataclass(frozen=True, slots=True)
class _Plan:
    """How calls of one form are run.

    Args:
        candidate: Number of the instance.
        copied: Positions of the arguments that are copied into another layout, with their parameters.
        results: The form of each result, and the layout to write it in where that is another one.
    """

    candidate: int
    copied: tuple[tuple[int, Parameter], ...]
    results: tuple[tuple[Form, torch.memory_format | None], ...]


class CppKernel(BuiltKernel):
    """A function that computes an operator by a kernel in C++.

    Args:
        operator: Whose kernel it is.
        read: Reads the source; again after `reload`.
        dtypes: Those that a template is made for; None for the usual ones.
        strict: Whether a missing compiler is an error, and not only a reason to run the reference.

    Attributes:
        copied: How often each argument, and the results, were copied for their layout.
    """

    def __init__(
        self,
        operator: Operator[..., Any],
        read: Callable[[], CppSource],
        dtypes: Sequence[torch.dtype] | None,
        *,
        strict: bool,
    ) -> None:
        self._operator = operator
        self._read = read
        self._dtypes = dtypes
        self._strict = strict
        self._lock = threading.Lock()
        self.__name__ = operator.name.partition("::")[2]
        self.source = read()
        self._forget()

    def _forget(self) -> None:
        self._loaded: _Loaded | None = None
        self._missing: errors.ToolchainError | None = None
        self._planned_for: Specification | None = None
        self._plans: dict[Any, _Plan | None] = {}
        self.copied: dict[str, int] = {}

    @property
    def where(self) -> str:
        """`file:line` of the function in C++."""
        return self.source.where

    @property
    def text(self) -> str:
        """The source."""
        return self.source.text

    @property
    def entry(self) -> str:
        """Name of the function in C++."""
        return self.source.function

    @property
    def dtypes(self) -> tuple[torch.dtype, ...] | None:
        """What a template is made for; None for the usual ones."""
        return None if self._dtypes is None else tuple(self._dtypes)

    def reload(self) -> None:
        """Read the source again; it is compiled at the next call, if it has changed."""
        source = self._read()
        with self._lock:
            if self._loaded is not None:
                self._loaded.library.remove()
            self.source = source
            self._forget()

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Why it does not take a call with these argument values; None where it does.

        Raises:
            CompileError: If the compiler refuses the source.
        """
        try:
            loaded = self._load()
        except errors.ToolchainError as error:
            if self._strict:
                raise
            return f"{error.problem}: {error.got}; {error.mend}"
        choice = self._choose(loaded, values)
        return choice if isinstance(choice, str) else None

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The arguments that it copies, as it takes another layout than theirs."""
        loaded = self._load()
        choice = self._choose(loaded, values)
        if isinstance(choice, str):
            return ()
        names = self._operator.specification.schema.names
        parameters = loaded.library.candidates[choice]
        return tuple(
            f"`{name}`, which is not {parameter.layout}"
            for name, value, parameter in zip(names, values, parameters, strict=False)
            if not all(lies_right(tensor, parameter) for tensor in tensors_in([value]))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; by the reference where the kernel does not take the call."""
        specification = self._operator.specification
        values = specification.schema.call_values(args, kwargs)
        loaded = self._load()
        plan = self._plan(loaded, specification, values)
        if plan is None:
            return specification.computed_by(*args, **kwargs)
        for position, parameter in plan.copied:
            values[position] = laid_out(values[position], parameter)
            self._count(specification.schema.names[position])
        results = [
            torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
            if other is None
            else torch.empty(form.shape, dtype=form.dtype, memory_format=other)
            for form, other in plan.results
        ]
        try:
            loaded.overload(plan.candidate, *values, *results)
        except RuntimeError as error:
            raise errors.KernelError(
                f"the C++ kernel threw: {_text(error)}",
                operator=specification.name,
                where=self.where,
                mend="call it with what the kernel takes, or mend the kernel",
            ) from None
        for position, (form, other) in enumerate(plan.results):
            if other is not None and results[position].stride() != form.stride:
                results[position] = _as(results[position], form)
                self._count("result")
        return results[0] if specification.schema.single else tuple(results)

    def _load(self) -> _Loaded:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    self._loaded = self._built()
        return self._loaded

    def _built(self) -> _Loaded:
        if self._missing is not None:
            raise self._missing
        specification = self._operator.specification
        arguments = arguments_of(specification.schema, specification.name, self.where)
        dtypes = tuple(self._dtypes or DEFAULT) if self.source.template else ()
        try:
            library = CppLibrary(compiled(self.source, specification.name, dtypes).directory)
            check_signature(library.candidates, specification.schema, specification.name, self.where)
            overload = library.register(arguments, len(specification.schema.results))
        except errors.ToolchainError as error:
            self._missing = error
            raise
        return _Loaded(library, overload)

    def _choose(self, loaded: _Loaded, values: Sequence[Any]) -> int | str:
        names = self._operator.specification.schema.names
        return choose_candidate(names, values, loaded.library.candidates)

    def _plan(self, loaded: _Loaded, specification: Specification, values: list[Any]) -> _Plan | None:
        """How a call with these values is run; None where the kernel does not take it."""
        if self._planned_for is not specification:
            self._plans, self._planned_for = {}, specification
        key = tuple(map(_key, values))
        if key not in self._plans:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            self._plans[key] = self._planned(loaded, specification, values)
        return self._plans[key]

    def _planned(self, loaded: _Loaded, specification: Specification, values: list[Any]) -> _Plan | None:
        choice = self._choose(loaded, values)
        if isinstance(choice, str):
            return None
        parameters = loaded.library.candidates[choice]
        schema = specification.schema
        copied = tuple(
            (position, parameter)
            for position, (value, parameter) in enumerate(zip(values, parameters, strict=False))
            if not all(lies_right(tensor, parameter) for tensor in tensors_in([value]))
        )
        written = parameters[len(schema.arguments) :]
        results = [
            (form, self._layout_of(result.name, form, parameter))
            for result, form, parameter in zip(
                schema.results, forms_of(specification, values), written, strict=True
            )
        ]
        return _Plan(choice, copied, tuple(results))

    def _layout_of(self, name: str, form: Form, parameter: Parameter) -> torch.memory_format | None:
        """The layout in which a result is written; None for the one that it has in the end."""
        if form.dtype != parameter.dtype or parameter.dim not in (None, len(form.shape)):
            dim = "" if parameter.dim is None else f" of {parameter.dim} dimensions"
            raise errors.KernelSignatureError(
                "the C++ kernel does not write the result that the reference gives",
                operator=self._operator.name,
                argument=name,
                expected=f"{plain(form.dtype)} of {len(form.shape)} dimensions",
                got=f"a view of {plain(parameter.dtype)}{dim}",
                where=self.where,
                mend="change the view, or leave the dtype out of `dtypes=`",
            )
        return None if parameter.layout == "any" else memory_format(parameter, len(form.shape))

    def _count(self, name: str) -> None:
        self.copied[name] = self.copied.get(name, 0) + 1


def _as(result: Tensor, form: Form) -> Tensor:
    """A copy of a result in the strides that it has in the end."""
    copy = torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
    copy.copy_(result)
    return copy


def _key(value: Any) -> Any:
    """What a plan may depend on in an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _text(error: RuntimeError) -> str:
    return str(error).partition("\nException raised from")[0].strip()
