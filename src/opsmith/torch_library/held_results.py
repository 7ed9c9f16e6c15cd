"""Check of the results of opaque functions, and of kernels in Python or in a package's language.

Compiled code and exported programs expect the results of the fake kernel or the reference. A different shape,
dtype or device is refused, and so is a list of a different length, or None instead of a tensor. A result with
different strides is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.location import where
from opsmith.core.results import Result
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.arguments import fake_by_shapes
from opsmith.torch_library.compilation import EAGER
from opsmith.torch_library.contract import Contract, aliases
from opsmith.torch_library.result_layouts import ResultLayout, result_layouts

MAX_KNOWN = 4096
"""Maximum number of combinations of metadata that are kept as right."""

MAX_NUMBERS = 8
"""Maximum number of choices of floating-point numbers with which one combination is compared: a scale may
differ in each call, and hardly ever decides a shape."""


class HeldResults:
    """The expected metadata of the results of one operator.

    A combination of the metadata of arguments and results is compared once for a few choices of floats.

    Args:
        specification: The operator.

    Attributes:
        specification: As given.
        copies: Descriptions of results that have been copied into different strides.
    """

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self._functions: dict[tuple[Callable[..., Any], Any], Callable[..., Any]] = {}
        self.copies: dict[str, str] = {}

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a check of its results; the function itself if nothing is expected of them."""
        schema = self.specification.schema
        own = isinstance(function, BuiltKernel) and not function.of_a_package  # it gets results to fill
        free = own or not schema.results or schema.returns is not None
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
                return returned  # the contract refuses changes of the arguments
            results = compare(returned, *args, **kwargs)
            if results is returned:
                if len(known) >= MAX_KNOWN:
                    known.clear()
                known.setdefault(metadata, set()).add(numbers)
            return results

        return update_wrapper(held, function)

    def _compared(self, function: Callable[..., Any], returned: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compare results with the expected ones; return them, or copies of results with different strides.

        Raises:
            ShapeError, ResultTypeError, ResultCountError, LayoutError: As their names say.
        """
        if capabilities.recording():
            return returned
        schema = self.specification.schema
        values = [*args, *(kwargs[name] for name in schema.names[len(args) :])]
        found = Contract(self.specification).as_tuple(function, returned, values)
        given, tensors = tensors_in(values), tensors_in([*found])
        if not all(type(each) in EAGER for each in (*given, *tensors)) or aliases(tensors, given):
            return returned  # the contract refuses aliases
        specification = self.specification
        if specification.opaque and not specification.fake and fake_by_shapes(specification, values) is None:
            return returned  # nothing is expected of it
        try:
            promised = result_layouts(self.specification, values)
        except Exception:  # metadata that depend on data, or a call that only the reference refuses
            return returned
        results = [
            self._fitted(function, described, result, layout, values)
            for described, result, layout in zip(schema.results, found, promised, strict=True)
        ]
        if all(new is old for new, old in zip(tensors_in(results), tensors, strict=True)):
            return returned
        return results[0] if schema.single else tuple(results)

    def _fitted(
        self, function: Any, described: Result, result: Any, promised: Any, values: list[Any], item: str = ""
    ) -> Any:
        """A result or an item of a list in the expected strides: itself, or a copy."""
        name = (described.written or described.name) + item
        named = f"the new value of `{name}`" if described.written else f"`{name}`"
        by_shapes = self.specification.opaque and not self.specification.fake
        source = "the fake kernel" if self.specification.fake else "the reference"
        source = "the fake kernel derived from `shapes=`" if by_shapes else source

        def wrong(kind: Any, what: str, expected: Any, got: Any, hint: str, fault: str = "") -> Exception:
            error: errors.OpsmithError = self.specification.error(
                kind,
                f"the {what} of {named} differs from the {what} of {source}",
                argument=name,
                expected=str(expected),
                got=str(got),
                where=where(function),
                hint=hint,
            )
            error.fault = fault
            return error

        if isinstance(promised, list):
            if len(result) != len(promised):
                hint = f"return {named} with the expected length, or correct {source}"
                raise wrong(errors.ResultCountError, "length", len(promised), len(result), hint, "shape")
            pairs = enumerate(zip(result, promised, strict=True))
            return [self._fitted(function, described, *pair, values, item=f"[{at}]") for at, pair in pairs]
        if result is promised:
            return None
        if result is None or promised is None:
            wanted = "None" if promised is None else "Tensor"
            hint = f"return {'a tensor' if promised else 'None'}, or correct {source}"
            fault = "fake-mismatch" if self.specification.fake else "kernel-mismatch"
            raise wrong(errors.ResultTypeError, "type", wanted, shown(result), hint, fault)
        if tuple(result.shape) != promised.shape:
            shapes = list(promised.shape), list(result.shape)
            hint = f"return {named} with the expected shape, or correct {source}"
            raise wrong(errors.ShapeError, "shape", *shapes, hint, "shape")
        if result.dtype != promised.dtype:
            given = zip(self.specification.schema.names, values, strict=True)
            dtypes = {getattr(value, "dtype", None): f"{each}.dtype" for each, value in given}
            hint = f"convert it: `.to({dtypes.get(promised.dtype, promised.dtype)})`, or correct {source}"
            wanted = str(promised.dtype)
            if by_shapes:
                wanted += ", to which its tensors promote"
                hint = "write `@op.fake` over a function that returns empty tensors of the right dtype"
            raise wrong(errors.ResultTypeError, "dtype", wanted, result.dtype, hint, "dtype")
        devices = {each.device for each in tensors_in(values)}
        if len(devices) == 1 and result.device not in devices and result.is_meta:
            (device,) = devices
            hint = f"make {named} on the device of the arguments"
            raise wrong(errors.ResultTypeError, "device", device, result.device, hint)
        if not _are_alike(result, promised):
            strides = f"{list(result.stride())}, not {list(promised.stride)}"
            self.copies[name] = f"{named}: the strides of the kernel at {where(function)} are {strides}"
            return promised.restore(result)
        return result


def _are_alike(result: Tensor, promised: ResultLayout) -> bool:
    """Return True if strides agree in dimensions of more than one element, where they matter."""
    pairs = zip(result.shape, result.stride(), promised.stride, strict=True)
    return all(size == 1 or old == new for size, old, new in pairs)


def _metadata(values: Sequence[Any]) -> tuple[Any, Any]:
    """Metadata of tensors and values on which the results' metadata may depend; then the floats."""
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
