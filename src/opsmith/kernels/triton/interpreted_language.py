"""Triton's language in the interpreter: add missing functions for a run, and restore it afterwards."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opsmith.kernels.triton import libdevice
from opsmith.kernels.triton.source import triton_module

LIBDEVICE = tuple(f"triton.language.extra.{part}libdevice" for part in ("", "cuda.", "hip."))
"""Modules with functions that the interpreter lacks."""

_CODES: weakref.WeakKeyDictionary[Callable[..., Any], types.CodeType] = weakref.WeakKeyDictionary()
"""Functions that were rewritten for the interpreter; parsing a function takes longer than running it."""


@contextlib.contextmanager
def interpreted_language() -> Iterator[Callable[[Callable[..., Any], str], Callable[..., Any]]]:
    """Context manager in which interpreted functions run, and can call functions under `triton.jit`.

    It yields a function that rewrites another function, given its text, for the interpreter. Afterwards it
    restores Triton's language, of which the interpreter itself restores only a part.
    """
    language = triton_module().language
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    core = language.core
    modules = [sys.modules[name] for name in LIBDEVICE if name in sys.modules]
    missing = [
        (module, name, function)
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ in LIBDEVICE
    ]
    bridged: dict[Callable[..., Any], Callable[..., Any]] = {
        function: libdevice.bridged(name) for _, name, function in missing
    }
    changed = (
        *(language, core, language.math, core.tensor, core.dtype, core.tensor_descriptor_base, *modules),
        *(interpreter.interpreter_builder, JITFunction, interpreter.InterpretedFunction),
    )
    before = [(owner, dict(vars(owner))) for owner in changed]
    rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}

    def rewrite(function: Callable[..., Any], text: str) -> Callable[..., Any]:
        if function not in rewritten:
            rewritten[function] = _rewritten(function, text, bridged)
        return rewritten[function]

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        text = self.raw_src if isinstance(self, JITFunction) else inspect.getsourcelines(self.fn)[0]
        return rewrite(self.fn, "".join(text))(*args, **kwargs)

    try:
        JITFunction.__call__ = called
        interpreter.InterpretedFunction.__call__ = called
        core.dtype.__call__ = _cast
        _compute_bfloat16_in_float32(interpreter.interpreter_builder, language)
        for module, name, function in missing:
            setattr(module, name, bridged[function])
        yield rewrite
    finally:
        for owner, names in before:
            for name in set(vars(owner)) - set(names) - {"__annotations__"}:
                delattr(owner, name)
            for name, value in names.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


def _cast(self: Any, value: Any) -> Any:
    """Cast a value, as `tl.float32(value)` does."""
    from triton.runtime.interpreter import interpreter_semantic

    return interpreter_semantic.to_tensor(value).to(self)


def _compute_bfloat16_in_float32(builder: Any, language: Any) -> None:
    """Let the interpreter store bfloat16 as float32; otherwise it would silently compute with the bits."""
    bitcast = builder.create_bitcast

    def same_width(source: Any, wanted: Any) -> Any:
        if source.dtype.scalar == language.float32 and wanted.scalar.primitive_bitwidth != 32:
            raise NotImplementedError("Triton's interpreter cannot reinterpret the bits of bfloat16")
        return bitcast(source, wanted)

    builder.get_bf16_ty = builder.get_float_ty
    builder.get_bf16 = builder.get_fp32
    builder.create_bitcast = same_width


def _rewritten(
    function: Callable[..., Any], text: str, bridged: Mapping[Callable[..., Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function for the interpreter, with separate globals, which the interpreter modifies.

    The globals include the variables of its closure, because the interpreter compiles only the function.
    """
    from triton.runtime import interpreter

    given = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    language = triton_module().language
    names = {
        name: bridged.get(value) or _late(value, language) if inspect.isfunction(value) else value
        for name, value in given.items()
    }
    # During a launch, the interpreter patches the modules that it finds among these names.
    names |= {"__triton_language__": language, "__triton_core__": language.core}
    names = {**vars(interpreter), **names}
    if function not in _CODES:
        # This is the text from the function's definition, since its file may have been edited later.
        tree = interpreter.ASTTransformer().visit(ast.parse(textwrap.dedent(text)))
        tree.body[0].decorator_list = []
        ast.increment_lineno(ast.fix_missing_locations(tree), function.__code__.co_firstlineno - 1)
        made: dict[str, Any] = {}
        exec(compile(tree, function.__code__.co_filename, "exec"), dict(names), made)
        _CODES[function] = made[tree.body[0].name].__code__
    return types.FunctionType(_CODES[function], names, function.__name__, function.__defaults__)


def _late(function: Callable[..., Any], language: Any) -> Callable[..., Any]:
    """Return a wrapper of a function that was imported by name, such as `from triton.language import load`.

    The interpreter replaces functions of Triton's modules, so the wrapper looks the function up in each call.
    """
    name = function.__name__
    for module in (language, language.math):
        if language.core.is_builtin(function) and hasattr(module, name):
            return lambda *args, **kwargs: getattr(module, name)(*args, **kwargs)
    return function
