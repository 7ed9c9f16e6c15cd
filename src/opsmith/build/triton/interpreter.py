"""A Triton kernel on the CPU: Triton's interpreter runs it in NumPy, one program after the other.

Triton offers that by an environment variable, for a whole process. Here it is for one launch: what the
interpreter changes in Triton's language is put back, so that kernels still compile in the same process.
"""

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
from opsmith.build.triton.bounds import held_to, outside
from opsmith.build.triton.installed import LANGUAGE, triton_module
from opsmith.build.triton.source import TritonSource

FIRST = (3, 7)
"""The first version of Triton whose interpreter is used."""


def interpret(
    source: TritonSource, grid: tuple[int, ...], arguments: Mapping[str, Any], operator: str
) -> None:
    """Run every program of a grid, on tensors of the CPU.

    bfloat16, which NumPy does not have and the interpreter gets silently wrong, is computed in float32, and
    rounded at the end. Floats are rounded to float32 first, as they are when a kernel is launched on a GPU.

    Args:
        source: The kernel.
        grid: How many programs in each of up to three dimensions.
        arguments: Values of its parameters.
        operator: Name of the operator, for messages.

    Raises:
        ToolchainError: If Triton or NumPy is not installed.
        KernelError: If the kernel raises, or uses memory that is none of its arguments'.
    """
    numpy = _numpy()
    wide = {parameter.name for parameter in source.parameters if parameter.wide or parameter.constant}
    given, kept = {}, []
    for name, value in arguments.items():
        given[name] = value if name in wide else _rounded(value)
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            given[name], narrow, widened = _widened(value)
            kept.append((narrow, widened))
    with LANGUAGE, _language_kept(), numpy.errstate(all="ignore"):
        from triton.runtime.interpreter import InterpretedFunction

        try:
            with _as_read(source.function, source.text), held_to(given):
                InterpretedFunction(_apart(source.function))[grid](**given)
        except Exception as error:
            raise _told(error, source, operator) from error
    for narrow, widened in kept:
        narrow.copy_(widened)


def missing_interpreter() -> str | None:
    """Why nothing can be interpreted here; None where it can."""
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
    """A number as it arrives on a GPU; a truth value as a number, since the interpreter fails on it."""
    if isinstance(value, bool):
        return int(value)
    return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value


def _widened(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor in float32 with the same strides, the numbers in memory that it is made from, and those of it.

    All of the memory is taken: only so do sliced and expanded tensors keep their strides.
    """
    plain = value.data  # what is written there counts for the tensor as little as what a GPU writes
    stored = plain.untyped_storage().nbytes() // plain.element_size()
    narrow = plain.as_strided((stored,), (1,), 0)
    widened = narrow.float()
    return widened.as_strided(plain.shape, plain.stride(), plain.storage_offset()), narrow, widened


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with globals of its own, for the interpreter writes into them.

    What the function closes over stands there too, since the interpreter compiles it anew, alone.
    """
    seen = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    language = triton_module().language
    # The interpreter changes the modules that it finds among these, for as long as a launch takes.
    seen |= {"__triton_language__": language, "__triton_core__": language.core}
    copy = types.FunctionType(
        function.__code__, seen, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__annotations__ = dict(function.__annotations__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


@contextlib.contextmanager
def _as_read(function: Callable[..., Any], text: str) -> Iterator[None]:
    """A region in which the source of a function is what it was when the function was made.

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
    linecache.cache[file] = (len(text), None, whole, file)  # which no look at the file's time replaces
    try:
        yield
    finally:
        del linecache.cache[file]
        if before is not None:
            linecache.cache[file] = before


@contextlib.contextmanager
def _language_kept() -> Iterator[None]:
    """A region in which functions under `triton.jit` can be called by interpreted ones.

    Afterwards Triton's language is what it was: the interpreter itself puts back only a part.
    """
    language = triton_module().language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    core = language.core
    changed = (language, core, language.math, core.tensor, core.dtype, core.tensor_descriptor_base)
    before = [(place, dict(vars(place))) for place in changed]
    call, known = JITFunction.__call__, set(InterpretedFunction.rewritten_fn)
    rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in rewritten:
            with _as_read(self.fn, "".join(self.raw_src)):
                rewritten[self.fn] = InterpretedFunction(_apart(self.fn)).rewrite()
        return rewritten[self.fn](*args, **kwargs)

    JITFunction.__call__ = interpreted
    try:
        yield
    finally:
        JITFunction.__call__ = call
        for function in set(InterpretedFunction.rewritten_fn) - known:
            del InterpretedFunction.rewritten_fn[function]
        for place, names in before:
            for name in set(vars(place)) - set(names) - {"__annotations__"}:
                delattr(place, name)
            for name, value in names.items():
                if vars(place)[name] is not value:
                    setattr(place, name, value)


def _told(error: Exception, source: TritonSource, operator: str) -> errors.KernelError:
    """What a kernel raised, at the author's own line."""
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
    beyond = outside(error)
    if beyond is not None:
        return errors.KernelError(
            f"the Triton kernel {beyond}",
            operator=operator,
            argument=beyond.parameter,
            expected="reads and writes of elements alone",
            where=at,
            hint="give the load or store a mask, as `mask=at < x_numel`",
        )
    return errors.KernelError(
        f"the Triton kernel raised in the interpreter: {type(innermost).__name__}: {innermost}",
        operator=operator,
        where=at,
        hint="hint the kernel; where it needs what the interpreter lacks, check it on a GPU",
    )
