"""Plan of a Triton kernel's call: the compiled kernel, with parameters packed as by Triton's launcher."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_float
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from opsmith.core.call_arguments import tensors_in
from opsmith.kernels.common.cubin import parameter_places
from opsmith.kernels.runtime.plan import Launch, Launches, Plan, copies_in
from opsmith.kernels.triton.compiler import WARP
from opsmith.kernels.triton.source import triton_module

if TYPE_CHECKING:
    from opsmith.kernels.triton.kernel import PreparedLaunch, TritonKernel

POINTER = 8
"""Bytes of an address."""
USUAL = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
"""Properties, in Triton's description of a compiled kernel, that plans support."""
IN_SIGNATURE = {
    *("shape", "size", "__len__", "stride", "layout", "is_contiguous", "dim", "ndim", "ndimension"),
    *("numel", "nelement", "dtype", "is_floating_point", "is_complex", "is_signed"),
    *("element_size", "itemsize", "nbytes", "device", "is_cuda", "get_device"),
}
"""Attributes of tensors that grids and constants may read: they are the same in all calls of a signature."""

_WHOLE = re.compile(r"([iu])(1|8|16|32|64)")
_FLOATS: dict[str, Callable[[float], bytes]] = {
    "fp16": lambda number: struct.pack("<e", number),
    "bf16": lambda number: bytes(c_float(number))[2:],  # truncated, as in Triton
    "fp32": lambda number: bytes(c_float(number)),
    "f32": lambda number: bytes(c_float(number)),
    "fp64": lambda number: struct.pack("<d", number),
}


class NoPlanError(Exception):
    """No plan is possible for a kernel, so Triton must launch it. The text is the reason."""


class OnlySignature(TorchFunctionMode):
    """Mode that records reads of tensors, such as their data, that may differ between calls of one signature.

    Attributes:
        asked: Names of the functions and attributes that were read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # For an attribute, `function` is the `__get__` of its descriptor.
        name = getattr(getattr(function, "__self__", None), "__name__", None) or function.__name__
        if name not in IN_SIGNATURE:
            self.asked.append(name)
        return function(*args, **(kwargs or {}))


def hooks_are_set() -> bool:
    """Return True if hooks around Triton's launches are set, for example by a profiler."""
    knobs = triton_module().knobs.runtime
    names = ("launch_enter_hook", "launch_exit_hook", "kernel_load_start_hook", "kernel_load_end_hook")
    hooks = (getattr(knobs, name, None) for name in names)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def plan_call(kernel: TritonKernel, values: Sequence[Any]) -> Plan | None:
    """Plan the calls that have the signature of these values; None while a CUDA graph is captured.

    Args:
        kernel: The kernel, which takes these values.
        values: Argument values.

    Raises:
        NoPlanError: If no plan is possible for the kernel.
        CompileError: If Triton's compiler refuses the kernel.
        LaunchError: If the grid is not valid, or exceeds a GPU's limits.
    """
    names = kernel.operator.specification.schema.names
    only = OnlySignature()
    prepared = kernel.prepare(values, rules=only)
    with only:
        grid = prepared.grid({})
    if only.asked:
        raise NoPlanError(f"its grid or a constant reads `{only.asked[0]}` of a tensor")
    tensors = kernel.binding.tensors
    parameters = {index: tensors[name] for index, name in enumerate(names) if name in tensors}
    results = []
    for layout, result in zip(prepared.layouts, prepared.results, strict=True):
        results.append((layout, None if result.stride() == layout.stride else result.stride()))
    device, work = prepared.device, Launches(0, 0, (), (), ())
    if kernel.has_programs(prepared, grid):
        compiled = kernel.compiled(prepared, grid)
        if compiled is None:
            raise NoPlanError("a hook of Triton compiles it")
        launch = _launch(kernel, compiled, prepared, values, grid)
        loaded = kernel.loaded(compiled, device.index or 0)
        if loaded is None:
            return None
        driver, context, handle = loaded
        work = Launches(driver, context, (), (), (replace(launch, function=handle),))
    return Plan(work, copies_in(values, parameters), tuple(results), device)


def _launch(
    kernel: TritonKernel,
    compiled: Any,
    prepared: PreparedLaunch,
    values: Sequence[Any],
    grid: Any,
) -> Launch:
    """Return the launch of a compiled kernel, without the handle of the kernel.

    Triton's launcher passes all parameters that are not constant, in order, and then the addresses of two
    buffers, which kernels with a plan do not use.

    Raises:
        NoPlanError: If the compiled kernel needs other properties or parameters.
    """
    schema, metadata = kernel.operator.specification.schema, compiled.metadata
    for name, usual in USUAL.items():
        if (found := getattr(metadata, name, None)) != usual:
            raise NoPlanError(f"its compiled form has {name}={found}")
    positions, count = {}, 0
    for name, value in zip(schema.names, values, strict=True):
        positions[name] = count
        count += len(tensors_in([value]))
    positions |= {result.name: count + at for at, result in enumerate(schema.results)}
    bounds = {bound.parameter: bound for bound in kernel.binding.bounds}
    arguments = {**kernel.defaults, **prepared.arguments}
    image = b""
    places: list[tuple[int, int]] = []
    addresses: list[tuple[int, int, int]] = []
    given: list[tuple[int, int, int, int]] = []
    names, kinds = [each.name for each in kernel.source.parameters], [*compiled.src.signature.values()]
    if len(names) != len(kinds):
        raise NoPlanError(f"its compiled form has {len(kinds)} parameters instead of {len(names)}")
    for name, kind in zip([*names, "", ""], [*kinds, "*", "*"], strict=True):
        if kind == "constexpr":
            continue
        packed = bytes(POINTER) if kind[:1] == "*" else _packed(kind, arguments[name], name)
        image += bytes(-len(image) % len(packed))
        places.append((len(image), len(packed)))
        bound = bounds.get(name)
        if kind[:1] == "*" and name:
            if bound is None or bound.kind != "pointer":
                raise NoPlanError(f"`{name}` is a tensor, but not an argument or a result")
            addresses.append((len(image), positions[bound.name], 0))
        elif bound is not None and bound.kind == "value" and bound.name in kernel.free:
            if kind not in ("fp32", "f32", "fp64"):
                raise NoPlanError(f"`{name}` is {kind}, which calls cannot pass")
            given.append((len(image), schema.names.index(bound.name), len(packed), -1))
        image += packed
    if (found := parameter_places(compiled.asm["cubin"], metadata.name)) != places:
        raise NoPlanError(f"its compiled form takes parameters at {found}, not at {places}")
    return Launch(
        0,
        (*grid, 1, 1)[:3],
        (WARP * metadata.num_warps, 1, 1),
        metadata.shared,
        image,
        tuple(offset for offset, _ in places),
        tuple(addresses),
        tuple(given),
        "the Triton kernel is not launched",
        kernel.machine.architecture(prepared.device.index or 0),
    )


def _packed(kind: Any, value: Any, name: str) -> bytes:
    """Return the bytes of a number in the format of Triton's launcher.

    Raises:
        NoPlanError: If the number has a different type, or does not fit into the type.
    """
    if kind in _FLOATS and isinstance(value, int | float):
        with suppress(OverflowError):
            return _FLOATS[kind](value)
    whole = _WHOLE.fullmatch(kind) if isinstance(kind, str) else None
    if whole is not None and isinstance(value, int):
        with suppress(OverflowError):
            return int(value).to_bytes(max(int(whole[2]) // 8, 1), "little", signed=whole[1] == "i")
    raise NoPlanError(f"`{name}` is {kind}, but gets {value!r}")
