"""Triton kernels on the CPU, in Triton's interpreter, with a check of every memory access."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.location import chain_of
from opsmith.kernels.triton.compiler import compile_specialization, specialization_of
from opsmith.kernels.triton.interpreted_language import interpreted_language
from opsmith.kernels.triton.source import TritonSource, language_lock, triton_module
from opsmith.torch_library.result_layouts import extent_of

MEMORY = "_interpreter"
"""Name of the object for the interpreter's memory accesses in Triton's module."""
FIRST = (3, 7)
"""First version of Triton whose interpreter is supported."""
ARCHITECTURE = "sm_90"
"""GPU for which a kernel is compiled, to learn if the kernel is wrong or the interpreter is incomplete."""
IN_NUMPY = {"int1": "bool", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""NumPy's names of Triton's types, if the names differ."""

Span = tuple[str, int, int]
"""Memory of a parameter: its name, its first address, and the address after its end."""


class OutOfBoundsError(Exception):
    """Access of a kernel to memory outside of its arguments.

    Attributes:
        parameter: Name of the parameter with the nearest memory.
    """

    def __init__(self, verb: str, parameter: str, location: str) -> None:
        self.parameter = parameter
        super().__init__(f"{verb} outside of `{parameter}`: {location}")


@contextlib.contextmanager
def bounds_checked(spans: Sequence[Span]) -> Iterator[None]:
    """Context manager in which accesses outside of this memory raise `OutOfBoundsError`."""
    from triton.runtime import interpreter

    real = vars(interpreter)[MEMORY]
    setattr(interpreter, MEMORY, _CheckedMemory(real, spans))
    try:
        yield
    finally:
        setattr(interpreter, MEMORY, real)


class _CheckedMemory:
    """Memory access of the interpreter, with a check of every address."""

    def __init__(self, real: Any, spans: Sequence[Span]) -> None:
        self._real, self._spans = real, spans

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


class _Memory:
    """Memory of the tensors of a launch.

    NumPy has no bfloat16: a storage in bfloat16 is copied to float32, and written values are copied back.

    Args:
        bounded: True if a kernel may access only the elements of a tensor; else its whole storage.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._bounded = bounded
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.spans: list[Span] = []

    def add(self, name: str, tensor: Tensor) -> int:
        """Add the tensor of a parameter, and return its address."""
        storage = tensor.untyped_storage()
        start, first = tensor.data_ptr(), storage.data_ptr()
        if not start and tensor.numel():
            raise RuntimeError(f"`{name}` is a tensor without data, such as a fake, and a kernel needs data")
        low, high = start, start + extent_of(tensor) * tensor.element_size()
        if not self._bounded:
            low, high = first, first + storage.nbytes()
        if tensor.dtype != torch.bfloat16 or low == high:
            self.spans.append((name, low, high))
            return start
        if first not in self._copies:
            stored = torch.empty(0, dtype=torch.bfloat16, device=tensor.device).set_(storage)
            numbers = stored.float()
            self._copies[first] = stored, numbers, numbers.clone()
        moved = self._copies[first][1].data_ptr()
        low, high, start = (moved + 2 * (address - first) for address in (low, high, start))
        self.spans.append((name, low, high))
        return start

    def write_back(self) -> None:
        """Round the values that changed in float32, and write them into the storages in bfloat16."""
        for stored, numbers, before in self._copies.values():
            changed = numbers.view(torch.int32) != before.view(torch.int32)
            stored[changed] = numbers[changed].to(torch.bfloat16)


def interpret(
    source: TritonSource,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    operator: str,
    *,
    bounded: bool = True,
) -> None:
    """Run every program of a grid, on CPU tensors.

    NumPy lacks bfloat16, and the interpreter silently computes it wrongly. So bfloat16 is computed in float32
    and rounded at the end. Numbers have the same types as in a launch on a GPU.

    Args:
        source: The kernel.
        grid: Number of programs in each of up to three dimensions.
        arguments: Values of the kernel's parameters, by name.
        operator: Name of the operator, for messages.
        bounded: True if the kernel may access only the elements of its tensors; else their whole storages.

    Raises:
        ToolchainError: If Triton or NumPy is not installed.
        KernelError: If the kernel raises, or accesses memory outside of its arguments.
    """
    numpy = _numpy()
    annotated = {each.name: each.annotation_type for each in source.compiled_by().params}
    constants = {parameter.name for parameter in source.parameters if parameter.constant}
    memory = _Memory(bounded=bounded)
    with language_lock(), interpreted_language() as rewrite, numpy.errstate(all="ignore"):
        given = {
            name: value if name in constants else _argument(name, value, memory, annotated.get(name, ""))
            for name, value in arguments.items()
        }
        try:
            with bounds_checked(memory.spans):
                _programs(rewrite(source.function, source.text), constants, grid, given)
        except Exception as error:
            raised: Exception | None = error
        else:
            raised = None
            memory.write_back()
    if raised is not None:  # after the interpreter's language is restored, since it cannot be compiled
        limit = _interpreter_limit(raised, source, arguments, operator)
        raise (limit or _kernel_error(raised, source, operator)) from raised


def _argument(name: str, value: Any, memory: _Memory, annotated: str = "") -> Any:
    """Return the value of a parameter in Triton's language: a pointer, or a scalar.

    The interpreter itself keeps Python floats, which have no `.to`, fails on bools, and ignores annotations.
    """
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.jit import mangle_type
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, tuple):
        return tuple(_argument(name, each, memory) for each in value)
    if isinstance(value, TensorDescriptor):
        if value.base.dtype == torch.bfloat16:
            raise NotImplementedError("the interpreter has no tensor descriptors of bfloat16")
        memory.add(name, value.base)
        return value
    if isinstance(value, Tensor):
        narrow = value.dtype == torch.bfloat16
        kind = tl.pointer_type(tl.float32) if narrow else tl.str_to_ty(mangle_type(value), None)
        value = memory.add(name, value)
    elif isinstance(value, int | float):
        kind = tl.str_to_ty(annotated or mangle_type(value), None)
        if kind == tl.bfloat16:
            kind, value = tl.float32, torch.tensor(value).view(torch.int32).bitwise_and(-(2**16))
            value = value.view(torch.float32).item()  # truncated, as in Triton
    else:
        return value
    stored = "uint64" if kind.is_ptr() else IN_NUMPY.get(str(kind), str(kind))
    return tl.tensor(TensorHandle(numpy.array([value], stored), kind), kind)


def _programs(
    function: Callable[..., Any], constants: Iterable[str], grid: tuple[int, ...], given: dict[str, Any]
) -> None:
    """Run a rewritten function for each program of a grid."""
    from triton.runtime.interpreter import GridExecutor

    class CpuGrid(GridExecutor):  # type: ignore[misc]
        """Grid that does not copy its CPU tensors, since the copies would stay alive in a reference cycle."""

        def _init_args_hst(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return args, kwargs

        def _restore_args_dev(self, *copies: Any) -> None:
            pass

    executor = CpuGrid(function, list(given), tuple(grid))
    executor.constexprs = list(constants)  # it cannot read all forms of the annotation
    executor(**given)


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
            expected=f"Triton {FIRST[0]}.{FIRST[1]} or later, which comes with torch 2.13 for CUDA",
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


def _interpreter_limit(
    error: Exception, source: TritonSource, arguments: Mapping[str, Any], operator: str
) -> errors.ToolchainError | None:
    """Return the error for a feature that the interpreter lacks; None if the kernel itself is wrong.

    Triton compiles the kernel to find this out. An access outside of the arguments and a failed assertion are
    faults of the kernel.
    """
    innermost = chain_of(error)[-1]
    if isinstance(innermost, OutOfBoundsError | AssertionError):
        return None
    try:
        compile_specialization(source, operator, specialization_of(source, arguments), ARCHITECTURE)
    except errors.CompileError:
        if not triton_module().knobs.runtime.interpret:  # else Triton compiles nothing
            return None
    return errors.ToolchainError(
        "Triton's interpreter cannot run the kernel",
        operator=operator,
        expected="a kernel that uses only functions of the interpreter",
        got=f"{type(innermost).__name__}: {errors.message_of(innermost)}",
        where=_location(error, source),
        hint="check the kernel on a GPU",
    )


def _kernel_error(error: Exception, source: TritonSource, operator: str) -> errors.KernelError:
    """Return the error for an exception of a kernel, at the author's line."""
    innermost, at = chain_of(error)[-1], _location(error, source)
    if isinstance(innermost, OutOfBoundsError):
        found = errors.KernelError(
            f"the Triton kernel {innermost}",
            operator=operator,
            argument=innermost.parameter,
            expected="reads and writes of elements only",
            where=at,
            hint="give the load or store a mask, such as `mask=at < x_numel`",
        )
        found.fault = "out-of-bounds"
        return found
    return errors.KernelError(
        f"the Triton kernel raised in the interpreter: {type(innermost).__name__}: {innermost}",
        operator=operator,
        where=at,
        hint="correct the kernel; if it needs functions that the interpreter lacks, check it on a GPU",
    )


def _location(error: BaseException, source: TritonSource) -> str:
    """Return the innermost line of the author's file in an exception's traceback."""
    file, at = source.function.__code__.co_filename, source.where
    for each in chain_of(error):
        frames = traceback.extract_tb(each.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        at = f"{file}:{lines[-1]}" if lines else at
    return at
