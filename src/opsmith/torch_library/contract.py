"""The contract of an operator: the arguments that its functions may write, and the memory of their results.

Each result has its own memory, shared with no argument and no other result. Only declared arguments change.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.location import where
from opsmith.core.schema import Schema
from opsmith.core.shapes import LEADING, NO_SIZE, Dims
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.arguments import name_of, unsupported_kind
from opsmith.torch_library.dtensor.placements import replicating
from opsmith.torch_library.flattening import ResultFlattening
from opsmith.torch_library.symbolic_sizes import for_symbolic_sizes


class State(NamedTuple):
    """State of an argument tensor, which a call must not change.

    Args:
        version: The number of counted writes into it; None if torch does not count its writes.
        shape: Its shape; None if neither this nor the following fields are compared.
        strides: Its strides.
        offset: Its offset in the storage.
        storage: Its storage.
        size: The number of bytes of the storage.
    """

    version: int | None
    shape: torch.Size | None = None
    strides: tuple[int, ...] = ()
    offset: int | torch.SymInt = 0
    storage: torch.UntypedStorage | None = None
    size: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> State:
        """The state of a tensor now."""
        layers = capabilities.layers(tensor)
        version, tensor = capabilities.writes_of(layers), layers[-1]
        storage = capabilities.storage_of(tensor)
        # Comparing symbols would add conditions to a trace; a write gives a functional tensor new memory.
        if storage is None or storage.device.type == "meta" or capabilities.is_functional(tensor):
            return cls(version)
        form = tensor.shape, tensor.stride(), tensor.storage_offset(), storage, storage.nbytes()
        return cls(version, *form)

    def is_left(self, tensor: Tensor) -> bool:
        """Return True if nothing has written into a tensor since then."""
        now = State.of(tensor)
        return now.version in (self.version, None) and (self.shape is None or self[1:] == now[1:])

    def is_placed(self, tensor: Tensor) -> bool:
        """Return True if a tensor still has the same shape, strides and memory."""
        return self.shape is None or self[1:] == State.of(tensor)[1:]


class Before(NamedTuple):
    """States of the tensors among the arguments before a call.

    Args:
        read: States of the tensors that are only read.
        written: States of the tensors that are written.
        graph: True if an argument requires a gradient; None if this is not known.
    """

    read: Sequence[State]
    written: Sequence[State]
    graph: bool | None = None


class Alias(NamedTuple):
    """A result that shares memory.

    Args:
        result: Position of the result.
        argument: Position of the argument tensor with which it shares memory; None if there is none.
        other: Position of the first result with which it shares memory; None if there is none.
    """

    result: int
    argument: int | None
    other: int | None


def aliases(results: Sequence[Any], arguments: Sequence[Any]) -> list[Alias]:
    """List the results that share memory with an argument or another result; other values are ignored."""
    layers = [
        [layer for each in group if isinstance(each, Tensor) for layer in capabilities.layers(each)]
        for group in (results, arguments)
    ]
    if are_apart(*layers):
        return []
    found = []
    for position, result in enumerate(results):
        argument = next((at for at, value in enumerate(arguments) if _are_one(result, value)), None)
        other = next((at for at in range(position) if _are_one(result, results[at])), None)
        if argument is not None or other is not None:
            found.append(Alias(position, argument, other))
    return found


def _in_memory(values: Sequence[Any]) -> list[Any]:
    return [capabilities.in_memory(each) if isinstance(each, Tensor) else each for each in values]


def _requires_graph(tensors: Sequence[Tensor]) -> bool:
    """Return True if a tensor requires a gradient outside all transforms."""
    return any(capabilities.below_transforms(each).requires_grad for each in tensors)


def are_apart(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> bool:
    """Return True if no result shares memory with an argument or another result.

    Return False for wrapped tensors, whose memory is unknown.
    """
    made = [capabilities.storage_of(tensor) for tensor in results]
    given = [capabilities.storage_of(tensor) for tensor in arguments]
    own = {id(storage) for storage in made}
    if None in made or len(own) != len(made) or not own.isdisjoint(map(id, given)):
        return False
    # Two storages share memory only if it is not torch's memory: NumPy's, or a DLPack capsule's.
    if all(storage is None or storage.resizable() for storage in made):
        return True
    spans = [(capabilities.span(storage), True) for storage in made if storage is not None]
    spans += [(capabilities.span(storage), False) for storage in dict.fromkeys(given) if storage is not None]
    end = end_of_results = 0
    for (begin, next_end), is_result in sorted(spans):
        if begin < (end if is_result else end_of_results):
            return False
        end = max(end, next_end)
        end_of_results = max(end_of_results, next_end) if is_result else end_of_results
    return True


def _are_one(result: Any, value: Any) -> bool:
    """Return True if a result is an argument tensor, or shares its memory."""
    if not (isinstance(result, Tensor) and isinstance(value, Tensor)):
        return False
    pairs = itertools.product(capabilities.layers(result), capabilities.layers(value))
    return any(one is other or capabilities.shares_memory(one, other) for one, other in pairs)


def are_new(count: int, returned: Any, *arguments: Tensor | None) -> bool:
    """Return True, from C++, for dense results that share no memory.

    Args:
        count: The number of results.
        returned: The result, or a tuple of several.
        arguments: The argument tensors; None for a missing argument.
    """
    results = (returned,) if count == 1 else returned
    if type(results) is not tuple or len(results) != count:
        return False
    if not all(type(each) is Tensor and unsupported_kind(each) is None for each in results):
        return False
    return are_apart(results, [each for each in arguments if each is not None])


@dataclass
class Contract:
    """The contract of one operator.

    Args:
        specification: The operator.
    """

    specification: Specification

    def run(self, function: Callable[..., Any], values: list[Any]) -> tuple[Any, ...]:
        """Run a reference or kernel, validate its effects and results, and return the results as a tuple.

        Raises:
            MutationError, AliasError, ResultCountError, ResultTypeError: As their names say.
        """
        specification = self.specification
        # The forward of a class restores the arguments that it wrote into.
        restores = specification.origin.kind == "class" and function is specification.computed_by
        before = None if restores else self.before(values)
        # It may change the lists that it gets.
        given = [[*value] if type(value) is list else value for value in values]
        args, kwargs = specification.schema.split(given)
        with replicating(tensors_in(values)):
            returned = for_symbolic_sizes(function, values)(*args, **kwargs)
        return self.results(function, returned, values, before)

    def run_traced(self, function: Callable[..., Any], values: list[Any]) -> tuple[Any, ...]:
        """Run a reference on tensors without data, like `run`, and refuse a write before it happens.

        Such a tensor does not show a write, but the compiled code would write.

        Raises:
            MutationError, AliasError, ResultCountError, ResultTypeError: As their names say.
        """
        with self.refusing_writes(function, values):
            return self.run(function, values)

    def refusing_writes(self, function: Callable[..., Any], values: list[Any]) -> AbstractContextManager[Any]:
        """Context in which a write is refused before it happens, if torch does not count writes.

        Raises:
            MutationError: If something writes into an argument that must not be written.
        """
        inputs = [(each, capabilities.in_memory(each)) for each in self._only_read(values)]

        def see(tensor: Tensor) -> None:
            written = capabilities.in_memory(tensor)
            for each, memory in inputs:
                if capabilities.shares_memory(written, memory):
                    raise self.undeclared_write(function, each, values)

        return capabilities.observe_writes(see)

    def before(self, values: list[Any]) -> Before:
        """The states of the argument tensors, before a call."""
        read, written = self._only_read(values), self._written(values)
        return Before([*map(State.of, read)], [*map(State.of, written)], _requires_graph(tensors_in(values)))

    def is_kept(self, results: Any, memories: Sequence[Tensor], has_graph: bool) -> bool:
        """Return True if the results of a call that changed no tensor keep the contract.

        If the result is False, `results` decides.

        Args:
            results: All results.
            memories: The tensors that have the memory of the arguments.
            has_graph: True if a result may require a gradient.
        """
        if type(results) is not tuple or len(results) != len(self.specification.schema.results):
            return False
        held, storages = [], set()
        for each in memories:
            held.append(storage := each.untyped_storage())
            storages.add(id(storage))
        for result in results:
            if not isinstance(result, Tensor) or (result.requires_grad and not has_graph):
                return False
            if type(result) is not Tensor:
                result = capabilities.in_memory(result)
            if type(result) is not Tensor or result.layout is not torch.strided or result.is_nested:
                return False
            if result.is_quantized:
                return False
            storage = result.untyped_storage()
            if id(storage) in storages or not storage.resizable():
                return False
            storages.add(id(storage))
        return True

    def results(
        self,
        function: Callable[..., Any],
        returned: Any,
        values: list[Any],
        before: Before | None,
    ) -> tuple[Any, ...]:
        """Validate the effects and results of a reference or kernel, and return the results as a tuple.

        Args:
            function: The reference or kernel.
            returned: The returned value.
            values: Its argument values.
            before: The states that `before` returned; None to allow writes.

        Raises:
            MutationError, MetadataError, AliasError, CapturedTensorError: As their names say.
            ResultCountError, ResultTypeError, LayoutError: As their names say.
        """
        results = self.as_tuple(function, returned, values)
        if before is not None:
            self._refuse_writes(function, before, values)
            made = tensors_in([*results, *self._written(values)])
            if before.graph is False and _requires_graph(made):
                raise self.captured(function)
        self._refuse_aliases(function, results, values)
        return results

    def captured(self, function: Callable[..., Any]) -> errors.OpsmithError:
        """The error for a result that requires a gradient, although no argument does."""
        return self.specification.error(
            errors.CapturedTensorError,
            "it uses a tensor that requires a gradient but is not an argument",
            expected="a function that uses only its arguments",
            got="a result that requires a gradient, although no argument requires a gradient",
            where=where(function),
            hint="make this tensor an argument, or use its `.detach()`",
        )

    def undeclared_write(
        self, function: Callable[..., Any], tensor: Tensor, values: list[Any]
    ) -> errors.OpsmithError:
        """The error for a write into a tensor that the operator does not declare."""
        name = name_of(tensor, self.specification.schema, values)
        argument = name.partition("[")[0]
        return self.specification.error(
            errors.MutationError,
            "an operator must not write into an input that it does not declare as written",
            argument=name,
            where=where(function),
            hint=f'declare it, `mutates=("{argument}",)`; or work on a copy: '
            f"`{argument} = {argument}.clone()`",
        )

    def _written(self, values: list[Any]) -> list[Tensor]:
        pairs = zip(self.specification.schema.arguments, values, strict=True)
        return tensors_in([value for argument, value in pairs if argument.alias])

    def _only_read(self, values: list[Any]) -> list[Tensor]:
        """The tensors that a call does not write into, and that have their own version counters."""
        schema = self.specification.schema
        if not schema.written:
            return tensors_in(values)
        pairs = zip(schema.arguments, values, strict=True)
        others = tensors_in([value for argument, value in pairs if not argument.alias])
        # By storage: comparing all pairs of tensors would take milliseconds for the lists of an optimizer.
        storages = map(capabilities.storage_of, _in_memory(self._written(values)))
        taken = {id(storage): storage for storage in storages if storage is not None}
        memories = map(capabilities.storage_of, _in_memory(others))
        return [each for each, memory in zip(others, memories, strict=True) if id(memory) not in taken]

    def _refuse_writes(self, function: Callable[..., Any], before: Before, values: list[Any]) -> None:
        for tensor, state in zip(self._only_read(values), before.read, strict=True):
            if not state.is_left(tensor):
                raise self.undeclared_write(function, tensor, values)
        for tensor, state in zip(self._written(values), before.written, strict=True):
            if not state.is_placed(tensor):
                name = name_of(tensor, self.specification.schema, values)
                now = State.of(tensor)
                moved = (now.shape, now.strides) == (state.shape, state.strides)
                got = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
                error = self.specification.error(
                    errors.MetadataError,
                    f"it changed the shape, strides or memory of `{name}`",
                    argument=name,
                    expected="new numbers in the same memory",
                    got=f"{'other memory' if moved else got} after the call",
                    where=where(function),
                    hint=f"write `{name}.copy_(...)`; return a new tensor for a result of a different shape",
                )
                error.moved = moved
                raise error

    def as_tuple(self, function: Callable[..., Any], returned: Any, values: list[Any]) -> tuple[Any, ...]:
        """Validate the number and types of the results, and return them as a tuple.

        Raises:
            AliasError, ResultCountError, ResultTypeError, LayoutError: As their names say.
        """
        specification = self.specification
        schema = specification.schema
        if schema.returns is not None:
            self._refuse_other(function, returned, values[schema.names.index(schema.returns)])
            return ()
        results = (returned,) if schema.single else returned
        if not schema.results and returned is None:
            results = ()
        if not isinstance(results, tuple | list) or len(results) != len(schema.results):
            count = len(results) if isinstance(results, tuple | list) else 1
            change = ", or change the type hint" * self._annotated(function)
            raise specification.error(
                errors.ResultCountError,
                "the number of its results differs from the declared number",
                expected=f"a tuple of {len(schema.results)} tensors",
                got=f"{count}" if count != 1 else shown(returned),
                where=where(function),
                hint="return the results" if returned is None else f"return the declared results{change}",
            )
        if not schema.always_tensors:
            return self._validated_lists(function, results)
        for result, described in zip(results, schema.results, strict=True):
            self._check_tensor(function, result, described.name, described.annotation())
        return tuple(results)

    def _refuse_other(self, function: Callable[..., Any], returned: Any, written: Tensor) -> None:
        """Refuse a value that is neither the written argument nor a view of all of it."""
        name = self.specification.schema.returns
        if returned is written or (returned is None and function is not self.specification.reference):
            return  # a kernel need not return the written argument
        same = isinstance(returned, Tensor) and returned.shape == written.shape
        if not (same and capabilities.shares_memory(*_in_memory((returned, written)))):
            raise self.specification.error(
                errors.AliasError,
                f"it did not return `{name}`",
                argument=name,
                expected=f"`{name}` itself, as declared by `returns={name!r}`",
                got=shown(returned),
                where=where(function),
                hint=f"write `return {name}`",
            )

    def _validated_lists(self, function: Callable[..., Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Validate results some of which may be lists, or None."""
        for result, described in zip(results, self.specification.schema.results, strict=True):
            if described.sequence and not isinstance(result, list | tuple):
                raise self.specification.error(
                    errors.ResultTypeError,
                    f"`{described.name}` is not a list",
                    argument=described.name,
                    expected=described.annotation(),
                    got=shown(result),
                    where=where(function),
                    hint="return the result" if result is None else "return a list: `[result]` of one tensor",
                )
        result_flattening = ResultFlattening.of(self.specification.schema, results)
        for result, label, described in zip(
            result_flattening.flatten(results),
            result_flattening.labels,
            result_flattening.described,
            strict=True,
        ):
            if result is not None or not described.optional:
                expected = "Tensor | None" if described.optional else "Tensor"
                self._check_tensor(function, result, label, expected)
        return tuple(list(result) if isinstance(result, list | tuple) else result for result in results)

    def _check_tensor(self, function: Callable[..., Any], result: Any, label: str, expected: str) -> None:
        if not isinstance(result, Tensor):
            raise self.specification.error(
                errors.ResultTypeError,
                f"`{label}` is not a tensor",
                argument=label,
                expected=expected,
                got=shown(result),
                where=where(function),
                hint=self._tensor_hint(function, result, label),
            )
        foreign = unsupported_kind(result)
        if foreign is not None:
            raise self.specification.error(
                errors.LayoutError,
                f"`{label}` is not a strided dense tensor",
                argument=label,
                expected="torch.strided",
                got=foreign.name,
                where=where(function),
                hint=f"return `{foreign.hint.format('result')}`",
            )

    def _annotated(self, function: Callable[..., Any]) -> bool:
        """Return True for the reference, whose type hint its author may change."""
        return function is self.specification.reference and self.specification.origin.kind == "declared"

    def _tensor_hint(self, function: Callable[..., Any], result: Any, label: str) -> str:
        """The hint for a value that should be a tensor."""
        annotated, is_item = self._annotated(function), "[" in label
        if result is None:
            rest = "; annotate it as `Tensor | None` if it may be None" * annotated
            return (
                "put a tensor there, or leave it out of the list" if is_item else f"return the result{rest}"
            )
        if not (isinstance(result, list | tuple) and tensors_in([result])):
            return "convert it, for example with `torch.as_tensor(...)` or `torch.from_numpy(...)`"
        if annotated and self.specification.schema.single and not is_item:
            if isinstance(result, list):
                return "annotate `-> list[Tensor]`, or return one tensor"
            if len(result) > 1:
                return f"annotate `-> tuple[{', '.join(['Tensor'] * len(result))}]`, or return one tensor"
        return "return the tensor itself" if len(result) == 1 else "return one tensor"

    def _refuse_aliases(
        self, function: Callable[..., Any], results: tuple[Any, ...], values: list[Any]
    ) -> None:
        schema, arguments = self.specification.schema, tensors_in(values)
        names: Sequence[str] = [result.name for result in schema.results]
        if not schema.always_tensors:
            flattening = ResultFlattening.of(schema, results)
            results, names = tuple(flattening.flatten(results)), flattening.labels
        written = {result.name: result.written for result in schema.results if result.written}

        def called(label: str) -> str:
            """The name of a result, or of the argument of which it is the new value."""
            name, *item = label.partition("[")
            return written.get(name, name) + "".join(item)

        for found in aliases(results, arguments):
            if found.argument is None:
                assert found.other is not None
                first, second = (called(names[at]) for at in (found.result, found.other))
                same = results[found.result] is results[found.other]
                of_input = second != names[found.other] and first == names[found.result]
                what = "is" if same and of_input else "shares memory with"
                raise self.specification.error(
                    errors.AliasError,
                    f"`{first}` {what} {'its input ' if of_input else ''}`{second}`",
                    argument=second if of_input else first,
                    expected="a new tensor",
                    where=where(function),
                    hint=_results_hint(schema, second if of_input else None, same=same),
                )
            tensor = arguments[found.argument]
            name = name_of(tensor, schema, values)
            what = "is its input" if results[found.result] is tensor else "shares memory with its input"
            raise self.specification.error(
                errors.AliasError,
                f"`{names[found.result]}` {what} `{name}`",
                argument=name,
                expected="a new tensor",
                where=where(function),
                hint=_alias_hint(schema, name),
            )


def _results_hint(schema: Schema, written: str | None, *, same: bool) -> str:
    """Return the hint for two results that share memory; one may be the new value of an argument."""
    if written is None:
        return "return a copy of one of them: `.clone()`"
    if not same:
        return "return a copy: `.clone()`"
    if schema.new_values == (written,) and schema.names[0] == written and len(schema.results) == 2:
        declared = f'declare it, `returns="{written}"`, if callers get `{written}` itself'
        return f"{declared}; or return a copy: `.clone()`"
    return f"leave `{written}` out of the results, because callers have it; or return a copy: `.clone()`"


def _alias_hint(schema: Schema, name: str) -> str:
    """Return the hint for a function that returns an argument, perhaps the written argument."""
    if schema.written == (name,) and len(schema.results) == 1 and schema.names[0] == name:
        return f'declare it, `returns="{name}"`, if callers get `{name}` itself; or return a copy: `.clone()`'
    if name in schema.written:
        return f"leave `{name}` out of the results, because callers have it; or return a copy: `.clone()`"
    return "return a copy: `.clone()`"


def run_call(
    specification: Specification, function: Callable[..., Any], values: list[Any]
) -> tuple[Any, ...]:
    """Compute a call by a reference or kernel, and check its results and determinism.

    Every call passes here once, even an inlined, mapped or traced call, or runs the code of an adopted class.

    Raises:
        NondeterministicError, ShapeError, ResultTypeError: As their names say; also those of `Contract.run`.
    """
    refuse_nondeterminism(specification)
    results = Contract(specification).run(function, values)
    refuse_result_shapes(specification, values, results)
    return results


def refuse_nondeterminism(specification: Specification) -> None:
    """Refuse a call of an operator that is declared nondeterministic while torch must be deterministic.

    Raises:
        NondeterministicError: Under `torch.use_deterministic_algorithms(True)`; a warning with
            `warn_only=True`.
    """
    if specification.deterministic or not torch.are_deterministic_algorithms_enabled():
        return
    referenced = specification.origin.referenced
    instead = f", or compute with `{specification.variable}.reference`" if referenced else ""
    error = specification.error(
        errors.NondeterministicError,
        "it is declared with `deterministic=False`, and torch.use_deterministic_algorithms(True) is in force",
        hint=f"allow it, `torch.use_deterministic_algorithms(True, warn_only=True)`{instead}",
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise error
    warnings.warn(str(error), UserWarning, stacklevel=2)


def refuse_result_shapes(specification: Specification, values: list[Any], results: tuple[Any, ...]) -> None:
    """Refuse results, or their layouts, that differ from `shapes=` or the fake kernel derived from it.

    Raises:
        ShapeError: With the name of the result.
    """
    shapes = specification.shapes
    if shapes is None:
        return
    sizes, _ = shapes.bind(specification.schema, values)
    for name, dims, result in _declared_results(specification, results):
        if dims.leading and LEADING not in sizes:  # all tensors with leading dimensions are None
            continue
        wanted = dims.evaluate(sizes)
        same = len(wanted) == len(result.shape) and all(
            size is None or size == found for size, found in zip(wanted, result.shape, strict=False)
        )
        if not same:
            shown = ", ".join("_" if size is None or size is NO_SIZE else str(size) for size in wanted)
            raise specification.error(
                errors.ShapeError,
                f"the shape of `{name}` differs from `shapes=`",
                argument=name,
                expected=f"`{dims.text}`, that is [{shown}]",
                got=str(list(result.shape)),
                hint="correct `shapes=` or the function; write `_` for a size that cannot be inferred",
            )


def _declared_results(
    specification: Specification, results: tuple[Any, ...]
) -> Iterator[tuple[str, Dims, Tensor]]:
    """Name, dimensions and tensor of every present result; items of a list share their dimensions."""
    assert specification.shapes is not None
    flattening = ResultFlattening.of(specification.schema, results)
    dims = dict(zip(flattening.spans, specification.shapes.results, strict=False))
    for described, label, result in zip(
        flattening.described, flattening.labels, flattening.flatten(results), strict=True
    ):
        if result is not None and described.name in dims:
            yield label, dims[described.name], result
