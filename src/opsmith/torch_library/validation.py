"""The contract of an operator: arguments that it takes, and results that a reference or kernel may return."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import shown, tensors_in
from opsmith.core.location import where
from opsmith.core.schema import Schema
from opsmith.core.shapes import NO_SIZE, Dims
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.distributed import replicating
from opsmith.torch_library.flattening import ResultFlattening
from opsmith.torch_library.symbolic_sizes import for_symbolic_sizes


def run_validated(
    specification: Specification, function: Callable[..., Any], values: list[Any]
) -> tuple[Any, ...]:
    """Run a reference or kernel, validate its effects and results, and return the results as a tuple.

    Raises:
        MutationError, AliasError, ResultCountError, ResultTypeError: See their names.
    """
    # The forward of a class restores what it wrote.
    restores = specification.origin.kind == "class" and function is specification.computed_by
    before = (
        None if restores else [capabilities.version(tensor) for tensor in _only_read(specification, values)]
    )
    # It may change the lists that it gets.
    given = [[*value] if type(value) is list else value for value in values]
    args, kwargs = specification.schema.split(given)
    with replicating(tensors_in(values)):
        returned = for_symbolic_sizes(function, values)(*args, **kwargs)
    return validate_results(specification, function, returned, values, before)


def run_call(
    specification: Specification, function: Callable[..., Any], values: list[Any]
) -> tuple[Any, ...]:
    """Compute a call by a reference or kernel, with the checks of its results and of determinism.

    Every call passes here once, or an adopted class's own code: also one that is inlined, mapped or traced.

    Raises:
        NondeterministicError, ShapeError, ResultTypeError: See their names; and those of `run_validated`.
    """
    refuse_nondeterminism(specification)
    results = run_validated(specification, function, values)
    refuse_result_shapes(specification, values, results)
    return results


def run_traced(
    specification: Specification, function: Callable[..., Any], values: list[Any]
) -> tuple[Any, ...]:
    """Run a reference on tensors without data, as `run_validated`, and refuse a write before it happens.

    Version counters of such tensors do not count, and compiled code would write.

    Raises:
        MutationError, AliasError, ResultCountError, ResultTypeError: See their names.
    """
    inputs = _only_read(specification, values)

    def see(tensor: Tensor) -> None:
        for each in inputs:
            if capabilities.shares_memory(tensor, each):
                raise undeclared_write(specification, function, each, values)

    with capabilities.observe_writes(see):
        return run_validated(specification, function, values)


def refuse_nondeterminism(specification: Specification) -> None:
    """Refuse a call of an operator that is declared nondeterministic where torch must be deterministic.

    Raises:
        NondeterministicError: Under `torch.use_deterministic_algorithms(True)`; `warn_only=True` makes it a
            warning.
    """
    if specification.deterministic or not torch.are_deterministic_algorithms_enabled():
        return
    other = f", or compute with `{specification.short_name}.reference`"
    instead = other if specification.origin.referenced else ""
    error = specification.error(
        errors.NondeterministicError,
        "it is declared with `deterministic=False`, and torch.use_deterministic_algorithms(True) is in force",
        hint=f"allow it, `torch.use_deterministic_algorithms(True, warn_only=True)`{instead}",
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise error
    warnings.warn(str(error), UserWarning, stacklevel=2)


def validate_results(
    specification: Specification,
    function: Callable[..., Any],
    returned: Any,
    values: list[Any],
    before: Sequence[int | None] | None,
) -> tuple[Any, ...]:
    """Validate what a reference or kernel returned, and return it as a tuple.

    Args:
        specification: The operator.
        function: The reference or kernel.
        returned: Value that it returned.
        values: Its argument values.
        before: Version counters of the tensors among them before the call; None to allow writes.
    """
    results = _as_tuple(specification, function, returned, values)
    if before is not None:
        _check_not_written(specification, function, before, _only_read(specification, values), values)
    _check_not_aliased(specification, function, results, tensors_in(values), values)
    return results


def _only_read(specification: Specification, values: list[Any]) -> list[Tensor]:
    """The tensors that a call does not write into, and whose version counters are their own."""
    schema = specification.schema
    if not schema.written:
        return tensors_in(values)
    pairs = list(zip(schema.arguments, values, strict=True))
    written = tensors_in([value for argument, value in pairs if argument.alias])
    others = tensors_in([value for argument, value in pairs if not argument.alias])
    # By storage: each tensor with each other would take milliseconds for the lists of an optimizer.
    storages = [capabilities.storage_of(tensor) for tensor in written]
    taken = {id(storage) for storage in storages if storage is not None}
    return [tensor for tensor in others if id(capabilities.storage_of(tensor)) not in taken]


def _check_not_written(
    specification: Specification,
    function: Callable[..., Any],
    before: Sequence[int | None],
    inputs: list[Tensor],
    values: list[Any],
) -> None:
    for tensor, count in zip(inputs, before, strict=True):
        if count is not None and capabilities.version(tensor) != count:
            raise undeclared_write(specification, function, tensor, values)


def undeclared_write(
    specification: Specification, function: Callable[..., Any], tensor: Tensor, values: list[Any]
) -> errors.OpsmithError:
    """The error for a write into a tensor that the operator does not declare."""
    name = _name_of(tensor, specification.schema, values)
    argument = name.partition("[")[0]
    return specification.error(
        errors.MutationError,
        "an operator must not write into an input that it does not declare",
        argument=name,
        where=where(function),
        hint=f'declare it, `mutates=("{argument}",)`; or work on a copy: `{argument} = {argument}.clone()`',
    )


def _as_tuple(
    specification: Specification, function: Callable[..., Any], returned: Any, values: list[Any]
) -> tuple[Any, ...]:
    schema = specification.schema
    if schema.returns is not None:
        _refuse_other(specification, function, returned, values[schema.names.index(schema.returns)])
        return ()
    results = (returned,) if schema.single else returned
    if not schema.results and returned is None:
        results = ()
    if not isinstance(results, tuple | list) or len(results) != len(schema.results):
        count = len(results) if isinstance(results, tuple | list) else 1
        raise specification.error(
            errors.ResultCountError,
            "it returned another number of results than declared",
            expected=f"a tuple of {len(schema.results)} tensors",
            got=f"{count}" if count != 1 else shown(returned),
            where=where(function),
            hint="return what the type hint says, or change the type hint",
        )
    if not schema.always_tensors:
        return _validated_lists(specification, function, results)
    for result, described in zip(results, schema.results, strict=True):
        _check_tensor(specification, function, result, described.name, described.annotation())
    return tuple(results)


def _refuse_other(
    specification: Specification, function: Callable[..., Any], returned: Any, written: Tensor
) -> None:
    """Refuse another value than the argument that was written, or a view of all of it."""
    name = specification.schema.returns
    if returned is written or (returned is None and function is not specification.reference):
        return  # a kernel need not return what it wrote
    same = isinstance(returned, Tensor) and returned.shape == written.shape
    if not (same and capabilities.shares_memory(returned, written)):
        raise specification.error(
            errors.AliasError,
            f"it did not return `{name}`",
            argument=name,
            expected=f"`{name}` itself, as `returns={name!r}` says",
            got=shown(returned),
            where=where(function),
            hint=f"write `return {name}`",
        )


def _validated_lists(
    specification: Specification, function: Callable[..., Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Validate results some of which may be lists, or None."""
    for result, described in zip(results, specification.schema.results, strict=True):
        if described.sequence and not isinstance(result, list | tuple):
            raise specification.error(
                errors.ResultTypeError,
                f"`{described.name}` is not a list",
                argument=described.name,
                expected=described.annotation(),
                got=shown(result),
                where=where(function),
                hint="return a list of tensors, `[result]` for a single one",
            )
    result_flattening = ResultFlattening.of(specification.schema, results)
    for result, label, described in zip(
        result_flattening.flatten(results), result_flattening.labels, result_flattening.described, strict=True
    ):
        if result is not None or not described.optional:
            expected = "Tensor | None" if described.optional else "Tensor"
            _check_tensor(specification, function, result, label, expected)
    return tuple(list(result) if isinstance(result, list | tuple) else result for result in results)


def _check_tensor(
    specification: Specification, function: Callable[..., Any], result: Any, label: str, expected: str
) -> None:
    if not isinstance(result, Tensor):
        raise specification.error(
            errors.ResultTypeError,
            f"`{label}` is not a tensor",
            argument=label,
            expected=expected,
            got=shown(result),
            where=where(function),
            hint="annotate it as `Tensor | None`"
            if result is None
            else "convert it, for example with `torch.as_tensor(...)` or `torch.from_numpy(...)`",
        )
    foreign = unsupported_kind(result)
    if foreign is not None:
        raise specification.error(
            errors.LayoutError,
            f"`{label}` is not a strided dense tensor",
            argument=label,
            expected="torch.strided",
            got=foreign.name,
            where=where(function),
            hint=f"return `{foreign.hint.format('result')}`",
        )


def _check_not_aliased(
    specification: Specification,
    function: Callable[..., Any],
    results: tuple[Any, ...],
    inputs: list[Tensor],
    values: list[Any],
) -> None:
    names: Sequence[str] = [result.name for result in specification.schema.results]
    if not specification.schema.always_tensors:
        flattening = ResultFlattening.of(specification.schema, results)
        pairs = zip(flattening.flatten(results), flattening.labels, strict=True)
        present = [(result, label) for result, label in pairs if result is not None]
        results, names = tuple(result for result, _ in present), [label for _, label in present]
    if _apart(results, inputs):
        return
    for position, result in enumerate(results):
        for tensor in inputs:
            if result is tensor or capabilities.shares_memory(result, tensor):
                name = _name_of(tensor, specification.schema, values)
                what = "is its input" if result is tensor else "shares memory with its input"
                raise specification.error(
                    errors.AliasError,
                    f"`{names[position]}` {what} `{name}`",
                    argument=name,
                    expected="a new tensor",
                    where=where(function),
                    hint="return a copy: `.clone()`",
                )
        for other in range(position):
            if capabilities.shares_memory(result, results[other]):
                raise specification.error(
                    errors.AliasError,
                    f"`{names[position]}` shares memory with `{names[other]}`",
                    argument=names[position],
                    expected="a new tensor",
                    where=where(function),
                    hint="return a copy of one of them: `.clone()`",
                )


def _apart(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return True if each result has a storage of its own; False for wrapped tensors, which have none."""
    made = [capabilities.storage_of(tensor) for tensor in results]
    given = [capabilities.storage_of(tensor) for tensor in inputs]
    own = {id(storage) for storage in made}
    return not any(each is None for each in made) and len(own) == len(made) and own.isdisjoint(map(id, given))


def _name_of(tensor: Tensor, schema: Schema, values: Sequence[Any]) -> str:
    for name, value in zip(schema.names, values, strict=True):
        if value is tensor:
            return name
        if isinstance(value, list | tuple):
            for position, item in enumerate(value):
                if item is tensor:
                    return f"{name}[{position}]"
    return "an input"


@dataclass(frozen=True)
class UnsupportedKind:
    """A kind of tensor that operators do not take, and the conversion to one that they do."""

    name: str
    hint: str


def unsupported_kind(tensor: Tensor) -> UnsupportedKind | None:
    """Unsupported kind of a tensor: nested, quantised, sparse or mkldnn; None for a strided dense one."""
    if tensor.is_nested:
        return UnsupportedKind("a nested tensor", "torch.nested.to_padded_tensor({}, 0.0)")
    if tensor.is_quantized:
        return UnsupportedKind("a quantised tensor", "{}.dequantize()")
    if tensor.layout is not torch.strided:
        return UnsupportedKind(str(tensor.layout), "{}.to_dense()")
    return None


def refuse_unsupported(specification: Specification, values: list[Any]) -> None:
    """Refuse sparse, nested, quantised and mkldnn inputs by name.

    Raises:
        LayoutError: Naming the argument.
    """
    for tensor in tensors_in(values):
        foreign = unsupported_kind(tensor)
        if foreign is not None:
            name = _name_of(tensor, specification.schema, values)
            raise specification.error(
                errors.LayoutError,
                "it takes strided dense tensors only",
                argument=name,
                expected="torch.strided",
                got=foreign.name,
                hint=f"call it with `{foreign.hint.format(name)}`",
            )


def refuse_shapes(specification: Specification, values: list[Any]) -> None:
    """Refuse tensors whose shapes are not those that the operator was declared with.

    Raises:
        ShapeError: Naming the argument.
    """
    if specification.shapes is None:
        return
    _, fault = specification.shapes.bind(specification.schema, values)
    if fault is not None:
        argument, expected, got = fault
        raise specification.error(
            errors.ShapeError,
            f"`{argument}` has the wrong shape",
            argument=argument,
            expected=expected,
            got=got,
            hint=f"call it with `{specification.shapes.shown(specification.schema)}`",
        )


def fake_by_shapes(specification: Specification, values: list[Any]) -> tuple[Tensor, ...] | None:
    """Compute empty results of the declared shapes, in the dtype that the tensors promote to.

    Return None where the shapes do not determine every size.
    """
    shapes, tensors = specification.shapes, tensors_in(values)
    if shapes is None or len(shapes.results) < len(specification.schema.results) or not tensors:
        return None
    if not specification.schema.always_tensors:
        return None
    sizes, _ = shapes.bind(specification.schema, values)
    found = [dims.evaluate(sizes) for dims in shapes.results]
    for described, shape, dims in zip(specification.schema.results, found, shapes.results, strict=True):
        if any(size is NO_SIZE for size in shape):
            raise specification.error(
                errors.ShapeError,
                f"`{described.name}` would have a negative size, or one that divides by zero",
                argument=described.name,
                expected=f"`{dims.text}`",
                got=", ".join(str(list(tensor.shape)) for tensor in tensors),
                hint=f"call it with `{shapes.shown(specification.schema)}`",
            )
    if any(size is None for shape in found for size in shape):
        return None
    dtype = _promoted_dtype(tensors)
    return tuple(tensors[0].new_empty(shape, dtype=dtype) for shape in found)


def _promoted_dtype(tensors: list[Tensor]) -> torch.dtype:
    """The dtype that tensors promote to; those without dimensions yield to others."""
    examples = [torch.empty((1,) * each.dim(), dtype=each.dtype, device="meta") for each in tensors]
    widest = examples[0]
    for example in examples[1:]:
        dtype = torch.result_type(widest, example)
        widest = torch.empty((1,) * max(widest.dim(), example.dim()), dtype=dtype, device="meta")
    return widest.dtype


def refuse_result_shapes(specification: Specification, values: list[Any], results: tuple[Any, ...]) -> None:
    """Refuse results that differ from `shapes=`, or from the fake kernel derived from it.

    Raises:
        ShapeError: Naming the result.
        ResultTypeError: If an opaque operator's result is of another dtype than its fake kernel's.
    """
    shapes = specification.shapes
    if shapes is None:
        return
    sizes, _ = shapes.bind(specification.schema, values)
    for name, dims, result in _declared_results(specification, results):
        wanted = dims.evaluate(sizes)
        same = len(wanted) == result.dim() and all(
            size is None or size == found for size, found in zip(wanted, result.shape, strict=False)
        )
        if not same:
            shown = ", ".join("_" if size is None or size is NO_SIZE else str(size) for size in wanted)
            raise specification.error(
                errors.ShapeError,
                f"the shape of `{name}` is not the one in `shapes=`",
                argument=name,
                expected=f"`{dims.text}`, that is [{shown}]",
                got=str(list(result.shape)),
                hint="write what the function returns: `_` stands for a size that cannot be inferred",
            )
    if specification.opaque and specification.fake is None:
        _refuse_dtypes(specification, values, results)


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


def _refuse_dtypes(specification: Specification, values: list[Any], results: tuple[Any, ...]) -> None:
    for described, fake, result in zip(
        specification.schema.results, fake_by_shapes(specification, values) or (), results, strict=False
    ):
        if fake.dtype != result.dtype:
            raise specification.error(
                errors.ResultTypeError,
                f"the dtype of `{described.name}` is not that of the fake kernel derived from `shapes=`",
                argument=described.name,
                expected=f"{fake.dtype}, to which its tensors promote",
                got=str(result.dtype),
                hint="write `@op.fake` over a function that returns empty tensors of the right dtype",
            )
