"""A kernel in C++: compiled when it is first needed, and then one function among an operator's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith import errors
from opsmith.build.cpp.compiling import compiled
from opsmith.build.cpp.dispatching import DispatchedKernel
from opsmith.build.cpp.generating import DEFAULT
from opsmith.build.cpp.library import CppLibrary
from opsmith.build.cpp.plan import Plan
from opsmith.build.cpp.sizing import shapes_in_cpp
from opsmith.build.cpp.source import CppSource
from opsmith.build.ort.packaging import KernelObject, kernel_object
from opsmith.build.parameter import Parameter
from opsmith.core.calls import tensors_in
from opsmith.core.operator import Operator
from opsmith.kernels.choosing import choose_candidate, lies_right, of_other_dtypes
from opsmith.kernels.from_source import KernelFromSource
from opsmith.kernels.planning import planned
from opsmith.kernels.signature import arguments_of, check_parameters
from opsmith.torch_library import capabilities


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel that runs: its library, and the operator of the dispatcher that calls it."""

    library: CppLibrary
    dispatched: DispatchedKernel


class CppKernel(KernelFromSource[CppSource]):
    """A function that computes an operator by a kernel in C++.

    Args:
        operator: Whose kernel it is.
        read: Reads the source; again after `reload`.
        dtypes: Those that a template is made for; None for the usual ones.
        strict: Whether a missing compiler, or a call that it does not take, is an error, and not only a
            reason to run the reference.
    """

    pure = True  # it gets const views of its arguments, and memory of its own for the results
    _loaded: _Loaded | None = None

    def __init__(
        self,
        operator: Operator[..., Any],
        read: Callable[[], CppSource],
        dtypes: Sequence[torch.dtype] | None,
        *,
        strict: bool,
    ) -> None:
        super().__init__(operator, read(), strict=strict)
        self._read_again = read
        self._dtypes = dtypes

    def _read(self) -> CppSource:
        return self._read_again()

    def _forget(self) -> None:
        if self._loaded is not None:
            self._loaded.dispatched.remove()
        self._loaded = None
        self._missing: errors.ToolchainError | None = None
        self._serves = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...] | None:
        """What a template is made for; None for a function that is none: its views say what it takes."""
        return tuple(self._dtypes or DEFAULT) if self.source.template else None

    @property
    def direct(self) -> Callable[..., Any]:
        """The kernel as it is called fastest, by who knows that it takes the call."""
        single = self.operator.specification.schema.single
        return capabilities.direct_call(self._load().dispatched.overload) if single else self

    @property
    def copied(self) -> dict[str, int]:
        """How often each argument, and `result`, was copied for its layout, of those that were."""
        if self._loaded is None:
            return {}
        names = [*self.operator.specification.schema.names, "result"]
        counts = {name: self._loaded.dispatched.copies(place) for place, name in enumerate(names)}
        return {name: count for name, count in counts.items() if count}

    @property
    def remembered(self) -> int:
        """For how many forms of calls it knows the forms of the results."""
        return 0 if self._loaded is None else self._loaded.dispatched.remembered

    @property
    def sizing(self) -> str:
        """What tells the sizes of the results."""
        remembered = f"remembered for {self.remembered} form{'s' * (self.remembered != 1)} of calls"
        if self.source.sizes is not None:
            return f"`sizes` in C++ for contiguous tensors; else the reference, {remembered}"
        shapes = self.operator.specification.shapes
        if shapes_in_cpp(shapes, self.operator.specification.schema):
            return f"`shapes=` in C++ for contiguous tensors; else the reference, {remembered}"
        return f"the reference, {remembered}"

    @property
    def tells_sizes(self) -> bool:
        """Whether it tells the sizes of its results in C++."""
        return self._load().library.tells_sizes

    def for_library(self) -> KernelObject:
        """The kernel, compiled to be linked into a library that knows nothing of torch.

        Raises:
            CompileError: If the compiler refuses the source.
            ToolchainError: If there is no compiler.
        """
        specification = self.operator.specification
        shapes = shapes_in_cpp(specification.shapes, specification.schema)
        return kernel_object(self.source, specification.name, self.dtypes or (), shapes)

    def serve(self, name: str, aside: Callable[..., Any]) -> None:
        """Take the calls of the dispatcher's operator of this name, those that are remembered."""
        with self._lock:
            if self._loaded is not None and not self._serves:
                self._loaded.dispatched.serve(name, aside)
                self._serves = True

    def withdraw(self) -> None:
        """Take no calls but those that are given to it, and forget what was remembered of them."""
        with self._lock:
            if self._loaded is not None:
                self._loaded.dispatched.withdraw()
                self._loaded.dispatched.forget()
            self._serves = False

    def refusal(self, values: Sequence[Any]) -> str | None:
        """Why it does not take a call with these argument values; None where it does.

        Raises:
            CompileError: If the compiler refuses the source.
        """
        # Without the library where that is enough: it takes a while to compile, and may never be needed.
        misfit = of_other_dtypes(self.operator.specification.schema.names, values, self.dtypes or ())
        if misfit is not None:
            return misfit
        try:
            loaded = self._load()
        except errors.ToolchainError as error:
            if self.strict:
                raise
            return f"{error.problem}: {error.got}; {error.hint}"
        if not tensors_in(list(values)):
            return "there is no tensor among the arguments, by whose device torch would find it"
        choice = self._choose(loaded, values)
        return choice if isinstance(choice, str) else None

    def copies(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The arguments that it copies, as it takes another layout than theirs."""
        loaded = self._load()
        choice = self._choose(loaded, values)
        if isinstance(choice, str):
            return ()
        names = self.operator.specification.schema.names
        parameters = loaded.library.candidates[choice]
        return tuple(
            f"`{name}`, which is not {parameter.layout}"
            for name, value, parameter in zip(names, values, parameters, strict=False)
            if not all(lies_right(tensor, parameter) for tensor in tensors_in([value]))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; by the reference where the kernel does not take the call."""
        result = self._load().dispatched.overload(*args, **kwargs)
        several = isinstance(result, tuple | list) or self.operator.specification.schema.single
        return result if several else (result,)

    def _load(self) -> _Loaded:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    self._loaded = self._built()
        return self._loaded

    def _built(self) -> _Loaded:
        if self._missing is not None:
            raise self._missing
        specification = self.operator.specification
        schema = specification.schema
        arguments = arguments_of(schema, specification.name, self.where)
        dtypes = self.dtypes or ()
        try:
            shapes = shapes_in_cpp(specification.shapes, schema)
            library = CppLibrary(compiled(self.source, specification.name, dtypes, shapes).directory)
            wanted = [*arguments, *(Parameter("Tensor", written=True) for _ in schema.results)]
            names = [*schema.names, *(result.name for result in schema.results)]
            check_parameters(library.candidates, wanted, names, "C++", specification.name, self.where)
            text = schema.text("", with_hidden=True)
            dispatched = DispatchedKernel(
                library, text, arguments, len(schema.results), self._unplanned, self._failed
            )
        except errors.ToolchainError as error:
            self._missing = error
            raise
        return _Loaded(library, dispatched)

    def _choose(self, loaded: _Loaded, values: Sequence[Any]) -> int | str:
        names = self.operator.specification.schema.names
        return choose_candidate(names, values, loaded.library.candidates)

    def _unplanned(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a call of a form that the library does not know yet."""
        specification, loaded = self.operator.specification, self._load()
        form = loaded.dispatched.pending()
        values = specification.schema.call_values(args, kwargs)
        plan: Plan | None = None
        try:
            choice = self._choose(loaded, values)
            if isinstance(choice, int):
                parameters = loaded.library.candidates[choice]
                plan = planned(specification, values, choice, parameters, self.where)
        finally:
            if form is not None:
                loaded.dispatched.remember(form, plan)
        if plan is None:
            given, named = specification.schema.split(values)
            return specification.computed_by(*given, **named)
        return loaded.dispatched.overload(*args, **kwargs)

    def _failed(self, text: str) -> errors.KernelError:
        return errors.KernelError(
            f"the C++ kernel threw: {text}",
            operator=self.operator.name,
            where=self.where,
            hint="call it with what the kernel takes, or fix the kernel",
        )
