"""Program that loads a library, and calls its operators with a driver that emulates the launched kernels.

The operators of the library take tensors on the CPU as those of a GPU. The emulated kernels are those of the
same operators under another name, so that the library computes without Python.

Usage: call_served_cuda.py DRIVER LIBRARY CASES OUTCOMES
"""

from __future__ import annotations

import copy
import ctypes
import sys
from typing import Any

import torch
from fake_driver import ARCHITECTURE, STREAM, Record, emulate_launch
from served_cuda_operators import declare

from opsmith.kernels.cuda.emulation.compiler import emulated_libraries
from opsmith.kernels.cuda.launch import Geometry
from opsmith.shipping.served_cuda import cuda_kernels, variants_of

driver_path, library_path, cases, outcomes = sys.argv[1:]
HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # where the library has its kernels here
OUT_OF_RESOURCES = 701
"""CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES."""

emulated: dict[str, Any] = {}
for operator in declare("twin").values():
    for kernel in cuda_kernels(operator.specification):
        instances = list(dict.fromkeys(each for variant in variants_of(kernel) for each in variant))
        for library in emulated_libraries(kernel.source, operator.name, instances):
            for entry, instance in enumerate(library.instances):
                emulated[kernel.compile(instance, ARCHITECTURE).name] = kernel, library, entry

# NVRTC, which has named the kernels, must not find this driver.
driver: Any = ctypes.CDLL(driver_path, ctypes.RTLD_GLOBAL)
driver.fake_record.restype = ctypes.POINTER(Record)
launches: list[tuple[Any, ...]] = []
faults: list[str] = []


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))
def launched(name: bytes, numbers: Any, parameters: Any) -> None:
    kernel, library, entry = emulated[name.decode()]
    packed, offsets = bytearray(), []
    for at, parameter in enumerate(library.parameters[entry]):
        packed += bytes(-len(packed) % parameter.alignment)
        offsets.append(len(packed))
        packed += ctypes.string_at(parameters[at], parameter.size)
    grid, block = tuple(numbers[:3]), tuple(numbers[3:6])
    launches.append((kernel.source.kernel(library.instances[entry].entry).entry, grid, block, numbers[6]))
    try:
        emulate_launch(kernel, library, entry, Geometry(grid, block, numbers[6]), packed, offsets)
    except Exception as error:  # which a callback of C cannot raise
        faults.append(str(error))


driver.fake_on_launch(launched)
torch.ops.load_library(library_path)
found = []
for name, args, state in torch.load(cases):
    args = copy.deepcopy(args)
    launches.clear()
    driver.fake_reset()
    driver.fake_capture(int(state == "capture"))
    driver.fake_fail(OUT_OF_RESOURCES if state == "failure" else 0)
    namespace, _, operator = name.partition("::")
    try:
        overload = getattr(getattr(torch.ops, namespace), operator).default
        result = overload.redispatch(HOST, *args) if state == "devices" else overload(*args)
    except RuntimeError as error:
        found.append(str(error))
    else:
        results = list(result) if isinstance(result, tuple) else [result]
        record = driver.fake_record().contents
        assert record.depth == 0
        assert not launches or record.stream == STREAM
        found.append((results, args, list(launches)))
assert not faults, faults
torch.save(found, outcomes)
