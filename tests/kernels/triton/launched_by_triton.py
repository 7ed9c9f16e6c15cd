"""Compares launches by plans with those of Triton's own launcher, in a process of its own.

The launcher is Triton's `driver.c`, linked to a stand-in for the driver. It prints what was compared.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton_launches import on_cpu, recording, triton_driver

from opsmith.kernels.common.cubin import parameter_places
from opsmith.kernels.triton.kernel import TritonKernel

ON_LAUNCH: Any = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
)


def launcher_of_triton(folder: Path) -> tuple[Any, Any]:
    """Compile Triton's launcher; return its module, and the stand-in for the driver that it calls."""
    source, stub = Path(nvidia.dirname) / "driver.c", folder / "libcuda.so.1"
    flags = ["gcc", "-O1", "-fPIC", "-shared", "-w", "-Wl,-z,lazy"]
    here = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([*flags, "-Wl,-soname,libcuda.so.1", str(here), "-o", str(stub)], check=True)
    include = [f"-I{path}" for path in (*nvidia.include_dirs, sysconfig.get_paths()["include"])]
    built = folder / "cuda_utils.so"
    subprocess.run([*flags, *include, str(source), str(stub), "-o", str(built)], check=True)
    fake = ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    specification = importlib.util.spec_from_file_location("cuda_utils", built)
    assert specification is not None
    assert specification.loader is not None
    sys.setdlopenflags(os.RTLD_LAZY)  # of the driver there is only what a launch calls
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for name in ("PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        setattr(nvidia, name, getattr(module, name))
    return module, fake


def main(folder: Path) -> None:
    from test_triton_plans import CALLS, NUMBERS, SHIPPED, in_place, mixed

    module, fake = launcher_of_triton(folder)
    launched: list[tuple[tuple[int, ...], list[bytes]]] = []
    sizes: list[int] = []

    @ON_LAUNCH
    def on_launch(numbers: Any, parameters: Any) -> int:
        content = [ctypes.string_at(parameters[at], size) for at, size in enumerate(sizes)]
        launched.append((tuple(numbers[:8]), content))
        return 0

    fake.fake_on_launch(on_launch)
    calls = [(name, mixed, (*arguments, *NUMBERS)) for name, arguments in CALLS.items()]
    calls += [(name, operator, arguments) for name, (operator, arguments, _, _) in SHIPPED.items()]
    calls += [
        (f"by={by}", in_place(f"compared_{at}"), (torch.zeros(40), by)) for at, by in enumerate((0.5, 1e300))
    ]
    for name, operator, arguments in calls:
        kernel = on_cpu(operator)
        with recording() as found:
            TritonKernel._awaits_plan = lambda self, values: True  # type: ignore[method-assign]
            kernel(*arguments)
            (by_plan,) = found.by_plan
            values = operator.specification.schema.call_values(arguments, {})
            prepared = kernel.prepare(values)
            programs = prepared.grid({})
            compiled = kernel.compiled(prepared, programs)
            sizes[:] = [size for _, size in parameter_places(compiled.asm["cubin"], compiled.metadata.name)]
            driver = triton_driver()
            driver.utils = module
            type(triton.runtime.driver).active = property(lambda self: driver)  # noqa: B023
            launch = nvidia.CudaLauncher(compiled.src, compiled.metadata)
            bound = {**kernel.defaults, **prepared.arguments}
            ordered = [bound[each.name] for each in kernel.source.parameters]
            grid = (*programs, 1, 1)[:3]
            launched.clear()
            launch(*grid, 0, 1, compiled.packed_metadata, None, None, None, *ordered)
        ((numbers, content),) = launched
        assert numbers == (*by_plan.grid, *by_plan.block, by_plan.shared, 0), (name, numbers, by_plan)
        given = {id(each) for each in arguments}
        made = [each for each in ordered if isinstance(each, torch.Tensor) and id(each) not in given]
        addresses = [each.data_ptr().to_bytes(8, "little") for each in made]
        for at, (one, other) in enumerate(zip(content, by_plan.parameters, strict=True)):
            # Results and copies have other memory in each call.
            assert one == other or one in addresses, (name, at)
        sys.stdout.write(f"{name}: {len(content)} parameters\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
