"""Source of a Triton kernel: a function, and the decorators around it."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from opsmith import errors
from opsmith.core.call_arguments import shown
from opsmith.core.forked_locks import lock_of
from opsmith.core.location import where
from opsmith.extras import install

_language_lock = lock_of(sys.modules[__name__], "_language_lock")
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options of Triton's launch, which are passed in addition to a kernel's parameters."""
POINTED = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""dtypes for which Triton has pointer types."""


def language_lock() -> threading.RLock:
    """Return the lock for compilation and the interpreter, which modifies Triton's language while it runs."""
    return _language_lock


def triton_module() -> Any:
    """Import Triton.

    Raises:
        ToolchainError: If Triton is not installed, or cannot be loaded.
    """
    try:
        import triton
    except ImportError as error:
        missing = error.name == "triton"
        raise errors.ToolchainError(
            "Triton is not installed" if missing else "Triton does not load",
            expected="the package `triton`, which comes with torch for CUDA",
            got=f"none on {sys.platform}" if missing else str(error),
            hint=f"{install('triton')}; until then the reference computes the operator",
        ) from error
    module: ModuleType = triton
    return module


def compiler_options() -> dict[str, Any]:
    """Return options for Triton's compiler, in addition to a kernel's options.

    They set fusion of products and sums to Triton's own default, since Triton 3.9 warns if it is not set.

    Raises:
        ToolchainError: If Triton is not installed.
    """
    return {"enable_fp_fusion": bool(triton_module().knobs.language.default_fp_fusion)}


@dataclass(frozen=True, slots=True)
class TritonParameter:
    """Parameter of a Triton kernel.

    Attributes:
        name: Name of the parameter.
        constant: True if it is a `tl.constexpr`.
        default: The default value; `inspect.Parameter.empty` if there is none.
    """

    name: str
    constant: bool
    default: Any

    @property
    def has_default(self) -> bool:
        """True if the parameter has a default value."""
        return self.default is not inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class TritonSource:
    """Source of a Triton kernel.

    Attributes:
        given: Value of `triton=`: the function, decorated or not.
        function: The function itself.
        layers: Decorators, outermost first: `triton.jit`, `triton.autotune`, `triton.heuristics`.
        parameters: Parameters of the function.
        text: Text of the function, with its decorators.
    """

    given: Any
    function: Callable[..., Any]
    layers: tuple[Any, ...]
    parameters: tuple[TritonParameter, ...]
    text: str

    @property
    def where(self) -> str:
        """`file:line` of the function."""
        return where(self.function)

    @property
    def entry(self) -> str:
        """Name of the function."""
        return self.function.__name__

    @property
    def configs(self) -> tuple[Any, ...]:
        """Configurations of `triton.autotune`; empty if it is not used."""
        return tuple(config for layer in self.layers for config in getattr(layer, "configs", ()))

    @property
    def heuristics(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Functions of `triton.heuristics`, by parameter."""
        found: dict[str, Callable[[dict[str, Any]], Any]] = {}
        for layer in self.layers:
            if not hasattr(layer, "configs"):
                found.update(getattr(layer, "values", {}))
        return found

    def first_config(self, arguments: Mapping[str, Any]) -> Any:
        """Return the first configuration of `triton.autotune` for arguments; None if it is not used."""
        tuner = next((layer for layer in self.layers if hasattr(layer, "configs")), None)
        return None if tuner is None else first_config(tuner, (), arguments)

    def with_filled(self, arguments: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """Return arguments together with the values that decorators fill.

        Args:
            arguments: Values of the kernel's parameters, and options of Triton.
            config: Configuration of `triton.autotune`; None if there is none.
        """
        found = {**arguments, **({} if config is None else config.all_kwargs())}
        for name, heuristic in self.heuristics.items():
            found[name] = heuristic(found)
        return found

    @property
    def filled(self) -> frozenset[str]:
        """Parameters that decorators fill."""
        return frozenset(self.heuristics).union(*(config.kwargs for config in self.configs))

    def launched(self) -> Any:
        """Return the object to launch by `launched[grid](...)`: the decorated function.

        Raises:
            ToolchainError: If Triton is not installed.
        """
        return self.given if self.layers else _jitted(self.function)

    def compiled_by(self) -> Any:
        """Return the function with only `triton.jit`, without other decorators.

        Raises:
            ToolchainError: If Triton is not installed.
        """
        jitted = _jitted(self.function)
        return next((layer for layer in self.layers if isinstance(layer, type(jitted))), jitted)


def first_config(tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first configuration that `triton.autotune` tries for the arguments of a launch."""
    if not tuner.configs[1:]:
        return tuner.configs[0]
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        return tuner.prune_configs(dict(kwargs))[0]
    finally:
        tuner.nargs = None


def triton_source(given: Any) -> TritonSource:
    """Read the source of a Triton kernel, without importing Triton.

    Args:
        given: Value of `triton=`: a function, decorated by Triton or not.

    Raises:
        KernelSourceError: If the value is not such a function, or its source cannot be read.
    """
    layers: list[Any] = []
    function = given
    while not inspect.isfunction(function):
        inner = getattr(function, "fn", None)
        if inner is None:
            raise _no_kernel("the value of `triton=` is not a kernel in Triton", given)
        layers.append(function)
        function = inner
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        raise _no_kernel("the source of a kernel in Triton cannot be read", given) from None
    found = inspect.signature(function).parameters.values()
    variadic = [each for each in found if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if variadic:
        raise _no_kernel(f"a kernel in Triton takes `{variadic[0]}`", given)
    if function.__name__ == "<lambda>":
        raise _no_kernel("a kernel in Triton is a lambda, which Triton cannot read", given)
    if sys.modules.get("triton") is not None:
        _jitted(function)
    return TritonSource(given, function, tuple(layers), tuple(map(_parameter, found)), text)


@functools.cache
def _jitted(function: Callable[..., Any]) -> Any:
    """Return the function under `triton.jit`, made once, since the file that `jit` reads may be edited."""
    triton_module()
    from triton.runtime.jit import JITFunction

    return JITFunction(function)


def _parameter(parameter: inspect.Parameter) -> TritonParameter:
    annotation = parameter.annotation  # like in Triton, a type or the name of a type
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return TritonParameter(parameter.name, "constexpr" in kind, parameter.default)


def _no_kernel(problem: str, given: Any) -> errors.KernelSourceError:
    return errors.KernelSourceError(
        problem,
        argument="triton",
        expected="a function in a file, plain or under `@triton.jit`, with parameters that have names",
        got=shown(given),
        hint="write `op.kernel('cuda', triton=function, grid=...)`",
    )
