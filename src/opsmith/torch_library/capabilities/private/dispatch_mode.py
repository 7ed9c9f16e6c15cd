"""A dispatch mode that reports every operator that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode


def observe_operators(
    see: Callable[[Any, dict[str, Any]], None], given: Callable[[Any, Sequence[Any]], None] | None = None
) -> AbstractContextManager[Any]:
    """Context that calls `see` for each operator that runs, with its keyword arguments.

    Args:
        see: Takes the operator and its keyword arguments, before it runs.
        given: Takes the operator and its positional arguments, before it runs.
    """
    watch: AbstractContextManager[Any] = _Watch(see, given)
    return watch


def observe_writes(see: Callable[[torch.Tensor], None]) -> AbstractContextManager[Any]:
    """Context that calls `see` for each tensor that an operator is about to write into, by its schema."""

    def given(operator: Any, args: Sequence[Any]) -> None:
        written(operator, args, {})

    def written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for position, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, torch.Tensor):
                    see(each)

    return observe_operators(lambda operator, kwargs: written(operator, (), kwargs), given)


@contextmanager
def operators_behind_modes() -> Iterator[list[Any] | None]:
    """Context with a list of the operators that the current modes have passed on to kernels."""
    ran: list[Any] = []
    modes_off: Any = _disable_current_modes()
    with modes_off as modes, observe_operators(lambda operator, _: ran.append(operator)):
        for mode in reversed(modes):
            _push_mode(mode)
        try:
            yield ran
        finally:
            for _ in modes:
                _pop_mode()


def tracing_imported() -> bool:
    """Return True if torch has imported its tracing modules; an operation on `meta` may import them."""
    return "torch._dynamo" in sys.modules


class _Watch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to mark the mode, torch would import the compiler, which takes one to two seconds."""
        return False

    def __init__(
        self, see: Callable[[Any, dict[str, Any]], None], given: Callable[[Any, Sequence[Any]], None] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see, self.given = see, given

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(operator, kwargs or {})
        if self.given is not None:
            self.given(operator, args)
        return operator(*args, **(kwargs or {}))


def self_test() -> None:
    """Operators that run in the context are reported with their keywords, and results are unchanged."""
    seen: list[tuple[str, dict[str, Any]]] = []
    given: list[Any] = []
    x = torch.ones(2)
    with observe_operators(
        lambda operator, kwargs: seen.append((str(operator), kwargs)),
        lambda operator, args: given.extend(args),
    ):
        result = x.sum(dtype=torch.float64)
    assert result.item() == 2.0
    assert given == [x]
    assert seen[-1] == ("aten.sum.default", {"dtype": torch.float64})
    writes: list[torch.Tensor] = []
    out = torch.zeros(2)
    with observe_writes(writes.append):
        torch.add(x, 1, out=out)
        x.view(2).mul_(2)
    assert [each.data_ptr() for each in writes] == [out.data_ptr(), x.data_ptr()]
    with observe_operators(lambda *_: None), operators_behind_modes() as ran:
        x.exp()
    assert ran == [torch.ops.aten.exp.default]
