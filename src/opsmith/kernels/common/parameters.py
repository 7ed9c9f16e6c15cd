"""Parameters of kernels in C++ and CUDA C++: compare with the schema, and choose by a call's values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.argument_types import NUMBERED
from opsmith.core.call_arguments import REORDERED, reordered, tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.results import Result
from opsmith.core.schema import Argument
from opsmith.core.specification import Specification
from opsmith.kernels.common.dtypes import CPP_TYPES, dtype_name
from opsmith.torch_library.result_layouts import (
    LAYOUTS,
    ResultLayout,
    has_layout,
    memory_format,
    result_layouts,
)

PARAMETER_TYPES = ("Tensor", "int", "float", "bool", "str", "Tensor[]", "int[]", "float[]", "bool[]")
"""Types of parameters in torch's schema language, in the order of `enum ParameterType` in both headers."""

_VIEWS = dict(zip(LAYOUTS, ("View", "Contiguous", "ChannelsLast"), strict=True))
_IN_CPP = {"int": "int64_t", "float": "double", "bool": "bool", "str": "std::string_view"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a kernel in C++ or CUDA C++.

    Attributes:
        type: One of `PARAMETER_TYPES`.
        optional: True if the parameter takes None.
        written: True if it is a view that the kernel writes, of a result or of an argument.
        dtype: dtype of a tensor; None for other types.
        dim: Number of dimensions of a tensor; None for any number of dimensions, and for other types.
        layout: One of `LAYOUTS`.
    """

    OPTIONAL: ClassVar[str] = "std::optional"

    type: str
    optional: bool = False
    written: bool = False
    dtype: torch.dtype | None = None
    dim: int | None = None
    layout: str = "any"

    def __str__(self) -> str:
        """Return the parameter's type in C++.

        Example:
            >>> str(Parameter("Tensor[]", dtype=torch.float32, dim=2))
            'List<View<const float32, 2>>'
        """
        item = self.type.removesuffix("[]")
        text = self._view() if item == "Tensor" else self.number(item)
        if self.type.endswith("[]"):
            text = f"List<{text}{self.capacity()}>"
        return f"{self.OPTIONAL}<{text}>" if self.optional else text

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """Return the parameter that these numbers describe, in the format of `Parameter` in both headers."""
        type, optional, written, dtype, dim, layout, *others = numbers
        return cls(
            PARAMETER_TYPES[type],
            bool(optional),
            bool(written),
            None if dtype < 0 else NUMBERED["ScalarType"][dtype],
            None if dim < 0 else dim,
            LAYOUTS[layout],
            *others,
        )

    def numbers(self) -> list[int]:
        """Return the fields as numbers: see `of_numbers`."""
        dtype = -1 if self.dtype is None else NUMBERED["ScalarType"].index(self.dtype)
        dim = -1 if self.dim is None else self.dim
        flags = int(self.optional), int(self.written)
        return [PARAMETER_TYPES.index(self.type), *flags, dtype, dim, LAYOUTS.index(self.layout)]

    def serves(self, wanted: Parameter) -> bool:
        """Return True if type, access and optionality match, regardless of dtype, dimensions and layout."""
        return (self.type, self.written, self.optional) == (wanted.type, wanted.written, wanted.optional)

    def holds(self, dtype: torch.dtype, dim: int) -> bool:
        """Return True if the parameter takes tensors of this dtype and number of dimensions."""
        return dtype == self.dtype and self.dim in (None, dim)

    def number(self, item: str) -> str:
        """Return the C++ type of an int, float, bool or str."""
        return _IN_CPP[item]

    def capacity(self) -> str:
        """Return the template argument for the capacity of a list."""
        return ""

    def _view(self) -> str:
        dtype = "T" if self.dtype is None else dtype_name(self.dtype)
        dim = "" if self.dim is None else f", {self.dim}"
        return f"{_VIEWS[self.layout]}<{'' if self.written else 'const '}{dtype}{dim}>"


def cpp_arguments(kernel: BuiltKernel[Any]) -> tuple[Parameter, ...]:
    """Return the parameter of a C++ kernel for each argument of its operator.

    Raises:
        KernelSignatureError: If a C++ kernel cannot take an argument, or cannot return a result.
    """
    check_results(kernel)
    arguments = []
    for argument in kernel.operator.specification.schema.arguments:
        kind = argument.kind
        type = kind.base.annotation
        unsupported_list = kind.sequence and (type == "str" or kind.item_optional or kind.optional)
        if type not in PARAMETER_TYPES or kind.encoded or unsupported_list:
            expected = "a tensor, int, float, bool, str or None, or a list of tensors, ints, floats or bools"
            raise unsupported_argument(kernel, argument, expected)
        arguments.append(Parameter(type + "[]" * kind.sequence, kind.optional, bool(argument.alias)))
    return tuple(arguments)


def unsupported_argument(
    kernel: BuiltKernel[Any], argument: Argument, expected: str
) -> errors.KernelSignatureError:
    """Return the error for an argument that no kernel in a language takes."""
    in_python, kind = _in_python(kernel), argument.kind
    listed = bool(kind.base.values) and not kind.sequence  # for example from an enum
    return kernel.error(
        errors.KernelSignatureError,
        f"a {kernel.language} kernel cannot take `{argument.name}`",
        argument=argument.name,
        expected=expected,
        got=kind.annotation(),
        hint=f"declare `{argument.name}` as an int, or {in_python}" if listed else in_python,
    )


def check_results(kernel: BuiltKernel[Any]) -> None:
    """Refuse results that kernels from source cannot return.

    Raises:
        KernelSignatureError: If a result may be None, or is a list.
    """
    for result in kernel.operator.specification.schema.results:
        if result.optional or result.sequence:
            raise kernel.error(
                errors.KernelSignatureError,
                f"a {kernel.language} kernel cannot return a list, or a result that may be None",
                argument=result.name,
                expected="results that are single tensors",
                got=result.annotation(),
                hint=_in_python(kernel),
            )


def check_parameters(
    kernel: BuiltKernel[Any],
    candidates: Sequence[Sequence[Parameter]],
    wanted: Sequence[Parameter],
    names: Sequence[str],
    declared: Sequence[str] = (),
    given: str = "the operator's arguments and results",
) -> None:
    """Check the parameters of each candidate against the operator's arguments and results.

    Args:
        kernel: The kernel.
        candidates: Parameters of each instance of the kernel.
        wanted: Parameters for the arguments and then the results.
        names: Names of arguments and results.
        declared: The parameters in the text, if they must have the order of `names`.
        given: Description of the right parameters, for messages.

    Raises:
        KernelSignatureError: If a candidate has different parameters, or the text has a different order.
    """
    if reordered([re.split(r"\W+", each)[-1] for each in declared], names):
        raise kernel.error(
            errors.KernelSignatureError,
            f"the {kernel.language} kernel {REORDERED}",
            expected=f"({', '.join(names)})",
            got=f"({', '.join(declared)})",
            hint="write the kernel's parameters in this order, or give them different names",
        )
    for candidate in candidates:
        pairs = [*zip(candidate, wanted, names, strict=False)]
        name, hint, shown = None, None, [*map(str, wanted)]
        if len(candidate) == len(wanted):
            shown = [
                _in_place_of(taken, right, template=kernel.source.over_dtype) for taken, right, _ in pairs
            ]
            misfits = (each for each in pairs if not each[0].serves(each[1]))
            taken, right, name = next(misfits, (None, None, None))
            if name is None or taken is None or right is None:
                continue
            hint = f"write `{shown[names.index(name)]} {name}`"
            if (taken.type, taken.optional, right.written) == (right.type, right.optional, False):
                hint += f": the kernel may only read `{name}`, because `mutates=` does not name it"
        expected = ", ".join(map(" ".join, zip(shown, names, strict=True)))
        raise kernel.error(
            errors.KernelSignatureError,
            f"the parameters of the {kernel.language} kernel are not {given}",
            argument=name,
            expected=f"({expected})",
            got=f"({', '.join(map(str, candidate))})",
            hint=hint
            or "give the kernel these parameters in this order; a view may be Contiguous or ChannelsLast, "
            "and may state its number of dimensions",
        )


def _in_place_of(taken: Parameter, right: Parameter, *, template: bool) -> str:
    """Return the type to write instead of a wrong type; a view keeps its layout and number of dimensions."""
    if taken.dtype is None or right.type not in ("Tensor", "Tensor[]"):
        return str(right)
    text = str(replace(right, dim=taken.dim, layout=taken.layout))
    return text if template else re.sub(r"\bT\b", CPP_TYPES[taken.dtype], text)


_NEVER = re.compile(
    r"(?:const )?(?:(?:un)?signed|short|char|u?int(?:8|16)_t|uint(?:32|64)_t|(?:std::)?size_t)\b|.*\*|"
    r"std::(?:vector|array|string)\b(?!_)|(?!const ).*[^&]&(?!&)"
)
_NEVER_IN_CPP = r"int|int32_t|float|long long"
"""Types of parameters that no kernel takes; types that only CUDA C++ takes, like the `T` of a template."""


def misdeclared(
    kernel: BuiltKernel[Any],
    error: errors.OpsmithError,
    declared: Sequence[str],
    wanted: Sequence[Parameter],
    names: Sequence[str],
) -> errors.OpsmithError:
    """Return the error of a compiler; if a parameter has a type that no kernel takes, the error names it.

    Args:
        kernel: The kernel.
        error: The error.
        declared: The parameters in the text.
        wanted: The right parameters.
        names: Names of arguments and results.
    """
    comparable = isinstance(error, errors.CompileError) and len(declared) == len(wanted)
    never_in_cpp = "|".join([_NEVER_IN_CPP, *re.findall(r"\b(?:class|typename)\s+(\w+)", kernel.source.text)])
    for text, right, name in zip(declared, wanted, names, strict=True) if comparable else ():
        in_cpp = kernel.language == "C++" and re.match(rf"(?:const )?(?:{never_in_cpp})\b(?! ?<)", text)
        if in_cpp or _NEVER.match(text):
            given = {"operator": error.operator, "got": error.got, "where": error.where, "argument": name}
            of = re.search(r"(\w+) ?[*>,]", text)  # element type of a pointer, a vector or a view
            layout = next((each for each, view in _VIEWS.items() if f"{view}<" in text), "contiguous")
            wanted_text = re.sub(r"\bT\b", of[1] if of else "T", str(replace(right, layout=layout)))
            hint = f"write `{wanted_text} {name}` in place of `{text}`"
            return errors.CompileError(error.problem, **given, hint=hint)
    return error


def check_written(
    kernel: BuiltKernel[Any], name: str, result: ResultLayout, view: Parameter, values: Sequence[Any]
) -> None:
    """Check the view of a result against the result of the reference.

    Args:
        kernel: The kernel.
        name: Name of the result.
        result: Layout of the reference's result.
        view: The view that the kernel writes.
        values: Values of the arguments.

    Raises:
        KernelSignatureError: If dtype or number of dimensions differ.
        KernelRefusedError: If the result has more elements than the kernel's indices can count.
    """
    if not view.holds(result.dtype, len(result.shape)):
        raise kernel.error(
            errors.KernelSignatureError,
            f"the result that the {kernel.language} kernel writes differs from the reference's result",
            argument=name,
            expected=f"{dtype_name(result.dtype)} of {len(result.shape)} "
            f"dimension{'s' * (len(result.shape) != 1)}",
            got=str(view),
            hint="change the view, or leave the dtype out of `dtypes=`",
        )

    refused = index_refusal(kernel, values, [(name, result.shape)])
    if refused is not None:
        raise kernel.error(errors.KernelRefusedError, f"the kernel cannot write this result: {refused}")


def index_refusal(
    kernel: BuiltKernel[Any], values: Sequence[Any], shapes: Sequence[tuple[str, Sequence[int]]] = ()
) -> str | None:
    """Return why a kernel takes no tensors of these shapes (by default, of the values); None if it does.

    An index of 32 bits can count 2**31 - 1 elements. If a tensor has more, a compiler searches such indices.
    """
    tensors = _named_tensors(kernel.operator.specification.schema.names, values)
    for name, shape in shapes or ((name, tensor.shape) for name, tensor in tensors):
        count = math.prod(shape)
        if type(count) is not int or count < 2**31:  # a compiler's symbol, or few elements
            continue
        try:
            found = [each for each in kernel.narrow_indices(values) if name in (each.tensors or (name,))]
        except errors.OpsmithError as error:
            unknown = f"no compiler can say if the kernel's indices have 32 bits: {error.problem}"
            return f"`{name}` has {count} elements, and {unknown}"
        if found:
            return f"`{name}` has {count} elements, and at {found[0].where} {found[0].reason}"
    return None


def choose_candidate(
    names: Sequence[str],
    values: Sequence[Any],
    candidates: Sequence[Sequence[Parameter]],
    *,
    copies_back: bool = False,
) -> int | str:
    """Return the index of the first candidate that takes these values, or the reason why none does.

    Args:
        names: Names of the arguments.
        values: Values of the arguments.
        candidates: Parameters of each instance: arguments, and then results.
        copies_back: True if a written argument may be copied into a different layout and back.
    """
    mismatches = []
    for number, parameters in enumerate(candidates):
        mismatch = _mismatch(names, values, parameters, copies_back)
        if mismatch is None:
            return number
        mismatches.append(mismatch)
    *_, found, _ = max(mismatches)  # from the instance that takes most of the arguments
    taken = " or ".join(dict.fromkeys(takes for *_, value, takes in mismatches if value == found))
    return f"{found}, but the kernel takes {taken}"


def _mismatch(
    names: Sequence[str], values: Sequence[Any], parameters: Sequence[Parameter], copies_back: bool
) -> tuple[int, bool, str, str] | None:
    """Return the first mismatch of a candidate: argument index, True if the dtype fits, found, accepted."""
    for index, (name, value, parameter) in enumerate(zip(names, values, parameters, strict=False)):
        for tensor in tensors_in([value]):
            if tensor.dtype != parameter.dtype:
                return index, False, f"`{name}` is {dtype_name(tensor.dtype)}", dtype_name(parameter.dtype)
            if parameter.dim is not None and tensor.dim() != parameter.dim:
                found = f"`{name}` has {tensor.dim()} dimension{'s' * (tensor.dim() != 1)}"
                return index, True, found, str(parameter.dim)
            if parameter.written and not (copies_back or has_layout(tensor, parameter.layout)):
                return index, True, *layout_refusal(name, parameter.layout)
    return None


def layout_refusal(name: str, layout: str) -> tuple[str, str]:
    """Return the found and the accepted layout of an argument that a kernel writes into."""
    return (
        f"`{name}`, which the kernel writes, is not {layout}",
        f'only {layout} memory without `copies="allowed"`',
    )


def copy_reason(name: str, layout: str, *, written: bool) -> str:
    """Return a line for the report about an argument that is copied into a layout."""
    return f"`{name}`, which is not {layout}" + ", and back" * written


def needs_copy(value: Any, parameter: Parameter) -> bool:
    """Return True if a kernel needs an argument in a different layout, or without its negative bit."""
    tensors = tensors_in([value])
    return any(tensor.is_neg() or not has_layout(tensor, parameter.layout) for tensor in tensors)


def copy_of(value: Any, parameter: Parameter) -> Any:
    """Copy a tensor, or each tensor of a list, into a parameter's layout, without the negative bit."""
    if not isinstance(value, Tensor):
        return [copy_of(item, parameter) for item in value]
    if parameter.layout == "any":
        return value.clone()
    return value.clone(memory_format=memory_format(parameter.layout, value.dim()))


def copied_tensors(
    specification: Specification, values: Sequence[Any], taken: Mapping[str, Parameter]
) -> tuple[str, ...]:
    """Return a line about each argument and result that is copied into a different layout.

    Args:
        specification: The operator.
        values: Argument values.
        taken: Parameter by the name of its argument or result.
    """
    copied: list[str] = []
    for name, value in zip(specification.schema.names, values, strict=False):
        tensors = tensors_in([value]) if name in taken else []
        if not all(has_layout(each, taken[name].layout) for each in tensors):
            copied.append(copy_reason(name, taken[name].layout, written=taken[name].written))
        elif any(each.is_neg() for each in tensors):
            copied.append(f"`{name}`, which has the negative bit")
    results = specification.schema.results
    layouts = [taken[result.name].layout for result in results]
    made = () if {*layouts} <= {"any"} else result_layouts(specification, values)
    return (*copied, *(copied_results(results, made, layouts) if made else ()))


def copied_results(
    results: Sequence[Result], made: Sequence[ResultLayout], layouts: Sequence[str]
) -> tuple[str, ...]:
    """Return a line about each result that the kernel writes in a layout other than the reference's.

    Args:
        results: The results.
        made: The layouts of the reference's results.
        layouts: The layouts in which the kernel writes the results.
    """
    return tuple(
        f"`{result.name}`, which the reference does not return as {layout}"
        for result, given, layout in zip(results, made, layouts, strict=True)
        if layout != "any" and given.allocate("meta", layout).stride() != given.stride
    )


def dtype_refusal(names: Sequence[str], values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> str | None:
    """Return why a template for these dtypes takes none of the values; None if a value has such a dtype."""
    found = {name: tensor.dtype for name, tensor in _named_tensors(names, values)}
    if not dtypes or not found or any(dtype in dtypes for dtype in found.values()):
        return None
    what = " and ".join(f"`{name}` is {dtype_name(dtype)}" for name, dtype in found.items())
    return f"{what}, but the kernel takes {' or '.join(map(dtype_name, dtypes))}"


def device_refusal(values: Sequence[Any]) -> str | None:
    """Return why a kernel for one GPU does not take these values; None if all tensors are on one device."""
    devices = {str(tensor.device) for tensor in tensors_in(list(values))}
    return None if len(devices) == 1 else f"its tensors are on {', '.join(sorted(devices)) or 'no device'}"


def _named_tensors(names: Sequence[str], values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in zip(names, values, strict=False):
        for tensor in tensors_in([value]):
            yield name, tensor


def _in_python(kernel: BuiltKernel[Any]) -> str:
    return f"give the kernel in Python: `@op.kernel({'cpu' if kernel.language == 'C++' else 'cuda'!r})`"
