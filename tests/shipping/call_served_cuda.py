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
from fake_driver import ARCHITECTURE, ON_LAUNCH, STREAM, Record, emulate_launch, geometry_of, passed
from served_cuda_operators import declare

from opsmith.kernels.cuda.emulation.compiler import emulated_libraries
from opsmith.kernels.cuda.kernel import cuda_kernels
from opsmith.kernels.cuda.linked import variants_of

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


@ON_LAUNCH
def launched(function: int, name: bytes, numbers: Any, parameters: Any) -> int:
    kernel, library, entry = emulated[name.decode()]
    geometry = geometry_of(numbers)
    entry_name = kernel.source.kernel(library.instances[entry].entry).entry
    launches.append((entry_name, geometry.grid, geometry.block, geometry.shared))
    try:
        emulate_launch(kernel, library, entry, geometry, *passed(library.parameters[entry], parameters))
    except Exception as error:  # which a callback of C cannot raise
        faults.append(str(error))
    return 0


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
