"""The references of calls, as one program of torch: all bodies of a model are translated at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.location import where
from opsmith.exporting.calls import Call, flat_results
from opsmith.exporting.sizes import example_shape, example_size, varies
from opsmith.exporting.specialising import culprit
from opsmith.torch_library.hushed import hushed


class References(torch.nn.Module):
    """Computes calls one after the other, by their references.

    Args:
        calls: What it computes; the tensors of all of them are its inputs, in order.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results of all calls, in order."""
        rest = iter(tensors)
        return tuple(result for call in self.calls for result in computed(call, rest))


def computed(call: Call, given: Iterator[Any]) -> list[Tensor]:
    """The results that callers see, by the reference; what is given are the call's own inputs, and more."""
    schema, function = call.specification.schema, reference_of(call)
    inputs = [next(given) for _ in call.inputs()]
    tensors = iter([each for each in inputs if isinstance(each, Tensor)])
    sizes = iter([each for each in inputs if not isinstance(each, Tensor)])
    args = _filled(tuple(call.node.args), tensors, sizes)
    kwargs = {name: _filled(value, tensors, sizes) for name, value in call.node.kwargs.items()}
    positional, named = schema.split(schema.received(args, kwargs))
    returned = function(*positional, **named)
    results = (returned,) if schema.single else tuple(returned)
    return list(flat_results([results[at] for at in schema.visible]))


def _filled(value: Any, tensors: Iterator[Tensor], sizes: Iterator[Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return next(sizes if isinstance(value.meta["val"], torch.SymInt) else tensors)
    if isinstance(value, list | tuple):
        items = [_filled(each, tensors, sizes) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def reference_of(call: Call) -> Any:
    """The function that a body is derived from.

    Raises:
        ExportError: If there is none.
    """
    specification = call.specification
    if specification.opaque or (specification.own is not None and specification.reference is None):
        raise errors.ExportError(
            "it is opaque: there is no reference in PyTorch that a body could be derived from",
            operator=specification.name,
            where=specification.where,
            hint="write `body='node', verify=False`, and give the runtime a kernel for it",
        )
    return specification.reference


def traced(calls: Sequence[Call]) -> Any:
    """The references of some calls, as `torch.export` sees them; sizes that vary in a call stay open.

    Raises:
        ExportError: If torch cannot trace one of them.
        DynamicAxisError: If one of them fixes a size that varies.
    """
    try:
        return _traced(calls)
    except errors.OpsmithError:
        raise
    except Exception as error:
        if len(calls) == 1:
            specification = calls[0].specification
            raise errors.ExportError(
                f"torch cannot trace its reference: {first_line(error)}",
                operator=specification.name,
                where=where(reference_of(calls[0])),
                hint="write it in torch's operations on tensors, and take no values out of them; or "
                "`body='node', verify=False`",
            ) from error
        for call in calls:  # which of them it is
            traced([call])
        raise


def _traced(calls: Sequence[Call]) -> Any:
    inputs = [each for call in calls for each in call.inputs()]
    auto = torch.export.Dim.AUTO
    dims = tuple(
        dict.fromkeys(_open_axes(each), auto) if isinstance(each, Tensor) else auto for each in inputs
    )

    def trace() -> Any:
        with hushed(), torch.no_grad():
            return torch.export.export(
                References(calls).eval(),
                tuple(map(_example, inputs)),
                dynamic_shapes=(dims,) if any(dims) else None,
                strict=False,
            )

    program = trace()
    names = [(call, name) for call in calls for name, node in call.slots() if node is not None]
    seen = [node.meta["val"] for node in user_inputs(program)]
    for (call, name), given, made in zip(names, inputs, seen, strict=True):
        if not isinstance(given, Tensor):
            if not varies(made):
                raise _fixed(call, name, f"`{name}`", int(made), trace)
            continue
        for axis in _open_axes(given):
            if not varies(made.shape[axis]):
                raise _fixed(call, name, f"axis {axis} of `{name}`", int(made.shape[axis]), trace)
    return program


def _open_axes(tensor: Tensor) -> list[int]:
    return [axis for axis, size in enumerate(tensor.shape) if varies(size)]


def _example(given: Tensor | torch.SymInt) -> Any:
    if not isinstance(given, Tensor):
        return example_size(given)
    return torch.zeros(example_shape(given), dtype=given.dtype, device=given.device)


def _fixed(call: Call, name: str, what: str, size: int, trace: Callable[[], Any]) -> errors.DynamicAxisError:
    return errors.DynamicAxisError(
        f"its reference fixes {what}, which varies in this call",
        operator=call.specification.name,
        argument=name,
        expected="a computation for every size",
        got=f"one for size {size} alone",
        where=culprit(trace, size) or call.specification.where,
        hint="export with a larger example: torch takes a size of 0 or 1 for a constant"
        if size < 2
        else "compute with sizes as they come, without comparing them with numbers",
    )


def user_inputs(program: Any) -> list[Any]:
    """The nodes of a program of torch that stand for what it is called with."""
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    names = {each.arg.name for each in program.graph_signature.input_specs if each.kind is kind}
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def first_line(error: BaseException) -> str:
    """The first line of a message that says something; torch prints programs below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
