"""CUDA kernels of involution on the CPU, with every access to memory checked: no finding, right results."""

from __future__ import annotations

import sys

import pytest
import torch
from involution_cases import BEYOND, KERNELS, PLAIN, STRIDED, UNEVEN, Case, expected, held

from opsmith.kernels.cuda.emulation.call import EmulatedCall, KernelEmulation
from opsmith.kernels.cuda.emulation.launch import Order

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="kernels are emulated on Linux"),
    pytest.mark.xdist_group("involution_emulated"),
]
SLOW = pytest.mark.slow
CASES = [
    pytest.param(PLAIN, torch.float32, id="plain-float32"),
    pytest.param(STRIDED, torch.float32, id="strided-float32"),
    *(
        pytest.param(case, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}", marks=SLOW)
        for name, case in (("plain", PLAIN), ("strided", STRIDED), ("uneven", UNEVEN), ("beyond", BEYOND))
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        if (name, dtype) not in {("plain", torch.float32), ("strided", torch.float32)}
    ),
]


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_no_kernel_races_or_leaves_its_memory(case: Case, dtype: torch.dtype) -> None:
    for name, arguments in case.calls(*case.tensors(dtype)).items():
        emulation = KernelEmulation(KERNELS[name])
        call = emulation.prepare(list(arguments))
        assert isinstance(call, EmulatedCall), call
        launches = [call.launch(Order(order)) for order in ("forward", "backward")]
        found = emulation.run([launch for launch in launches if launch is not None])
        assert found == [[], []], f"{name}: {found}"
        got = call.finish(emulation.kernel, launches[1])
        held(got, expected(name, arguments), dtype, (name, case))
