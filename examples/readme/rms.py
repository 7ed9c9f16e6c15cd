import torch
from torch import Tensor

import opsmith


@opsmith.operator("mylib::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the root mean square of the last dimension.  x [..., C], weight [C] -> [..., C]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


rms_norm.samples(lambda make: [(make(4, 8), make(8)), (make(2, 3, 5), make(5))])

if __name__ == "__main__":
    print(opsmith.check(rms_norm).verdict())
