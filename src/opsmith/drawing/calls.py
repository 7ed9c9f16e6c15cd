"""A recording of calls: every function of torch, and every operator, that computes in a region."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from opsmith.core.operator import Operator
from opsmith.declaring import declared_operators
from opsmith.drawing.attributes import arguments_of
from opsmith.drawing.graph import Form, Group
from opsmith.drawing.leaves import leaf_of
from opsmith.drawing.places import call_site
from opsmith.drawing.storages import form_of
from opsmith.torch_library import capabilities

READS = frozenset(
    [
        "__bool__",
        "__float__",
        "__int__",
        "__complex__",
        "__index__",
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__contains__",
        "equal",
        "allclose",
    ]
)
"""Functions whose result is no tensor, and depends on what stands in one."""


@dataclass(eq=False)
class Call:
    """One call.

    Args:
        label: What was called.
        operator: The operator of opsmith, if it was one.
        group: The innermost region that was open.
        sources: Where each tensor among its arguments comes from, and the name of the argument.
        forms: What its results look like.
        attributes: Its other arguments.
        where: `file:line` of the call.
        source: That line.
        reads: Whether it hands numbers to Python.
        recorded: The nodes that autograd made for it, the last ones first.
        number: Its place among the calls.
    """

    label: str
    operator: Operator[..., Any] | None
    group: str | None
    sources: list[tuple[Call | Tensor, str]]
    forms: tuple[Form, ...]
    attributes: tuple[tuple[str, str], ...]
    where: str
    source: str
    reads: bool = False
    recorded: list[Any] = field(default_factory=list)
    number: int = 0


class Recording(TorchFunctionMode):
    """A region whose calls are recorded; what it computes is what it computes anyway.

    Attributes:
        calls: The calls, in order.
        groups: The regions that were opened inside, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.groups: list[Group] = []
        self._outside: dict[int, Tensor] = {}
        self._open: list[str] = []
        self._made: dict[int, tuple[weakref.ref[Tensor], Call]] = {}
        self._written: dict[int, tuple[Any, Call]] = {}
        self._nodes: dict[int, tuple[Any, Call | None]] = {}
        self._operators = {each.torch_operator: each for each in declared_operators()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and record it if it computes something."""
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        before = [_version(each) for each in given]
        result = function(*args, **kwargs)
        name = _name(function)
        results = list(tensors_in(result))
        written = [each for each, old in zip(given, before, strict=True) if _version(each) != old]
        if results or written or name in READS:
            self._record(function, name, args, kwargs, results, written)
        return result

    @property
    def outside(self) -> list[Tensor]:
        """Tensors that came from elsewhere, in the order of their use."""
        return list(self._outside.values())

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from a call of this recording."""
        made = self._made.get(id(tensor))
        return made is not None and made[0]() is tensor

    def open(self, group: Group) -> None:
        """Begin a region: what is called from now on is in it."""
        self.groups.append(group)
        self._open.append(group.id)

    def close(self) -> None:
        """End the region that was opened last."""
        self._open.pop()

    @property
    def innermost(self) -> str | None:
        """The region that is open."""
        return self._open[-1] if self._open else None

    def source_of(self, tensor: Tensor) -> Call | Tensor:
        """The call that a tensor comes from, and if there is none, the tensor."""
        made, by = self._made.get(id(tensor), (None, None))
        found = by if made is not None and made() is tensor else None
        storage = _storage(tensor)
        written = self._written.get(id(storage)) if storage is not None else None
        since = written is not None and written[0] is storage
        # Someone may have written through another view since.
        if written is not None and since and (found is None or written[1].number > found.number):
            found = written[1]
        if found is not None:
            return found
        self._outside.setdefault(id(tensor), tensor)
        return tensor

    def call_of(self, node: Any) -> Call | None:
        """The call for which autograd made a node."""
        return self._nodes.get(id(node), (None, None))[1]

    def add(self, call: Call, results: list[Tensor]) -> None:
        """Record a call whose results these are."""
        call.number = len(self.calls)
        self.calls.append(call)
        for tensor in results:
            self._made[id(tensor)] = (weakref.ref(tensor), call)
            self._claim(tensor.grad_fn, call)

    def _record(
        self,
        function: Any,
        name: str,
        args: Any,
        kwargs: Any,
        results: list[Tensor],
        written: list[Tensor],
    ) -> None:
        operator = self._operators.get(function)
        passed, attributes = arguments_of(function, operator, args, kwargs)
        given = {id(tensor) for _, tensor in passed}
        made = [each for each in results if id(each) not in given]  # the rest is handed back as it came
        reads = name in READS and not results
        if not made and not written and not reads:
            return
        if reads:
            attributes = (*attributes, ("hands to Python", "numbers: what follows may depend on them"))
        self.see(given for _, given in passed)
        frame = inspect.currentframe()
        where, line = call_site(None if frame is None else frame.f_back)
        del frame  # a circle, which would keep the tensors of this call
        call = Call(
            operator.name if operator is not None else _label(function, name),
            operator,
            self.innermost,
            [(self.source_of(tensor), label) for label, tensor in passed],
            tuple(form_of(each) for each in made or written),
            attributes,
            where,
            line,
            reads=reads,
        )
        self.add(call, [*made, *written])
        for each in written:
            storage = _storage(each)
            if storage is not None:
                self._written[id(storage)] = (storage, call)

    def _claim(self, node: Any, call: Call) -> None:
        """Note for which call autograd made a node, and those behind it that nobody has claimed."""
        pending = [node]
        while pending:
            each = pending.pop()
            if each is None or id(each) in self._nodes or leaf_of(each) is not None:
                continue
            self._nodes[id(each)] = (each, call)  # which keeps it, and so its number, alive
            call.recorded.append(each)
            pending.extend(behind for behind, _ in each.next_functions)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Note nodes that tensors have got since, as what a Function's `forward` returns does."""
        for tensor in tensors:
            source = self.source_of(tensor)
            if isinstance(source, Call):
                self._claim(tensor.grad_fn, source)

    def ignore(self, node: Any) -> None:
        """Take a node, and all behind it, for what was there before."""
        pending = [node]
        while pending:
            each = pending.pop()
            if each is not None and id(each) not in self._nodes:
                self._nodes[id(each)] = (each, None)
                pending.extend(behind for behind, _ in each.next_functions)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _name(function: Any) -> str:
    """What a function is called; of a property's getter, what the property is."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name in ("__get__", "__set__"):
        name = str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name


def _label(function: Any, name: str) -> str:
    """How a call is shown: an operator of torch.library with its namespace, Python's own names bare."""
    if hasattr(function, "overloads") or hasattr(function, "overloadpacket"):
        return str(function).removesuffix(".default").replace(".", "::", 1)
    return name.strip("_") if name.startswith("__") else name


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count that."""
    return None if tensor.is_inference() else capabilities.version(tensor)


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a stand-in of a transform
        return None
