"""RMS norm with a kernel in Helion, which is checked on the CPU."""

import helion
import helion.language as hl
import torch
from torch import Tensor

import opsmith


@helion.kernel(autotune_effort="none", static_shapes=False)
def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    m, _ = x.size()
    result = torch.empty_like(x)
    for tile in hl.tile(m):
        row = x[tile, :].to(torch.float32)
        scale = torch.rsqrt(torch.mean(row * row, dim=-1) + eps)
        result[tile, :] = (row * scale[:, None] * weight[:].to(torch.float32)).to(result.dtype)
    return result


@opsmith.operator("helion_example::rms_norm", shapes="x: M N, weight: N -> M N")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float() if x.element_size() < 4 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


rms_norm.kernel("cuda", helion=rms_norm_kernel)


@rms_norm.samples
def _(make):
    yield make(4, 8), make(8)
    yield make(3, 33), make(33)


def main() -> None:
    report = opsmith.check(rms_norm, only=["helion"])
    print(report)
    assert report.passed_as_asked


if __name__ == "__main__":
    main()
