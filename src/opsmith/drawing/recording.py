"""Recording of calls: every torch function and operator that runs in a region, grouped by module."""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from opsmith.core.location import shown_line, user_line_of_frame
from opsmith.core.operator import Operator
from opsmith.core.tensors import nested_tensors
from opsmith.declaration import declared_operators
from opsmith.drawing.builder import form_of
from opsmith.drawing.graph import Form, Group
from opsmith.drawing.node_attributes import arguments_of, leaf_of
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
"""Functions that return the values of a tensor to Python."""


@dataclass(eq=False)
class RecordedCall:
    """A recorded call.

    Args:
        label: The name of the function.
        operator: The operator of opsmith; None for any other function. group: The innermost open region.
            sources: The origin of each tensor argument, and the name of the argument.
        forms: Shape, dtype and device of its results.
        attributes: Its remaining arguments.
        where: `file:line` of the call.
        source: The text of that line.
        reads: True if it returns the values of a tensor to Python. recorded: The nodes that autograd created
            for it, the last node first.
        number: Its position among the calls.
    """

    label: str
    operator: Operator[..., Any] | None
    group: str | None
    sources: list[tuple[RecordedCall | Tensor, str]]
    forms: tuple[Form, ...]
    attributes: tuple[tuple[str, str], ...]
    where: str = ""
    source: str = ""
    reads: bool = False
    recorded: list[Any] = field(default_factory=list)
    number: int = 0


class Recording(TorchFunctionMode):
    """A region whose calls are recorded; the results are unchanged.

    Attributes:
        calls: The calls, in order.
        groups: The regions that were opened inside it, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.groups: list[Group] = []
        self._outside: dict[int, Tensor] = {}
        self._open: list[str] = []
        self._made: dict[int, tuple[weakref.ref[Tensor], RecordedCall]] = {}
        self._written: dict[int, tuple[Any, RecordedCall]] = {}
        self._nodes: dict[int, tuple[Any, RecordedCall | None]] = {}
        self._operators = {each.torch_operator: each for each in declared_operators()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and record the call if it computes something."""
        kwargs = kwargs or {}
        given = list(nested_tensors((args, kwargs)))
        before = [_version(each) for each in given]
        result = function(*args, **kwargs)
        name = _name(function)
        results = list(nested_tensors(result))
        written = [each for each, old in zip(given, before, strict=True) if _version(each) != old]
        if results or written or name in READS:
            self._record(function, args, kwargs, results, written)
        return result

    @property
    def outside(self) -> list[Tensor]:
        """Tensors that were not computed in this recording, in the order of their use."""
        return list(self._outside.values())

    def has_made(self, tensor: Tensor) -> bool:
        """Return True if a tensor is the result of a call of this recording."""
        made = self._made.get(id(tensor))
        return made is not None and made[0]() is tensor

    def open(self, group: Group) -> None:
        """Begin a region for the following calls."""
        self.groups.append(group)
        self._open.append(group.id)

    def close(self) -> None:
        """End the innermost region."""
        self._open.pop()

    @property
    def innermost(self) -> str | None:
        """The innermost open region."""
        return self._open[-1] if self._open else None

    def source_of(self, tensor: Tensor) -> RecordedCall | Tensor:
        """The call that computed or last modified a tensor; the tensor itself if there is none."""
        made, by = self._made.get(id(tensor), (None, None))
        found = by if made is not None and made() is tensor else None
        storage = _storage(tensor)
        written = self._written.get(id(storage)) if storage is not None else None
        since = written is not None and written[0] is storage
        # A later call may have written through a different view.
        if written is not None and since and (found is None or written[1].number > found.number):
            found = written[1]
        if found is not None:
            return found
        self._outside.setdefault(id(tensor), tensor)
        return tensor

    def call_of(self, node: Any) -> RecordedCall | None:
        """The call for which autograd created a node."""
        return self._nodes.get(id(node), (None, None))[1]

    def add(self, call: RecordedCall, results: list[Tensor]) -> None:
        """Record a call with these results."""
        call.number = len(self.calls)
        self.calls.append(call)
        for tensor in results:
            self._made[id(tensor)] = (weakref.ref(tensor), call)
            self.claim(tensor.grad_fn, call)

    def _record(
        self, function: Any, args: Any, kwargs: Any, results: list[Tensor], written: list[Tensor]
    ) -> None:
        name, operator = _name(function), self._operators.get(function)
        passed, attributes = arguments_of(function, operator, args, kwargs)
        given = {id(tensor) for _, tensor in passed}
        made = [each for each in results if id(each) not in given]  # not returned arguments
        reads = name in READS and not results
        if not made and not written and not reads:
            return
        if reads:
            attributes = (*attributes, ("hands to Python", "numbers, on which later calls may depend"))
        self.see(tensor for _, tensor in passed)
        frame = inspect.currentframe()
        where, line = shown_line(user_line_of_frame(frame))
        del frame  # a reference cycle would keep the tensors of this call
        call = RecordedCall(
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

    def claim(self, node: Any, call: RecordedCall | None) -> None:
        """Assign a node of autograd, and the unassigned ones behind it, to a call.

        None is for nodes that existed before the recording.
        """
        pending = [node]
        while pending:
            each = pending.pop()
            if each is None or id(each) in self._nodes or leaf_of(each) is not None:
                continue
            self._nodes[id(each)] = (each, call)  # keeping it alive keeps its id unique
            if call is not None:
                call.recorded.append(each)
            pending.extend(behind for behind, _ in each.next_functions)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Assign nodes that tensors got after their call, as for the results of a Function."""
        for tensor in tensors:
            source = self.source_of(tensor)
            if isinstance(source, RecordedCall):
                self.claim(tensor.grad_fn, source)


def _name(function: Any) -> str:
    """The name of a function; of the getter of a property, the name of the property."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name in ("__get__", "__set__"):
        name = str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name


def _label(function: Any, name: str) -> str:
    """The label of a call: with the namespace for torch.library, without underscores for Python's methods."""
    if hasattr(function, "overloads") or hasattr(function, "overloadpacket"):
        return str(function).removesuffix(".default").replace(".", "::", 1)
    return name.strip("_") if name.startswith("__") else name


def _version(tensor: Tensor) -> int | None:
    """The version counter of a tensor; None if torch has none."""
    return None if tensor.is_inference() else capabilities.version(tensor)


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a tensor of a transform
        return None


_WRAPPERS = ("_orig_mod", "module")
"""Attributes of `torch.compile` and of data-parallel wrappers, which are not part of a user's path."""


@contextmanager
def module_regions(recording: Recording, root: torch.nn.Module) -> Iterator[None]:
    """Context manager in which each call of a submodule opens a region of the recording."""
    paths = _paths(root)
    calls: Counter[str] = Counter()
    thread = threading.get_ident()

    def enter(module: torch.nn.Module, args: Any) -> None:
        path = paths.get(id(module))
        if path is None or threading.get_ident() != thread:
            return
        calls[path] += 1
        label = path if calls[path] == 1 else f"{path} #{calls[path]}"
        recording.open(
            Group(f"g{len(recording.groups)}", label, "module", type(module).__name__, recording.innermost)
        )

    def leave(module: torch.nn.Module, *given: Any) -> None:
        if id(module) in paths and threading.get_ident() == thread:
            # After an exception torch omits the keyword arguments, and there is no output.
            _claim_unseen(recording, module, given[:-1], given[-1])
            recording.close()

    # The hooks are global, because modules of TorchScript accept no hooks of their own.
    before, remove_after = register_module_forward_pre_hook(enter), capabilities.after_modules(leave)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield
    finally:
        before.remove()
        remove_after()


def _paths(root: torch.nn.Module) -> dict[int, str]:
    """The path of each submodule except wrappers."""
    found = {}
    for name, part in root.named_modules():
        wraps = any(child == "_orig_mod" for child, _ in part.named_children())
        if part is not root and not wraps and _user_path(name):
            found[id(part)] = _user_path(name)
    return found


def _user_path(name: str) -> str:
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(part for part in parts if part != "_orig_mod")


def _claim_unseen(recording: Recording, module: torch.nn.Module, given: Any, output: Any) -> None:
    """Record a module as one call if its computation could not be recorded, in TorchScript or C++."""
    passed = list(nested_tensors(given))
    known = {id(each) for each in passed}
    unseen = [
        each for each in nested_tensors(output) if id(each) not in known and not recording.has_made(each)
    ]
    owned = {id(each) for each in (*module.parameters(), *module.buffers())}
    unseen = [each for each in unseen if id(each) not in owned]
    if not unseen:
        return
    recording.add(
        RecordedCall(
            type(module).__name__,
            None,
            recording.innermost,
            [(recording.source_of(each), "") for each in passed],
            tuple(form_of(each) for each in unseen),
            (("inside", "not seen: it does not run in Python"),),
        ),
        unseen,
    )


@contextmanager
def preserved_state(module: torch.nn.Module | None) -> Iterator[None]:
    """Context manager that preserves a module's buffers and training mode, and the random state.

    The module has copies of its buffers inside the region: restoring their values in place would count as a
    write, and break a graph that saved them. Other attributes, such as a counter in Python, are not restored.
    """
    parts = list(module.modules()) if module is not None else []
    buffers = [(part, name, buffer) for part in parts for name, buffer in part.named_buffers(recurse=False)]
    copies: dict[int, Tensor] = {}
    training = [(part, part.training) for part in parts]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else list(range(torch.accelerator.device_count()))
    kind = "cuda" if accelerator is None else accelerator.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        try:
            for part, name, buffer in buffers:
                setattr(part, name, copies.setdefault(id(buffer), buffer.detach().clone()))
            yield
        finally:
            for part, name, buffer in buffers:
                setattr(part, name, buffer)
            for part, mode in training:
                part.training = mode
