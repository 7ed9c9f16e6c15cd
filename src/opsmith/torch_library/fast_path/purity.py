"""Purity of a function, proved from its bytecode, and the source of the run-time checks that remain."""

from __future__ import annotations

import builtins
import dis
import math
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.core.kernels import BuiltKernel
from opsmith.core.operator import Operator
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.contract import Contract, are_new

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
"""Operations that write to running statistics, which their schemas do not show; and those that make tensors
that are not dense, which later checks do not look for."""
_MISSING = object()


def never_writes(function: Callable[..., Any]) -> bool:
    """Return True if a function's code proves that it writes to no argument.

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
    """Return True if a function's code proves that its result aliases no argument.

    Example:
        >>> always_new(lambda x, w: x * w), always_new(lambda x: x.exp())
        (True, True)
        >>> always_new(lambda x: x), always_new(lambda x: x.mT)
        (False, False)
    """
    if not never_writes(function) or isinstance(function, BuiltKernel):
        return isinstance(function, BuiltKernel) and function.pure
    code = list(dis.get_instructions(function))
    returns = [offset for offset, each in enumerate(code) if each.opname.startswith("RETURN_")]
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
    seen.add(id(function))  # during its examination, so that recursion ends
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
    """Return True if code that uses a global or closed-over value cannot write through it."""
    if isinstance(value, types.ModuleType):
        return value in _MODULES
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, types.BuiltinFunctionType) and value not in _BUILTINS:
        return _operation(value.__name__)
    return isinstance(value, (*_VALUES, Operator)) or any(value is known for known in _BUILTINS)


def _lasting(value: Any) -> bool:
    """Return True if a global value cannot be rebound to another function, as a user's own can."""
    return not isinstance(value, types.FunctionType | Operator)


def _code(code: types.CodeType, function: types.FunctionType, seen: set[int]) -> bool:
    """Return True if every instruction of the code, and of nested functions, is pure."""
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
    """Return True if torch has operations of this name, none of which writes but by `out=`."""
    return not any(part in name for part in _UNMARKED) and capabilities.writes_nowhere(name)


CONTRACT_NAMES: dict[str, Any] = {
    "_op_Tensor": Tensor,
    "_op_is_contiguous": Tensor.is_contiguous,
    "_op_map": map,
    "_op_len": len,
    "_op_tuple": tuple,
    "_op_type": type,
    "_op_strided": torch.strided,
}
"""Globals of the source below."""


class ContractSource:
    """The contract of an operator's kernels, as conditions on `_op_result` and the tensor arguments.

    Args:
        specification: The operator.
        functions: The functions that compute it; by default its reference and kernels.

    Attributes:
        names: Globals of the conditions.
        may_write: True if it is declared to write, or a kernel is not known to write into no argument.
        may_alias: True if a kernel is not known to return new tensors alone.
        by_kernel: True if a kernel in C++ needs fewer conditions: these use `_op_in_cpp`.
    """

    def __init__(
        self, specification: Specification, functions: Sequence[Callable[..., Any]] | None = None
    ) -> None:
        kernels = functions or (specification.reference, *(each.function for each in specification.kernels))
        self._schema = specification.schema
        self._tensors = [each for each in specification.schema.arguments if each.kind.is_tensor]
        self._read = [each.name for each in self._tensors if not each.alias]
        self._written = [each.name for each in self._tensors if each.alias]
        self._values, contract = ", ".join(specification.schema.names), Contract(specification)
        self.names = {
            **CONTRACT_NAMES,
            "_op_reference": specification.reference,
            "_op_in_cpp": False,
            "_op_states": contract.before,
            "_op_holds": contract.holds,
        }
        in_cpp, count = capabilities.calls_in_cpp(), len(specification.schema.results)
        self.names["_op_are_new"] = in_cpp.freshness(count) if in_cpp and count else partial(are_new, count)
        self._several = not self._written and len(specification.schema.results) > 1
        self._lists = {each.name for each in self._tensors if each.kind.sequence}
        pure = all(never_writes(kernel) for kernel in kernels)
        self.may_write = bool(self._written) or not pure  # a declared write need not happen
        self.may_alias = not all(always_new(kernel) for kernel in kernels)
        self.by_kernel = bool(self._written or self._lists) or self._several

    def before(self) -> str:
        """Source of the states of the argument tensors, read before a kernel that may write."""
        states = f"_op_states([{self._values}])"
        return f"None if _op_in_cpp else {states}" if self.by_kernel else states

    def held(self) -> str:
        """Source of a condition: the result passes the quick checks."""
        left = f"_op_holds(_op_before, [{self._values}])"
        # None of the tensors that are written has got a history.
        left += "".join(
            f" and ({name} is None or _op_requires or not {name}.requires_grad)" for name in self._written
        )
        left = f"(_op_in_cpp or ({left}))" if self.by_kernel else left
        return f"{self.fresh()} and {left}" if self.may_write else self.fresh()

    def contiguous(self) -> str:
        """Source of a condition: what is written is contiguous."""
        return " and ".join(
            f"False not in _op_map(_op_is_contiguous, {name})"
            if name in self._lists
            else f"({name} is None or {name}.is_contiguous())"
            for name in self._written
        )

    def apart(self) -> str:
        """Source of a condition: what is written shares memory with no other argument."""
        conditions = ["True"]
        names = [*self._written, *self._read]
        for at, name in enumerate(self._written):
            for other in names[at + 1 :]:
                differ = f"{name}.untyped_storage() is not {other}.untyped_storage()"
                conditions.append(f"({name} is None or {other} is None or {differ})")
        return " and ".join(conditions)

    def returned(self) -> str:
        """Source of what the operator returns."""
        if self._schema.returns is not None:
            return self._schema.returns
        results, visible = self._schema.results, self._schema.visible
        if not results:
            return "None"
        every = [f"_op_result[{at}]" for at in range(len(results))] if self._several else ["_op_result"]
        shown = [
            every[at]
            if results[at].differentiable
            else f"({every[at]}.detach() if {every[at]}.requires_grad else {every[at]})"
            for at in visible
        ]
        if shown == every:
            return "_op_result"
        return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"

    def shown(self) -> tuple[int, ...]:
        """Positions of the results that the operator returns; none where it returns something else."""
        results, visible = self._schema.results, self._schema.visible
        if self._written or not all(results[at].differentiable for at in visible):
            return ()
        return tuple(visible)

    def captured(self) -> str:
        """Source of a condition: no result requires a gradient, as it would from a captured tensor."""
        if not self._several:
            one = "not _op_result.requires_grad"
            return f"(_op_in_cpp or {one})" if self.by_kernel else one
        every = " or ".join(f"_op_result[{at}].requires_grad" for at in range(len(self._schema.results)))
        return f"(_op_in_cpp or not ({every}))"

    def fresh(self) -> str:
        """Source of a condition: the results are dense tensors, each in memory of its own."""
        if self._schema.returns is not None:  # which a kernel need not return
            itself = f"_op_result is {self._schema.returns}"
            return f"({itself} or (_op_result is None and _op_kernel is not _op_reference))"
        if not self._schema.results:
            return "_op_result is None"
        if not self.may_alias:
            return "_op_type(_op_result) is _op_Tensor"
        tensors = "".join(
            f"*{each.name}, " if each.kind.sequence else f"{each.name}, " for each in self._tensors
        )
        return f"_op_are_new(_op_result, {tensors})"
