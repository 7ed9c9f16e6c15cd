"""What a function's code shows about it: that it writes into nothing it is given, that its result is new.

Where that is so a call need not look for it. The answer is "yes" only for code whose every operation is one
of torch's that by its schema writes nowhere, and whose last one by its schema returns new memory.
"""

from __future__ import annotations

import builtins
import dis
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.torch_library import capabilities

_MODULES = (torch, torch.special, torch.linalg, torch.fft, math)
_BUILTINS = (sum, len, range, min, max, abs, round, float, int, bool, tuple, list, dict, zip, enumerate)
_VALUES = (bool, int, float, complex, str, types.NoneType, torch.dtype, torch.device, torch.layout)
_PROPERTIES = frozenset(("shape", "dtype", "device", "ndim", "mT", "T", "H", "mH"))
_STORES = (
    "STORE_SUBSCR",
    "STORE_SLICE",
    "STORE_ATTR",
    "STORE_GLOBAL",
    "DELETE_",
    "IMPORT_",
    "YIELD_",
    "SEND",
)
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_ARITHMETIC = ("+", "-", "*", "/", "**")
_KEYWORDS = frozenset(("out", "inplace", "copy", "training"))
_UNMARKED = ("batch_norm", "instance_norm", "nested", "sparse", "mkldnn", "quantize")
"""Operations that write into running statistics, of which their schemas say nothing; and what makes tensors
that are not dense, for which nothing is asked later."""
_MISSING = object()


def never_writes(function: Callable[..., Any]) -> bool:
    """Whether a function's code shows that it writes into nothing it is given.

    Example:
        >>> never_writes(lambda x, w: (x * w).tanh())
        True
        >>> never_writes(lambda x, w: x.mul_(w)), never_writes(print)
        (False, False)
    """
    if isinstance(function, BuiltKernel):
        return function.pure
    return _function(function, set())


def always_new(function: Callable[..., Any]) -> bool:
    """Whether a function's code shows that a tensor which it returns is no alias of what it is given.

    Example:
        >>> always_new(lambda x, w: x * w), always_new(lambda x: x.exp())
        (True, True)
        >>> always_new(lambda x: x), always_new(lambda x: x.mT)
        (False, False)
    """
    if not never_writes(function) or isinstance(function, BuiltKernel):
        return isinstance(function, BuiltKernel) and function.pure
    code = list(dis.get_instructions(function))
    returns = [place for place, each in enumerate(code) if each.opname.startswith("RETURN_")]
    if (
        len(returns) != 1
        or code[returns[0]].is_jump_target
        or any(each.opname == "RETURN_GENERATOR" for each in code)
    ):
        return False
    last = code[returns[0] - 1]
    if last.opname == "BINARY_OP":
        return last.argrepr in _ARITHMETIC
    called = [each.argval for each in code if each.opname in _ATTRIBUTES and each.argval not in _PROPERTIES]
    calls = sum(each.opname in ("CALL", "CALL_KW", "CALL_METHOD") for each in code)
    return (
        last.opname.startswith("CALL") and calls == len(called) == 1 and capabilities.returns_new(called[0])
    )


def _function(function: Any, seen: set[int]) -> bool:
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))  # as long as it is looked at: what calls itself is not followed
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    harmless = (
        all(_harmless(value, seen) for value in cells)
        and all(isinstance(value, _VALUES) for value in function.__defaults__ or ())
        and _code(function.__code__, function, seen)
    )
    seen.discard(id(function))
    return harmless


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return cell


def _harmless(value: Any, seen: set[int]) -> bool:
    """Whether code may use a value from outside without writing by it."""
    if isinstance(value, types.ModuleType):
        return value in _MODULES
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, types.BuiltinFunctionType) and value not in _BUILTINS:
        return _operation(value.__name__)
    return isinstance(value, (*_VALUES, Operator)) or any(value is known for known in _BUILTINS)


def _lasting(value: Any) -> bool:
    """Whether the name of a global value will not come to mean another function: one of a user's own may."""
    return not isinstance(value, types.FunctionType | Operator)


def _code(code: types.CodeType, function: types.FunctionType, seen: set[int]) -> bool:
    """Whether each step of the code, and of what is defined inside, is harmless."""
    for constant in code.co_consts:
        words = constant if isinstance(constant, tuple) else (constant,)
        if any(isinstance(word, str) and word in _KEYWORDS for word in words):
            return False
        if isinstance(constant, types.CodeType) and not _code(constant, function, seen):
            return False
    for step in dis.get_instructions(code):
        if step.opname.startswith(_STORES) or (step.opname == "BINARY_OP" and step.argrepr.endswith("=")):
            return False
        if step.opname in _ATTRIBUTES and not _attribute(str(step.argval)):
            return False
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            known = {**vars(builtins), **function.__globals__}
            value = known.get(step.argval, _MISSING)
            if value is _MISSING or not (_lasting(value) and _harmless(value, seen)):
                return False
    return True


def _attribute(name: str) -> bool:
    return name in _PROPERTIES or isinstance(getattr(torch, name, None), torch.dtype) or _operation(name)


def _operation(name: str) -> bool:
    """Whether torch has operations of this name, none of which writes but by `out=`."""
    return not any(part in name for part in _UNMARKED) and capabilities.writes_nowhere(name)
