"""Involution in CUDA, from one file: what `load_kernel(name, template, **constants)` was written for."""

import torch
import torch.nn.functional as F
from torch import Tensor

import opsmith

DTYPES = [torch.float32, torch.bfloat16]


def launched(size: str) -> dict[str, object]:
    constants = {"K": size, "S": "stride"}  # sizes of images and batches are none: one cubin serves them all
    return {"constants": constants, "grid": "min(ceil(result.numel / 256), 65535)", "max_spills": 0}


@opsmith.operator("examples::involution")
def involution(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """x [B, C, H, W], weight [B, G, K, K, P, Q] -> [B, C, P, Q]."""
    (B, C, _, _), (_, G, K, _, P, Q) = x.shape, weight.shape
    patches = F.unfold(x, K, padding=padding, stride=stride).view(B, G, C // G, K, K, P, Q)
    return (patches * weight[:, :, None]).sum((3, 4)).view(B, C, P, Q)


@opsmith.operator("examples::involution_grad_x")
def grad_x(dy: Tensor, weight: Tensor, height: int, width: int, stride: int = 1, padding: int = 0) -> Tensor:
    (B, C, P, Q), (_, G, K) = dy.shape, weight.shape[:3]
    patches = dy.view(B, G, C // G, 1, 1, P, Q) * weight[:, :, None]
    return F.fold(patches.reshape(B, C * K * K, -1), (height, width), K, padding=padding, stride=stride)


@opsmith.operator("examples::involution_grad_weight")
def grad_weight(dy: Tensor, x: Tensor, groups: int, size: int, stride: int = 1, padding: int = 0) -> Tensor:
    (B, C, P, Q), G = dy.shape, groups
    patches = F.unfold(x, size, padding=padding, stride=stride).view(B, G, C // G, size, size, P, Q)
    return (patches * dy.view(B, G, C // G, 1, 1, P, Q)).sum(2)


for operator, size in ((involution, "weight.shape[2]"), (grad_x, "weight.shape[2]"), (grad_weight, "size")):
    operator.kernel("cuda", cuda_file="involution.cu", dtypes=DTYPES, **launched(size))
involution.gradients(
    x=lambda grad, x, weight, stride, padding: grad_x(grad, weight, *x.shape[2:], stride, padding),
    weight=lambda grad, x, weight, stride, padding: grad_weight(grad, x, *weight.shape[1:3], stride, padding),
)
involution.samples(lambda make: [(make(2, 4, 6, 5), make(2, 2, 3, 3, 3, 3), 2, 1)])
grad_x.samples(lambda make: [(make(2, 4, 3, 3), make(2, 2, 3, 3, 3, 3), 6, 5, 2, 1)])
grad_weight.samples(lambda make: [(make(2, 4, 3, 3), make(2, 4, 6, 5), 2, 3, 2, 1)])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.randn(1, 4, 9, 9, device=device), torch.randn(1, 2, 7, 7, 9, 9, device=device)
    torch.testing.assert_close(involution(x, weight, 1, 3), involution.reference(x, weight, 1, 3))
    print(involution.explain(x, weight, 1, 3))


if __name__ == "__main__":
    main()
