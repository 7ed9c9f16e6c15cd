"""A file with three faults, and the lines of them; what tools show of it is tested."""

TEXT = """\
import torch
from torch import Tensor

import opsmith


@opsmith.operator("{space}::square")
def square(x: Tensor) -> Tensor:
    return x * x


square.gradients(x=lambda grad, x: -2 * grad * x)
square.samples(lambda make: [(make(3),)])


@opsmith.operator("{space}::twice")
def twice(x: Tensor) -> Tensor:
    return x + x


@twice.kernel("cpu")
def _twice(x: Tensor) -> Tensor:
    return x + x + 1


twice.samples(lambda make: [(make(3),)])


@opsmith.operator("{space}::cube")
def cube(x: Tensor) -> Tensor:
    return x * x * x


cube.gradients(x=lambda grad, x: grad * x * x)
cube.samples(lambda make: [(make(3),)])
"""


def line_of(code: str) -> int:
    return TEXT.splitlines().index(code) + 1


FAULTS = {
    "square": (line_of("square.gradients(x=lambda grad, x: -2 * grad * x)"), "sign"),
    "twice": (line_of('@twice.kernel("cpu")'), "kernel-mismatch"),
    "cube": (line_of("cube.gradients(x=lambda grad, x: grad * x * x)"), "scale"),
}
"""The line and the cause of each fault, by operator."""

FAST = ("--quick", "--only", "forward,gradient")
