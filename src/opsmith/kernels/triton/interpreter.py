"""Triton kernels on the CPU, in Triton's interpreter, with every access to memory checked."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.kernels.triton.source import LANGUAGE, TritonSource, triton_module

MEMORY = "_interpreter"
"""Name of the interpreter's memory access in Triton's module."""
FIRST = (3, 7)
"""First version of Triton whose interpreter is supported."""


class OutOfBoundsError(Exception):
    """Access of a kernel to memory outside of its arguments.

    Attributes:
        parameter: Parameter whose memory is nearest.
    """

    def __init__(self, verb: str, parameter: str, location: str) -> None:
        self.parameter = parameter
        super().__init__(f"{verb} outside of `{parameter}`: {location}")


@contextlib.contextmanager
def bounds_checked(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Context manager in which accesses outside of these tensors raise `OutOfBoundsError`."""
    from triton.runtime import interpreter

    real = vars(interpreter)[MEMORY]
    setattr(interpreter, MEMORY, _CheckedMemory(real, arguments))
    try:
        yield
    finally:
        setattr(interpreter, MEMORY, real)


def out_of_bounds(error: BaseException | None) -> OutOfBoundsError | None:
    """Return the `OutOfBoundsError` among the causes of an exception; None if there is none."""
    while error is not None and not isinstance(error, OutOfBoundsError):
        error = error.__cause__
    return error


class _CheckedMemory:
    """Memory access of the interpreter, with a check of every address."""

    def __init__(self, real: Any, arguments: Mapping[str, Any]) -> None:
        self._real = real
        self._spans = [(name, *_span(each)) for name, each in arguments.items() if isinstance(each, Tensor)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check("reads", pointers, mask, other.dtype.itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check("writes", pointers, mask, value.dtype.itemsize)
        return self._real.store(pointers, value, mask)

    def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        self._check("writes", pointers, None, value.dtype.itemsize)
        return self._real.atomic_cas(pointers, expected, value, order)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check("writes", pointers, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(operation, pointers, value, mask, order)

    def _check(self, verb: str, pointers: Any, mask: Any, size: int) -> None:
        import numpy

        used = numpy.asarray(pointers)
        if mask is not None:
            used = used[numpy.broadcast_to(numpy.asarray(mask) != 0, used.shape)]
        if not used.size:
            return
        low, high = int(used.min()), int(used.max()) + size
        if any(start <= low and high <= end for _, start, end in self._spans):
            return
        inside = numpy.zeros(used.shape, bool)
        for _, start, end in self._spans:
            if end - start >= size:
                inside |= (used >= start) & (used <= end - size)
        if not inside.all():
            raise self._error(verb, int(used[~inside].ravel()[0]), size)

    def _error(self, verb: str, address: int, size: int) -> OutOfBoundsError:
        def distance(span: tuple[str, int, int]) -> int:
            return max(span[1] - address, address - span[2])

        name, start, end = min(self._spans, key=distance)
        location = f"{start - address} bytes before it" if address < start else "just after its end"
        if address > end:
            location = f"{address - end} bytes after its end"
        return OutOfBoundsError(f"{verb} {size} bytes", name, location)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory, and the one behind its end."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def interpret(
    source: TritonSource, grid: tuple[int, ...], arguments: Mapping[str, Any], operator: str
) -> None:
    """Run every program of a grid, on tensors of the CPU.

    bfloat16, which NumPy lacks and the interpreter computes wrongly without an error, is computed in float32
    and rounded at the end. Floats are rounded to float32 first, as a launch on a GPU does.

    Args:
        source: The kernel.
        grid: Number of programs in each of up to three dimensions.
        arguments: Values of its parameters, by name.
        operator: Name of the operator, for messages.

    Raises:
        ToolchainError: If Triton or NumPy is not installed.
        KernelError: If the kernel raises, or accesses memory outside of its arguments.
    """
    numpy = _numpy()
    exact = {parameter.name for parameter in source.parameters if parameter.wide or parameter.constant}
    given, converted_back = {}, []
    for name, value in arguments.items():
        given[name] = value if name in exact else _rounded(value)
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            given[name], storage, converted = _converted(value)
            converted_back.append((storage, converted))
    with LANGUAGE, _restored_language(), numpy.errstate(all="ignore"):
        from triton.runtime.interpreter import InterpretedFunction

        try:
            with _original_source(source.function, source.text), bounds_checked(given):
                InterpretedFunction(_with_own_globals(source.function))[grid](**given)
        except Exception as error:
            raise _kernel_error(error, source, operator) from error
    for storage, converted in converted_back:
        storage.copy_(converted)


def missing_interpreter() -> str | None:
    """Return why the interpreter cannot be used here; None if it can."""
    try:
        triton_module()
        _numpy()
    except errors.ToolchainError as error:
        return f"{error.problem}: {error.hint}"
    return None


def _numpy() -> Any:
    version = str(triton_module().__version__)
    if tuple(map(int, version.split(".")[:2])) < FIRST:
        raise errors.ToolchainError(
            f"the interpreter of Triton {version} does not run loops with NumPy 2.4",
            expected=f"Triton {FIRST[0]}.{FIRST[1]} or later, which torch 2.13 for CUDA brings along",
            got=version,
            hint="check the kernel under a later torch, or on a GPU",
        )
    try:
        import numpy
    except ImportError as error:
        raise errors.ToolchainError(
            "Triton's interpreter needs NumPy, which is not installed",
            expected="the package `numpy`",
            got=str(error),
            hint="`pip install numpy`",
        ) from error
    return numpy


def _rounded(value: Any) -> Any:
    """Return a number as a GPU gets it; a bool as an int, because the interpreter fails on bools."""
    if isinstance(value, bool):
        return int(value)
    return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value


def _converted(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert a tensor to float32 with the same strides.

    All of its storage is converted, so that sliced and expanded tensors keep their strides.

    Returns:
        The converted tensor, the storage, and the converted storage.
    """
    plain = value.data  # writes by the interpreter do not count as in-place operations, as on a GPU
    stored = plain.untyped_storage().nbytes() // plain.element_size()
    storage = plain.as_strided((stored,), (1,), 0)
    converted = storage.float()
    return converted.as_strided(plain.shape, plain.stride(), plain.storage_offset()), storage, converted


def _with_own_globals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with its own globals, which the interpreter modifies.

    The variables of its closure are among them, because the interpreter compiles the function alone.
    """
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    language = triton_module().language
    # The interpreter patches the modules that it finds among these during a launch.
    names |= {"__triton_language__": language, "__triton_core__": language.core}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__annotations__ = dict(function.__annotations__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


@contextlib.contextmanager
def _original_source(function: Callable[..., Any], text: str) -> Iterator[None]:
    """Context manager in which `linecache` returns the source of a function as it was when it was defined.

    The interpreter reads the file again, which may have been edited since.
    """
    file, first = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = text.splitlines(keepends=True)
    linecache.checkcache(file)
    if linecache.getlines(file, function.__globals__)[first - 1 : first - 1 + len(lines)] == lines:
        yield
        return
    before = linecache.cache.get(file)
    whole = ["\n"] * (first - 1) + lines
    # Without a time, it is not checked against the file.
    linecache.cache[file] = (len(text), None, whole, file)
    try:
        yield
    finally:
        del linecache.cache[file]
        if before is not None:
            linecache.cache[file] = before


@contextlib.contextmanager
def _restored_language() -> Iterator[None]:
    """Context manager in which interpreted functions can call functions under `triton.jit`.

    It restores Triton's language afterwards; the interpreter itself restores only a part of it.
    """
    language = triton_module().language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    core = language.core
    changed = (language, core, language.math, core.tensor, core.dtype, core.tensor_descriptor_base)
    before = [(owner, dict(vars(owner))) for owner in changed]
    call, known = JITFunction.__call__, set(InterpretedFunction.rewritten_fn)
    rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in rewritten:
            with _original_source(self.fn, "".join(self.raw_src)):
                rewritten[self.fn] = InterpretedFunction(_with_own_globals(self.fn)).rewrite()
        return rewritten[self.fn](*args, **kwargs)

    JITFunction.__call__ = interpreted
    try:
        yield
    finally:
        JITFunction.__call__ = call
        for function in set(InterpretedFunction.rewritten_fn) - known:
            del InterpretedFunction.rewritten_fn[function]
        for owner, names in before:
            for name in set(vars(owner)) - set(names) - {"__annotations__"}:
                delattr(owner, name)
            for name, value in names.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


def _kernel_error(error: Exception, source: TritonSource, operator: str) -> errors.KernelError:
    """Return the error for an exception of a kernel, at the author's line."""
    file = source.function.__code__.co_filename
    innermost: BaseException = error
    at = source.where
    while True:
        lines = [
            frame.lineno for frame in traceback.extract_tb(innermost.__traceback__) if frame.filename == file
        ]
        at = f"{file}:{lines[-1]}" if lines else at
        if innermost.__cause__ is None:
            break
        innermost = innermost.__cause__
    access = out_of_bounds(error)
    if access is not None:
        return errors.KernelError(
            f"the Triton kernel {access}",
            operator=operator,
            argument=access.parameter,
            expected="reads and writes of elements alone",
            where=at,
            hint="give the load or store a mask, as `mask=at < x_numel`",
        )
    return errors.KernelError(
        f"the Triton kernel raised in the interpreter: {type(innermost).__name__}: {innermost}",
        operator=operator,
        where=at,
        hint="correct the kernel; where it needs what the interpreter lacks, check it on a GPU",
    )
