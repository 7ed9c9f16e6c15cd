"""Parameters of a CUDA kernel: read from its PTX, checked, and packed for a launch."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import tensors_in
from opsmith.core.kernels import BuiltKernel
from opsmith.core.schema import Argument
from opsmith.kernels.common.parameters import (
    Parameter,
    check_parameters,
    check_results,
    choose_candidate,
    unsupported_argument,
)
from opsmith.kernels.cuda.rules import MAX_DIM

TABLE = "opsmith_table_"
"""Name of the tables in the generated file, without their numbers."""

FIELDS = 10
"""Count of numbers for one parameter in a table."""
VERSION = 1
"""Version of the tables and of the memory layout of parameters; a test compares it with the header's."""
_BYTES = {"Tensor": 0, "int": 8, "float": 8, "bool": 1}
"""Types of arguments that a kernel takes, each with the bytes of a number."""
_FORMATS = {"int": {4: "i", 8: "q"}, "float": {4: "f", 8: "d"}, "bool": {1: "?"}}


@dataclass(frozen=True, slots=True)
class CudaParameter(Parameter):
    """Parameter of a CUDA kernel.

    Attributes:
        capacity_items: Capacity of a list.
        item: Bytes of a number.
        size: Bytes of the parameter.
        alignment: Alignment of the parameter.
    """

    OPTIONAL: ClassVar[str] = "Optional"

    capacity_items: int = 0
    item: int = 0
    size: int = 0
    alignment: int = 1

    @property
    def max_dim(self) -> int:
        """Maximum number of dimensions of a tensor."""
        return MAX_DIM if self.dim is None else self.dim

    @property
    def view_size(self) -> int:
        """Bytes of one view: its pointer, number of elements, number of dimensions, sizes and strides."""
        return 24 + 16 * max(self.max_dim, 1)

    @property
    def item_format(self) -> str:
        """Format of a number for `struct`."""
        return _FORMATS[self.type.removesuffix("[]")][self.item]

    def holds(self, dtype: torch.dtype, dim: int) -> bool:
        """Return True if the parameter takes tensors of this dtype and number of dimensions."""
        return Parameter.holds(self, dtype, dim) and dim <= self.max_dim

    def numbers(self) -> list[int]:
        """Return the fields as numbers."""
        return [*Parameter.numbers(self), self.capacity_items, self.item, self.size, self.alignment]

    def number(self, item: str) -> str:
        """Return the C++ type of a number; for 4 bytes it is `int` or `float`."""
        return item if self.item == 4 else Parameter.number(self, item)

    def capacity(self) -> str:
        """Return the template argument for the capacity of a list."""
        return f", {self.capacity_items}" if self.capacity_items else ""


def read_parameters(ptx: str, count: int) -> tuple[tuple[CudaParameter, ...], ...]:
    """Read the parameters of each instance, which the compiler left in the PTX as numbers.

    Args:
        ptx: PTX of the file that describes a kernel's instances.
        count: Number of instances.
    """
    found = {
        int(match["number"]): _numbers(int(match["size"]), match["bytes"])
        for match in re.finditer(
            rf"\.b8 {TABLE}(?P<number>\d+)\[(?P<size>\d+)\] = \{{(?P<bytes>[\d, \n]*)\}}", ptx
        )
    }
    return tuple(decode_table(found[number]) for number in range(count))


def _numbers(size: int, listed: str) -> tuple[int, ...]:
    values = bytes(int(each) for each in listed.split(",") if each.strip())
    return struct.unpack(f"<{size // 4}i", values.ljust(size, b"\0"))  # trailing zeros are left out


def decode_table(table: Sequence[int]) -> tuple[CudaParameter, ...]:
    """Return the parameters in a table of `opsmith::Table`: their number, and the fields of each."""
    first = range(1, 1 + table[0] * FIELDS, FIELDS)
    return tuple(CudaParameter.of_numbers(table[at : at + FIELDS]) for at in first)


def check_cuda_parameters(
    kernel: BuiltKernel[Any], parameters: Sequence[CudaParameter], passed: Sequence[str], call: str | None
) -> None:
    """Compare the parameters of an instance with the arguments, results and scratch buffers that it gets.

    Args:
        kernel: The kernel.
        parameters: Parameters of the instance.
        passed: Names of the arguments, results and scratch buffers, in order.
        call: The launch, if there are several; it may declare tensors read-only that it could write.

    Raises:
        KernelSignatureError: If they differ, or CUDA kernels do not support an argument or result.
    """
    check_results(kernel)
    schema = kernel.operator.specification.schema
    wanted = wanted_parameters(kernel, passed)
    if call is not None:
        wanted = [
            replace(each, written=each.written and (parameters[at].written if at < len(parameters) else True))
            for at, each in enumerate(wanted)
        ]
    results = {each.name for each in schema.results}
    has_scratch = not {*passed} <= {*schema.names, *results}
    given = "the operator's arguments and results" + " and the scratch buffers" * has_scratch
    given = given if call is None else f"the tensors and numbers in the launch `{call}`"
    declared = kernel.source.declared_parameters() if call is None else ()  # a launch names its values itself
    check_parameters(kernel, [parameters], wanted, passed, declared, given)


def wanted_parameters(kernel: BuiltKernel[Any], passed: Sequence[str]) -> list[CudaParameter]:
    """Return the parameters that a launch needs for its arguments, results and scratch buffers."""
    schema = kernel.operator.specification.schema
    arguments = {each.name: _wanted(kernel, each) for each in schema.arguments if each.name in passed}
    return [arguments.get(name, CudaParameter("Tensor", written=True)) for name in passed]


def merged_parameters(
    kernel: BuiltKernel[Any], launches: Iterable[tuple[Sequence[str], Sequence[CudaParameter]]]
) -> dict[str, CudaParameter]:
    """Return for each name a parameter that takes only tensors which every launch takes.

    Args:
        kernel: The kernel.
        launches: For each launch, the names that are passed and its parameters.

    Raises:
        KernelSignatureError: If two launches have contradictory parameters for one tensor.
    """
    found: dict[str, CudaParameter] = {}
    for passed, parameters in launches:
        for name, parameter in zip(passed, parameters, strict=True):
            if name in found:
                found[name] = _merged(kernel, name, found[name], parameter)
            else:
                found[name] = parameter
    return found


def _merged(kernel: BuiltKernel[Any], name: str, one: CudaParameter, other: CudaParameter) -> CudaParameter:
    layouts = {one.layout, other.layout} - {"any"}
    dims = {one.dim, other.dim} - {None}
    if one.dtype != other.dtype or len(layouts) > 1 or len(dims) > 1:
        raise kernel.error(
            errors.KernelSignatureError,
            f"two launches of the CUDA kernel have contradictory views of `{name}`",
            argument=name,
            expected=f"`{one}` in both launches, or `View<...>` in one of them",
            got=f"`{one}` and `{other}`",
            hint="give both kernels the same dtype, number of dimensions and layout",
        )
    return replace(
        one,
        written=one.written or other.written,
        dim=next(iter(dims), None),
        layout=next(iter(layouts), "any"),
        capacity_items=min(one.capacity_items, other.capacity_items),
        item=min(one.item, other.item),
    )


def _wanted(kernel: BuiltKernel[Any], argument: Argument) -> CudaParameter:
    kind = argument.kind
    type = kind.base.annotation
    if type not in _BYTES or kind.encoded or (kind.sequence and (kind.item_optional or kind.optional)):
        expected = "a tensor, int, float, bool or None, or a list of tensors, ints, floats or bools"
        raise unsupported_argument(kernel, argument, expected)
    return CudaParameter(type + "[]" * kind.sequence, kind.optional, bool(argument.alias), item=_BYTES[type])


def choose_cuda_candidate(
    names: Sequence[str],
    values: Sequence[Any],
    candidates: Sequence[Sequence[CudaParameter]],
    *,
    copies_back: bool = False,
) -> int | str:
    """Return the index of the first candidate that takes these values, or the reason why none does.

    Args:
        names: Names of the passed arguments.
        values: Values of the passed arguments.
        candidates: Parameters of each instance: arguments, and then results.
        copies_back: True if a written argument may be copied into a different layout and back.
    """
    choice = choose_candidate(names, values, candidates, copies_back=copies_back)
    if isinstance(choice, str):
        return choice
    refusals = map(_capacity_refusal, names, values, candidates[choice])
    return next((refusal for refusal in refusals if refusal is not None), choice)


def _capacity_refusal(name: str, value: Any, parameter: CudaParameter) -> str | None:
    """Return why a value exceeds the capacity of a parameter; None if it does not."""
    for tensor in tensors_in([value]):
        if tensor.dim() > parameter.max_dim:
            return f"`{name}` has {tensor.dim()} dimensions, and a view has room for {MAX_DIM}"
    items = value if isinstance(value, list | tuple) else [value]
    if items is value and len(items) > parameter.capacity_items:
        return f"`{name}` has {len(items)} items, and `{parameter}` has room for {parameter.capacity_items}"
    if parameter.type in ("int", "int[]") and value is not None:
        bits = parameter.item * 8 - 1
        beyond = [each for each in items if not -(2**bits) <= each < 2**bits]
        if beyond:
            return f"`{name}` is {beyond[0]}, but the kernel takes an int of {bits + 1} bits"
    return None


@dataclass(frozen=True, slots=True)
class PackedParameters:
    """Parameters of a launch in their memory layout, without the addresses of tensors.

    Attributes:
        image: Bytes of all parameters.
        offsets: Offset of each parameter.
        addresses: Offset of each tensor's address, in order.
    """

    image: bytes
    offsets: tuple[int, ...]
    addresses: tuple[int, ...]

    def with_addresses(self, addresses: Sequence[int]) -> bytearray:
        """Return the bytes with the addresses of tensors filled in.

        Args:
            addresses: Address of each tensor, in order.
        """
        filled = bytearray(self.image)
        for offset, address in zip(self.addresses, addresses, strict=True):
            struct.pack_into("<Q", filled, offset, address)
        return filled


def pack_parameters(parameters: Sequence[CudaParameter], values: Sequence[Any]) -> PackedParameters:
    """Pack the values of a launch into the structures of opsmith_cuda.h.

    Args:
        parameters: The kernel's parameters.
        values: Arguments and results; tensors without data, in the layouts that the kernel takes.

    Example:
        >>> packed = pack_parameters([CudaParameter("int", item=4, size=4, alignment=4)], [7])
        >>> packed.image[:4], packed.offsets
        (b'\\x07\\x00\\x00\\x00', (0,))
    """
    image, offsets, addresses = bytearray(), [], []
    for parameter, value in zip(parameters, values, strict=True):
        image.extend(bytes(-len(image) % parameter.alignment))
        offsets.append(len(image))
        packed, inside = _pack_optional(parameter, value)
        assert len(packed) == parameter.size, (str(parameter), len(packed), parameter.size)
        addresses += [len(image) + offset for offset in inside]
        image += packed
    image.extend(bytes(8))  # so that it is not empty and has an address
    return PackedParameters(bytes(image), tuple(offsets), tuple(addresses))


def number_places(parameter: CudaParameter, offset: int, value: Any) -> Iterator[tuple[int, int]]:
    """Yield the offset of each floating-point number of a value, and its index in a list (without one, -1).

    Args:
        parameter: The parameter.
        offset: Offset of the parameter.
        value: Value of the parameter.

    Example:
        >>> [*number_places(CudaParameter("float[]", capacity_items=3, item=4, size=24), 16, [0.5, 1.0])]
        [(24, 0), (28, 1)]
    """
    if parameter.type == "float" and value is not None:
        yield offset + (parameter.size - parameter.item) * parameter.optional, -1
    elif parameter.type == "float[]":
        yield from ((offset + 8 + at * parameter.item, at) for at in range(len(value)))


def _pack_optional(parameter: CudaParameter, value: Any) -> tuple[bytes, list[int]]:
    """Pack a parameter, and return also the offsets of addresses in it."""
    if not parameter.optional:
        return _pack(parameter, value)
    if value is None:
        return bytes(parameter.size), []
    packed, addresses = _pack(parameter, value)
    before = parameter.size - len(packed)  # the flag `given`, and padding
    return b"\x01".ljust(before, b"\0") + packed, [before + each for each in addresses]


def _pack(parameter: CudaParameter, value: Any) -> tuple[bytes, list[int]]:
    if parameter.type == "Tensor":
        return _pack_view(parameter, value), [0]
    if parameter.type == "Tensor[]":
        views = b"".join(_pack_view(parameter, each) for each in value)
        addresses = [8 + index * parameter.view_size for index in range(len(value))]
        capacity = parameter.capacity_items * parameter.view_size
        return struct.pack("<q", len(value)) + views.ljust(capacity, b"\0"), addresses
    if parameter.type.endswith("[]"):
        items = b"".join(_pack_number(parameter, each) for each in value)
        capacity = -(-parameter.capacity_items * parameter.item // 8) * 8  # padded to the count's alignment
        return struct.pack("<q", len(value)) + items.ljust(capacity, b"\0"), []
    return _pack_number(parameter, value), []


def _pack_number(parameter: CudaParameter, number: Any) -> bytes:
    if parameter.item_format == "f":
        number = ctypes.c_float(number).value  # rounded as in C, since `struct` refuses large numbers
    return struct.pack(f"<{parameter.item_format}", number)


def _pack_view(parameter: CudaParameter, tensor: Tensor) -> bytes:
    capacity = max(parameter.max_dim, 1)
    sizes, strides = ((*numbers, *(0,) * capacity)[:capacity] for numbers in (tensor.shape, tensor.stride()))
    return struct.pack(f"<Qqq{2 * capacity}q", 0, tensor.numel(), tensor.dim(), *sizes, *strides)
