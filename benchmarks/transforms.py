"""One operator, y = x tanh(w) scale, written in each way that there is, under every transform.

For each: `right`, `WRONG` (an answer that differs from the plain function's, zeros among them), or the error.
The transforms are those of the tests, tests/transforms/transform_cases.py, and torch.compile around some.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.func as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "transforms"))
from transform_cases import DEPTH_THREE, TRANSFORMS, Call
from transform_subjects import Subject, gate


def plain(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    return x * torch.tanh(w) * scale


def gradients(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return grad * w.tanh(), grad * x * (1 - w.tanh() ** 2)


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return plain(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gradients(grad, *ctx.saved_tensors)


class WithSetupContext(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return plain(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gradients(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, w_tangent: Tensor | None) -> Tensor:
        x, w = ctx.saved_tensors
        moved = torch.zeros_like(x * w)
        if x_tangent is not None:
            moved = moved + x_tangent * w.tanh()
        if w_tangent is not None:
            moved = moved + w_tangent * x * (1 - w.tanh() ** 2)
        return moved


@torch.library.custom_op("transforms_table::gate", mutates_args=())
def custom_op(x: Tensor, w: Tensor) -> Tensor:
    return plain(x, w)


custom_op.register_fake(plain)
custom_op.register_autograd(
    lambda ctx, grad: gradients(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
custom_op.register_vmap(lambda info, in_dims, x, w: _batched(in_dims, x, w))


def _batched(in_dims: tuple[int | None, ...], x: Tensor, w: Tensor) -> tuple[Tensor, int]:
    x, w = (t if d is None else t.movedim(d, 0) for t, d in zip((x, w), in_dims, strict=True))
    rank = max(t.ndim - (d is not None) for t, d in zip((x, w), in_dims, strict=True))
    x, w = (
        t if d is None else t.reshape(t.shape[0], *(1,) * (rank - t.ndim + 1), *t.shape[1:])
        for t, d in zip((x, w), in_dims, strict=True)
    )
    return custom_op(x, w), 0


WAYS: dict[str, Callable[..., Tensor]] = {
    "opsmith": gate,
    "Function": OldStyle.apply,
    "Function+setup": WithSetupContext.apply,
    "custom_op": custom_op,
}


def _leaves(call: Call) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in call.single]


def _dual(call: Call) -> Tensor:
    x, w = call.single
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(call.function(forward_ad.make_dual(x, torch.ones_like(x)), w))
        return torch.zeros_like(x) if dual.tangent is None else dual.tangent


def _hessian_by_second(call: Call) -> Tensor:
    x, w = call.single
    return F.hessian(lambda w: call.function(x, w).pow(2).sum())(w)


def _compiled(transform: Callable[[Call], Any]) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda: transform(call), backend="aot_eager", fullgraph=True)()

    return run


MORE: dict[str, Callable[[Call], Any]] = {
    "backward": lambda c: torch.autograd.grad(c.function(*(t := _leaves(c))).sum(), t),
    "dual tensors": _dual,
    "gradcheck": lambda c: gradcheck(c.function, _leaves(c)),
    "gradcheck, forward mode": lambda c: gradcheck(c.function, _leaves(c), check_forward_ad=True),
    "gradgradcheck": lambda c: gradgradcheck(c.function, _leaves(c)),
    "gradgradcheck, forward": lambda c: gradgradcheck(c.function, _leaves(c), check_fwd_over_rev=True),
    "compile: grad": _compiled(TRANSFORMS["grad"]),
    "compile: vmap": _compiled(TRANSFORMS["vmap"]),
    "compile: vmap-grad": _compiled(TRANSFORMS["vmap-grad"]),
    "compile: jvp": _compiled(TRANSFORMS["jvp"]),
    "compile: hessian": _compiled(
        lambda c: F.hessian(lambda w: c.function(c.single[0], w).pow(2).sum())(c.single[1])
    ),
}


def verdict(transform: Callable[[Call], Any], subject: Subject, function: Callable[..., Tensor]) -> str:
    single, batched = subject.inputs(), subject.inputs(batch=True)
    try:
        found = transform(Call(function, single, batched))
    except Exception as error:
        return type(error).__name__
    expected = transform(Call(plain, single, batched))
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError:
        return "WRONG"
    return "right"


def main() -> None:
    warnings.simplefilter("ignore")
    subject = Subject("gate", gate, plain, ((2, 3), (2, 3)))
    transforms = {**MORE, **TRANSFORMS, **DEPTH_THREE}
    print(f"torch {torch.__version__}, {len(transforms)} transforms")
    print(f"{'':36s}" + "".join(f"{name:>24s}" for name in WAYS))
    right = dict.fromkeys(WAYS, 0)
    for name, transform in transforms.items():
        verdicts = {way: verdict(transform, subject, function) for way, function in WAYS.items()}
        for way, answer in verdicts.items():
            right[way] += answer == "right"
        print(f"{name:36s}" + "".join(f"{answer:>24s}" for answer in verdicts.values()), flush=True)
    print(f"{'right':36s}" + "".join(f"{count:>24d}" for count in right.values()))


if __name__ == "__main__":
    main()
