"""Fake tensors: metadata without data."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from opsmith.torch_library.capabilities.private import dispatch


def fake_mode() -> Any:
    """Context whose tensors have metadata and no data; its `from_tensor` converts a real tensor."""
    return _WithoutData()


class _WithoutData(FakeTensorMode):
    """Mode whose tensors know no value: torch 2.15's fake tensors remember the value of a wrapped number."""

    def from_tensor(self, tensor: Tensor, **options: Any) -> Any:
        """A tensor with the same metadata."""
        fake = super().from_tensor(tensor, **options)
        fake.item_memo = None
        return fake


def symbolic_mode(*, inputs: bool = True) -> Any:
    """Fake mode in which every size except 0 and 1 is a symbol, as in code compiled for dynamic sizes.

    Args:
        inputs: False to keep the sizes of the given tensors: then the only symbols are sizes of results that
            depend on data.
    """
    return _Symbolic(inputs)


class _Symbolic:
    def __init__(self, inputs: bool) -> None:
        self.inputs = inputs
        # Equal sizes get different symbols; guards show which sizes must be equal.
        self.mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        self._entered: list[ExitStack] = []

    def __enter__(self) -> _Symbolic:
        # As Dynamo does: without it, operations that torch decomposes in Python make sizes constant.
        with ExitStack() as regions:
            regions.enter_context(enable_python_dispatcher())
            regions.enter_context(self.mode)
            self._entered.append(regions.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor with the same metadata, and with symbolic sizes if `inputs` is True."""
        if not self.inputs:
            return self.mode.from_tensor(tensor, static_shapes=True)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return self.mode.from_tensor(tensor, static_shapes=False, symbolic_context=context)

    @staticmethod
    def size(size: Any) -> int | None:
        """The value of a size for the given tensors; None if it depends on their data."""
        known: int | None = size if isinstance(size, int) else size.node.hint
        return known

    def where_fixed(self, size: Any) -> tuple[str, int, str] | None:
        """File, line and function of the first code outside torch that made a size constant."""
        symbol, shapes = size.node._expr, self.mode.shape_env
        for guard in shapes.guards if shapes else ():
            frame: Any = guard.sloc.framework_loc
            known = not isinstance(frame, str | None) and symbol in guard.expr.free_symbols
            if known and guard.expr.is_Equality and any(side.is_Integer for side in guard.expr.args):
                return frame.filename, frame.lineno, frame.name
        return None

    @staticmethod
    def fixed(size: Any) -> bool:
        """Return True if the trace specialised on this size."""
        return isinstance(size, torch.SymInt) and not size.node.expr.free_symbols


def self_test() -> None:
    """Operations on fake tensors have results with the right metadata and device."""
    mode = fake_mode()
    x = mode.from_tensor(torch.ones(3, 2).mT)
    with mode:
        product = x @ torch.ones(3, 4)
    assert (product.shape, product.device.type, product.dtype) == ((2, 4), "cpu", torch.float32)
    assert x.stride() == (1, 2)
    assert type(product) is not torch.Tensor
    assert dispatch.without_data([x])
    with mode, dispatch.without_modes():
        assert type(torch.empty(1)) is Tensor, "a mode saw a call that it must not see"
    number = mode.from_tensor(torch.tensor(3))
    assert number.item_memo is None, "a fake tensor knows its value"
    symbolic = symbolic_mode()
    y = symbolic.from_tensor(torch.ones(3, 2))
    with symbolic:
        grown = y.new_empty(int(y.shape[0]), y.shape[1] * 2)
    assert [symbolic.size(size) for size in grown.shape] == [3, 4]
    assert [symbolic.fixed(size) for size in y.shape] == [True, False]
    assert (symbolic.where_fixed(y.shape[0]) or ("",))[0] == __file__
    by_data = symbolic_mode(inputs=False)
    with by_data:
        places = by_data.from_tensor(torch.ones(3, 2)).nonzero()
    assert [by_data.size(size) for size in places.shape] == [None, 2]
