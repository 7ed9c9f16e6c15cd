"""Results of kernels in Python and of opaque functions, held to the metadata that the operator promises.

Compiled code and exported programs are made for the results of the fake kernel or the reference. Another
shape, dtype or device is refused. A result with other strides is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.location import where
from opsmith.core.results import Result
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.arguments import fake_by_shapes, unsupported_kind
from opsmith.torch_library.compilation import EAGER
from opsmith.torch_library.contract import aliases
from opsmith.torch_library.result_layouts import ResultLayout, result_layouts

MAX_KNOWN = 4096
"""Maximum number of combinations of metadata that are kept as right ones."""

MAX_NUMBERS = 8
"""Number of floating numbers with which one combination is compared: a scale may be another one in each call,
and hardly ever chooses a shape."""


class HeldResults:
    """The promise of one operator about its results.

    A combination of the metadata of arguments and results is compared once, with some floating numbers.

    Args:
        specification: The operator.

    Attributes:
        specification: As given.
        copies: Results that have been copied into other strides, in words.
    """

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self._functions: dict[tuple[Callable[..., Any], Any], Callable[..., Any]] = {}
        self.copies: dict[str, str] = {}

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function whose results are held to the promise; itself where nothing is promised of them."""
        schema = self.specification.schema
        free = isinstance(function, BuiltKernel) or not schema.results or schema.returns is not None
        if free or self.specification.origin.kind != "declared":
            return function
        if function is self.specification.reference and not self.specification.opaque:
            return function
        in_cpp = capabilities.calls_in_cpp()  # it may be attached at any time
        if (function, in_cpp) not in self._functions:
            self._functions[function, in_cpp] = self._held(function, in_cpp)
        return self._functions[function, in_cpp]

    def _held(self, function: Callable[..., Any], in_cpp: Any) -> Callable[..., Any]:
        compare = partial(self._compared, function)
        if in_cpp is not None:
            made: Callable[..., Any] = in_cpp.held(function, compare)
            return made
        known: dict[Any, set[Any]] = {}

        def held(*args: Any, **kwargs: Any) -> Any:
            given, numbers = _metadata((*args, *kwargs.values()))
            returned = function(*args, **kwargs)
            metadata = given, _metadata((returned,))
            right = known.get(metadata, ())
            if numbers in right or len(right) >= MAX_NUMBERS:
                return returned
            if given != _metadata((*args, *kwargs.values()))[0]:
                return returned  # the contract refuses what a call did to its arguments
            results = compare(returned, *args, **kwargs)
            if results is returned:
                if len(known) >= MAX_KNOWN:
                    known.clear()
                known.setdefault(metadata, set()).add(numbers)
            return results

        return update_wrapper(held, function)

    def _compared(self, function: Callable[..., Any], returned: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compare results with the promise; return them, or copies of those with other strides.

        Raises:
            ShapeError, ResultTypeError: See their names.
        """
        schema = self.specification.schema
        values = [*args, *(kwargs[name] for name in schema.names[len(args) :])]
        found = tensors_in([returned])
        tensors = [*tensors_in(values), *found]
        if capabilities.recording() or not all(type(each) in EAGER for each in tensors):
            return returned
        # The contract refuses another number of results, their layouts and aliases.
        if len(found) != len(schema.results) or any(result.sequence for result in schema.results):
            return returned
        if any(map(unsupported_kind, found)) or aliases(found, tensors_in(values)):
            return returned
        specification = self.specification
        if specification.opaque and not specification.fake and fake_by_shapes(specification, values) is None:
            return returned  # nothing is promised of it
        try:
            promised = result_layouts(self.specification, values)
        except Exception:  # metadata that depend on data, or a call that the reference alone refuses
            return returned
        if len(promised) != len(found):
            return returned
        results = [
            self._fitted(function, described, result, layout, values)
            for described, result, layout in zip(schema.results, found, promised, strict=True)
        ]
        if all(new is old for new, old in zip(results, found, strict=True)):
            return returned
        return results[0] if schema.single else tuple(results)

    def _fitted(
        self,
        function: Callable[..., Any],
        described: Result,
        result: Tensor,
        promised: ResultLayout,
        values: Sequence[Any],
    ) -> Tensor:
        """A result as it is promised: itself, or a copy in other strides."""
        name = described.written or described.name
        named = f"the new value of `{name}`" if described.written else f"`{name}`"
        source, expected = "the reference", str(promised.dtype)
        if self.specification.fake:
            source = "the fake kernel"
        dtype_hint = f"convert it: `.to({promised.dtype})`, or correct {source}"
        if self.specification.opaque and not self.specification.fake:
            source, expected = (
                "the fake kernel derived from `shapes=`",
                f"{promised.dtype}, to which its tensors promote",
            )
            dtype_hint = "write `@op.fake` over a function that returns empty tensors of the right dtype"

        def wrong(kind: type[errors.E], what: str, expected: object, got: object, hint: str) -> errors.E:
            return self.specification.error(
                kind,
                f"the {what} of {named} is not that of {source}",
                argument=name,
                expected=str(expected),
                got=str(got),
                where=where(function),
                hint=hint,
            )

        if tuple(result.shape) != promised.shape:
            shapes = list(promised.shape), list(result.shape)
            hint = f"return {named} in the expected shape, or correct {source}"
            misshapen = wrong(errors.ShapeError, "shape", *shapes, hint)
            misshapen.of_result = True
            raise misshapen
        if result.dtype != promised.dtype:
            mistyped = wrong(errors.ResultTypeError, "dtype", expected, result.dtype, dtype_hint)
            mistyped.wrong_dtype = True
            raise mistyped
        devices = {each.device for each in tensors_in(list(values))}
        if len(devices) == 1 and result.device not in devices and result.is_meta:
            (device,) = devices
            hint = f"make {named} on the device of the arguments"
            raise wrong(errors.ResultTypeError, "device", device, result.device, hint)
        if not _are_alike(result, promised):
            strides = f"{list(result.stride())}, and not {list(promised.stride)}"
            self.copies[name] = f"{named}: the strides of the kernel at {where(function)} are {strides}"
            return promised.restore(result)
        return result


def _are_alike(result: Tensor, promised: ResultLayout) -> bool:
    """Return True if strides agree where they are used: in dimensions of more than one element."""
    pairs = zip(result.shape, result.stride(), promised.stride, strict=True)
    return all(size == 1 or old == new for size, old, new in pairs)


def _metadata(values: Sequence[Any]) -> tuple[Any, Any]:
    """Metadata on which that of results may depend, of tensors and values; then the floating numbers."""
    found: list[Any] = []
    numbers: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((type(value), value.shape, value.dtype, value.device, value.stride()))
        elif isinstance(value, list | tuple):
            inner, more = _metadata(value)
            found.append(inner)
            numbers += more
        elif isinstance(value, float):
            numbers.append(value)
        else:
            found.append(value if isinstance(value, Hashable) else type(value))
    return tuple(found), tuple(numbers)
