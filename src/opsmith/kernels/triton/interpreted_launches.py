"""Launches of Triton kernels by any code, which run in the interpreter if the tensors are on the CPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from opsmith.kernels.triton.interpreter import interpret, missing_interpreter
from opsmith.kernels.triton.source import TritonSource, first_config, triton_source

_SOURCES: weakref.WeakKeyDictionary[Any, TritonSource] = weakref.WeakKeyDictionary()
"""Sources of the launched kernels, which are read from their files."""


def interpreted_launches(
    record: Callable[[str], None] = lambda name: None,
) -> contextlib.AbstractContextManager[None] | None:
    """Return a context in which Triton kernels run on CPU tensors; None if Triton is not imported yet.

    Triton itself refuses such launches. Under TRITON_INTERPRET=1 it mixes up launches of several threads, and
    keeps their tensors alive in a reference cycle. Here launches run one after the other, and accesses
    outside of the memory of their arguments raise errors. Triton itself runs launches on other devices.

    Args:
        record: Function that is called with the name of each kernel that is interpreted.
    """
    if "triton.runtime.jit" not in sys.modules or missing_interpreter() is not None:
        return None
    return _interpreting(record)


@contextlib.contextmanager
def _interpreting(record: Callable[[str], None]) -> Iterator[None]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    before = [(owner, vars(owner)["run"]) for owner in (JITFunction, InterpretedFunction, Autotuner)]
    for owner, run in before:
        owner.run = _tuned(run) if owner is Autotuner else _interpreted(run, record)
    try:
        yield
    finally:
        for owner, run in before:
            owner.run = run


def _interpreted(run: Callable[..., Any], record: Callable[[str], None]) -> Callable[..., Any]:
    """Return a launch function that interprets the kernel if its tensors are on the CPU."""

    @functools.wraps(run)
    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or not _on_cpu([*args, *kwargs.values()]):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        source = _SOURCES.get(self)
        if source is None:
            source = _SOURCES[self] = triton_source(self)
        arguments = _bound(source, args, kwargs)
        shape = grid(arguments) if callable(grid) else grid
        record(source.entry)
        interpret(source, tuple(map(int, shape)), arguments, source.entry, bounded=False)
        return None

    return launch


def _tuned(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launch function for `triton.autotune` that takes the first configuration on the CPU."""

    @functools.wraps(run)
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _on_cpu([*args, *kwargs.values()]):
            return run(self, *args, **kwargs)
        config = first_config(self, args, kwargs)
        options = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **options})
        return self.fn.run(*args, **kwargs, **options)

    return launch


def _on_cpu(values: Sequence[Any]) -> bool:
    """Return True if there are tensors among the arguments of a launch, and all are on the CPU."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensors = [value.base if isinstance(value, TensorDescriptor) else value for value in values]
    return {each.device.type for each in tensors if isinstance(each, Tensor)} == {"cpu"}


def _bound(source: TritonSource, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a kernel's parameters, by name, without the options of a launch."""
    names = {parameter.name for parameter in source.parameters}
    given = {name: value for name, value in kwargs.items() if name in names}
    bound = inspect.signature(source.function).bind(*args, **given)
    bound.apply_defaults()
    return bound.arguments
