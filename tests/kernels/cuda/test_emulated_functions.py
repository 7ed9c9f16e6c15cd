"""CUDA's functions of numbers on the CPU: NVRTC takes the same calls, and the values are right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import opsmith
from opsmith.kernels.cuda import compiler as compiling
from opsmith.kernels.cuda.compiler import Instance
from opsmith.kernels.cuda.source import cuda_source

LARGE = 2.0**31 - 1
VALUES: dict[str, float] = {
    "rcbrt(8.0)": 0.5,
    "rcbrtf(8.0f)": 0.5,
    "rhypotf(3.0f, 4.0f)": float(torch.tensor(0.2)),
    "norm3df(2.0f, 3.0f, 6.0f)": 7,
    "rnorm4d(1.0, 1.0, 1.0, 1.0)": 0.5,
    "sinpi(1.0)": 0,
    "sinpi(-2.5)": -1,
    "cospi(0.5)": 0,
    "cospi(-3.0)": -1,
    "sinpif(0.25f)": float(torch.tensor(math.sqrt(0.5)).float()),
    "__umul24(0x1000003u, 5u)": 15,
    "__mul24(0x1ffffff, 3)": -3,
    "__mul64hi(-1ll, 1ll)": -1,
    "__umul64hi(1ull << 63, 4ull)": 2,
    "__brevll(1ull) >> 63": 1,
    "__sad(-3, 4, 10u)": 17,
    "__usad(3u, 4u, 10u)": 11,
    "__hadd(-3, 4)": 0,
    "__urhadd(0xffffffffu, 0xfffffffeu)": 2.0**32 - 1,
    "__dp4a(int(0xff02ff04), int(0x01020304), 5)": 5 - 1 + 4 - 3 + 16,
    "__dp4a(0xff02ff04u, 0x01020304u, 5u)": 5 + 255 + 4 + 765 + 16,
    "__dp2a_lo(int(0xffff0002), int(0x04030201), 1)": 1 + 2 - 2,
    "__dp2a_hi(int(0xffff0002), int(0x04030201), 1)": 1 + 6 - 4,
    "__funnelshift_lc(7u, 1u, 40u)": 7,
    "umax(3u, 5u)": 5,
    "llmin(-3ll, 5ll)": -3,
    "__float2int_rn(1e10f)": LARGE,
    '__float2int_rn(nanf(""))': 0,
    "__float2int_rz(-1e10f)": -(2.0**31),
    "__float2int_rn(2.5f)": 2,
    "__float2uint_rz(-3.0f)": 0,
    "__float2ll_rn(2.5f)": 2,
    '__float2ll_rd(nanf(""))': -(2.0**63),
    '__double2int_rn(nan(""))': -(2.0**31),
    "__double2int_rn(3e9)": LARGE,
    "__double2uint_ru(1.25)": 2,
    "__dsub_rn(1.0, 0.75)": 0.25,
    "__fadd_ru(1.0f, 1e-10f)": 1 + 2.0**-23,
    "__fadd_rd(1.0f, 1e-10f)": 1,
    "__fsub_rz(1.0f, 1e-10f)": 1 - 2.0**-24,
    "__fmaf_rn(3.0f, 4.0f, 5.0f)": 17,
    "__fmaf_rz(1.0f, 1.0f, -1e-10f)": 1 - 2.0**-24,
    "__fma_ru(1.0, 1.0, 1e-20)": 1 + 2.0**-52,
    "__dadd_rd(1.0, -1e-20)": 1 - 2.0**-53,
    "__fsqrt_ru(1.0000001f)": 1 + 2.0**-23,
    "__frcp_rz(3.0f)": 0x5555550 / 2.0**28,
    "__drcp_ru(4.0)": 0.25,
    "__int2float_rz(16777219)": 16777218,
    "__int2float_ru(16777219)": 16777220,
    "__double2float_rd(1.0 + 1e-9)": 1,
    "__double2float_ru(1.0 + 1e-9)": 1 + 2.0**-23,
    "__hiloint2double(__double2hiint(1.7), __double2loint(1.7))": 1.7,
}
CLOSE: dict[str, float] = {
    "normcdfinv(0.975)": 1.959963984540054,
    "normcdfinvf(0.5f)": 0.0,
    "erfcinv(1e-30)": 8.148617122315966,
    "erfinv(0.3)": 0.2724627147267544,
    "double(erfinvf(-0.5f))": -0.4769362762044699,
    "erfcx(1.0)": 0.427583576155807,
    "erfcx(50.0)": 0.011281536265323773,
    "cyl_bessel_i0(3.0)": 4.880792585865024,
    "cyl_bessel_i1(-3.0)": -3.953370217402609,
}


def text_of(name: str, calls: list[str]) -> str:
    lines = "\n".join(f"  y[{at}] = double({call});" for at, call in enumerate(calls))
    return f"__global__ void {name}(Contiguous<const double> x, Contiguous<double> y) {{\n{lines}\n}}\n"


def computed(name: str, calls: list[str]) -> list[float]:
    text = text_of(name, calls)
    source = cuda_source(f"functions::{name}", cuda=text, cuda_file=None, entries=[None], declared=None)
    compiling.compile_instance(source, f"functions::{name}", Instance(), "sm_80")

    def same(x: Tensor) -> Tensor:
        return x.clone()

    operator: Any = opsmith.operator(f"functions::{name}")(same)
    operator.kernel("cuda", cuda=text, entry=name, grid=1, block=1)
    return opsmith.emulate(operator, torch.zeros(len(calls), dtype=torch.float64)).tolist()


def test_functions_have_the_values_of_their_definition() -> None:
    got = dict(zip(VALUES, computed("exact", [*VALUES]), strict=True))
    assert {call: value for call, value in got.items() if value != VALUES[call]} == {}


def test_functions_that_are_approximated_are_close() -> None:
    got = torch.tensor(computed("approximated", [*CLOSE]))
    torch.testing.assert_close(got, torch.tensor([*CLOSE.values()]), rtol=1e-6, atol=1e-12)


def test_inverses_and_series_agree_with_torch() -> None:
    inputs = [0.001, 0.2, 0.7, 0.9999, -0.35]
    x = torch.tensor(inputs, dtype=torch.float64)
    functions = {
        "erfinv": torch.special.erfinv,
        "erfcx": torch.special.erfcx,
        "cyl_bessel_i0": torch.special.i0,
        "cyl_bessel_i1": torch.special.i1,
    }
    calls = [f"{name}({at})" for name in functions for at in inputs]
    got = torch.tensor(computed("compared", calls), dtype=torch.float64)
    expected = torch.cat([function(x) for function in functions.values()])
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
