"""Generated class of a module plan: its functions, generated as source, its names and its docstring."""

from __future__ import annotations

import inspect
import linecache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from opsmith import errors
from opsmith.core.annotations import hints_of
from opsmith.core.location import CallSite
from opsmith.core.operator import Operator
from opsmith.core.schema import REQUIRED, Argument
from opsmith.modules.declaration import read_plan
from opsmith.modules.operator_module import ModulePlan, OperatorModule, lazy_twin

R = TypeVar("R")


def module_class(
    operator: Operator[..., R], *, site: CallSite, doc: str | None = None, **arguments: Any
) -> type[OperatorModule[R]]:
    """Return the class of `op.module(...)`.

    Args:
        operator: The operator.
        site: Location of the call of `module`.
        doc: Text at the end of the docstring.
        **arguments: The remaining arguments of `module`.

    Raises:
        ModuleDeclarationError: If the arguments do not fit the operator, or contradict each other.
    """
    with errors.about(operator.name, site.where):
        plan = read_plan(operator, site.where, **arguments)
    qualname = site.scope + plan.name
    hints = _hints(plan)
    functions = _functions(plan, f"<{site.module}.{qualname}>")
    functions["__init__"].__annotations__ = {
        **{name: int | None if name in plan.inferred else int for name in plan.sizes},
        **{each.name: hints[each.name] for each in plan.options},
        **{each.name: bool for each in plan.flags},
        "device": torch.device | str | int | None,
        "dtype": torch.dtype | None,
        "return": None,
    }
    functions["forward"].__annotations__ = {
        name: hint
        for name, hint in hints.items()
        if name in (*(each.name for each in plan.forward), "return")
    }
    functions["__init__"].__doc__ = f"Make the parameters of `{plan.operator.name}`, and fill them."
    functions["forward"].__doc__ = f"Call `{plan.operator.name}`."
    for name, function in functions.items():
        function.__module__, function.__qualname__ = site.module, f"{qualname}.{name}"
    members = {
        **functions,
        "operator": operator,
        "plan": plan,
        "__module__": site.module,
        "__qualname__": qualname,
        "__doc__": _docstring(plan, doc),
        "__annotations__": _attributes(plan, hints),
    }
    kind: type[OperatorModule[R]] = type(plan.name, (OperatorModule,), members)
    if plan.inferred:
        kind.Lazy = lazy_twin(kind)
    return kind


def _functions(plan: ModulePlan, file: str) -> dict[str, Any]:
    """Return `__init__` and `forward` as a user would write them, for torch.compile and tracebacks."""
    given = [*plan.sizes, *(each.name for each in plan.options), *(each.name for each in plan.flags)]
    taken = ", ".join(f"{name!r}: {name}" for name in given)
    source = (
        f"def __init__({_constructor(plan)}):\n"
        f"    self._make({{{taken}}}, device, dtype)\n"
        f"def forward({_parameters(['self'], plan.forward)}):\n"
        f"    return self.operator({_arguments(plan)})\n"
    )
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    arguments = plan.operator.specification.schema.arguments
    namespace: dict[str, Any] = {"defaults": {each.name: each.default for each in arguments}}
    exec(compile(source, file, "exec"), namespace)
    return {name: namespace[name] for name in ("__init__", "forward")}


def _constructor(plan: ModulePlan) -> str:
    """Return the signature of the constructor: sizes, options and flags by position, then keywords."""
    by_keyword = [each for each in plan.options if each.keyword_only]
    positional = [_parameter(each) for each in plan.options if not each.keyword_only]
    flags = [f"{each.name}=True" for each in plan.flags]
    last = [*(_parameter(each) for each in by_keyword), "device=None", "dtype=None"]
    return ", ".join(["self", *plan.sizes, *positional, *flags, "*", *last])


def _parameters(first: list[str], arguments: tuple[Argument, ...]) -> str:
    positional = [_parameter(each) for each in arguments if not each.keyword_only]
    by_keyword = [_parameter(each) for each in arguments if each.keyword_only]
    return ", ".join([*first, *positional, *(["*", *by_keyword] if by_keyword else [])])


def _parameter(argument: Argument) -> str:
    return argument.name if argument.default is REQUIRED else f"{argument.name}=defaults[{argument.name!r}]"


def _arguments(plan: ModulePlan) -> str:
    """Return the arguments of the operator's call: from `forward`, or attributes of the module."""
    from_forward = {each.name for each in plan.forward}
    pieces = []
    for argument in plan.operator.specification.schema.arguments:
        value = argument.name if argument.name in from_forward else f"self.{argument.name}"
        pieces.append(f"{argument.name}={value}" if argument.keyword_only else value)
    return ", ".join(pieces)


def _hints(plan: ModulePlan) -> dict[str, Any]:
    """Return the annotations of the reference, or else of the schema."""
    specification = plan.operator.specification
    hints: dict[str, Any] = {each.name: each.kind.annotation() for each in specification.schema.arguments}
    if inspect.isfunction(specification.reference):
        hints.update(hints_of(specification.reference))
    if specification.schema.hidden:
        hints.pop("return", None)
    return hints


def _attributes(plan: ModulePlan, hints: dict[str, Any]) -> dict[str, Any]:
    owned = {
        each.name: (Tensor | None if each.optional else Tensor)
        if each.buffer
        else (nn.Parameter | None if each.optional else nn.Parameter)
        for each in plan.owned
    }
    return {
        **dict.fromkeys(plan.sizes, int),
        **{each.name: hints[each.name] for each in plan.options},
        **owned,
    }


def _docstring(plan: ModulePlan, doc: str | None) -> str:
    operator = plan.operator
    described = inspect.getdoc(operator.reference) or f"Compute `{operator.name}`."
    lines = [described.partition("\n")[0], "", f"A module around the operator `{operator.name}`."]
    arguments = [
        f"    {name}: A size{'; None to infer it in the first call' * (name in plan.inferred)}."
        for name in plan.sizes
    ]
    arguments += [f"    {each.name}: Argument of the operator{_default(each)}." for each in plan.options]
    arguments += [f"    {each.name}: True for a module with a `{each.name}`." for each in plan.flags]
    if plan.owned:
        arguments.append("    device, dtype: Device and dtype of parameters and buffers.")
    if arguments:
        lines += ["", "Args:", *arguments]
    if plan.owned:
        lines += ["", "Attributes:"]
        for each in plan.owned:
            kind = "buffer" if each.buffer else "parameter"
            lines.append(f"    {each.name}: {kind} {each.layout}, which begins as `{each.filling}`.")
    if doc:
        lines += ["", inspect.cleandoc(doc)]
    return "\n".join(lines) + "\n"


def _default(argument: Argument) -> str:
    return "" if argument.default is REQUIRED else f"; {argument.default!r} by default"
