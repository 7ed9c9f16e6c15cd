"""On several processes, `torchrun --nproc-per-node 2 examples/distributed.py`: DDP, FSDP2 and DTensor."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import opsmith


@opsmith.operator("examples::rms_norm")
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root mean square normalisation (arXiv:1910.07467).  x [B, N], weight [N] -> [B, N]."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


rms_norm.gradients(weight=lambda grad, x: grad * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
rms_norm.samples(lambda make: [(make(4, 6), make(6))])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def main() -> None:
    store = None if "RANK" in os.environ else dist.HashStore()  # without torchrun: a world of one process
    dist.init_process_group("gloo", **({"store": store, "rank": 0, "world_size": 1} if store else {}))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.linspace(-1, 2, 24).view(4, 6)
    mine = x.chunk(mesh.size())[mesh.get_rank()]
    say = print if mesh.get_rank() == 0 else lambda *_: None

    expected = torch.autograd.grad(rms_norm(x, w := torch.ones(6, requires_grad=True)).exp().mean(), w)[0]
    for name, net in {"DDP": DistributedDataParallel(Net()), "FSDP2": fully_shard(Net(), mesh=mesh)}.items():
        net(mine).exp().mean().backward()
        grad = next(net.parameters()).grad
        torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, expected)
        say(f"{name}: the gradient is that of one process, {[round(each, 3) for each in expected.tolist()]}")

    rows = distribute_tensor(x, mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(6), mesh, [Replicate()]).requires_grad_()
    y = rms_norm(rows, weight)
    y.exp().mean().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), expected)
    say(f"DTensor: {rows.placements}, {weight.placements} -> {y.placements}; grad {weight.grad.placements}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
