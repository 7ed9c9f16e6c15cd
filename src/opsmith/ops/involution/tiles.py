"""How the CUDA kernels of involution are launched: the tile of a block, told from the sizes of a call.

The arithmetic of how a tile lies in shared memory is that of `layout` in cuda/involution.cuh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

VECTOR = 16
"""Bytes that a thread reads of shared memory at once. A strip is as many, in the type that sums are of."""
LANES, CHANNELS = 4, 4
"""At most so many threads share the channels of a strip, and each has so many at a time."""
STAGED = 16
"""So many channels of a group are in shared memory at a time where the weight's gradient is summed."""
SHARED = 48 * 1024
"""Bytes of shared memory of a block, which every GPU gives unasked: three such blocks fit on sm_80."""
NARROWEST = 4
"""Strips that a tile has at least where there are as many: of 16 bits they are one sector of 32 bytes."""
LONGEST = 32
"""Strips that a tile has at most, and rows."""
MOST_THREADS = {"forward": 128, "input_gradient": 128, "weight_gradient": 256}
"""Of a block, as the kernels are compiled for."""
BUDGET = 22
"""Vectors of registers: beyond so many, any kernel and step has the plain path."""
FARTHEST = 2**30
"""Rows and columns, with what windows reach beyond the image, and channels, that 32 bits count in a tile."""

MOST_BLOCKS = 2**31 - 1
"""Of a launch."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of a call.

    Attributes:
        kind: Which of the three kernels.
        images: B G.
        channels: Of a group.
        size, result: H and W; Ho and Wo.
        kernel, stride, padding, dilation: As in `involution`.
        itemsize: Bytes of an element.
    """

    kind: str
    images: int
    channels: int
    size: Pair
    result: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    itemsize: int

    @property
    def is_sound(self) -> bool:
        """Whether these are sizes at all: of others the reference tells what is wrong."""
        steps = (*self.stride, *self.dilation, *self.size, *self.result, *self.kernel)
        return self.channels > 0 and min(steps) > 0 and min(self.padding) >= 0

    @property
    def numel(self) -> int:
        """What threads take one by one in a group of an image: numbers, or several channels of a pixel."""
        rows, columns = self.size if self.kind == "input_gradient" else self.result
        if self.kind == "weight_gradient":
            return self.kernel[0] * self.kernel[1] * rows * columns
        return -(-self.channels // self.parts[1]) * rows * columns

    @property
    def strip(self) -> int:
        """The pixels of a strip: 16-bit types are computed in float32."""
        return VECTOR // max(4, self.itemsize)

    @property
    def parts(self) -> tuple[int, int]:
        """Threads that share the channels of a strip, and the channels that each has at a time."""
        if self.kind == "weight_gradient":
            return 1, -(-self.channels // -(-self.channels // STAGED))
        at_once = -(-self.channels // -(-self.channels // (LANES * CHANNELS)))
        lanes = LANES if at_once > 4 else 2 if at_once > 1 else 1
        return lanes, -(-at_once // lanes)

    @property
    def reach(self) -> int:
        """Columns that the last tap looks back from a strip of the input's gradient."""
        return (self.kernel[1] - 1) * self.dilation[1] // self.stride[1]

    @property
    def first(self) -> int:
        """The first column of the input's gradient, as its kernel counts: in strides, with the padding."""
        return self.padding[1] // self.stride[1]

    @property
    def shift(self) -> int:
        """Columns that a tile begins before those that the taps meet: then at a multiple of a strip."""
        begin = self.first - self.reach if self.kind == "input_gradient" else -self.padding[1]
        return begin % self.strip

    @property
    def window(self) -> int:
        """The vectors of one phase of a window."""
        span = self.reach
        if self.kind != "input_gradient":
            span = (self.shift + (self.kernel[1] - 1) * self.dilation[1]) // self.stride[1]
        else:
            span += self.shift
        return (span + self.strip - 1) // self.strip + 1

    @property
    def phases(self) -> int:
        """The phases that columns are parted by in shared memory."""
        return 1 if self.kind == "input_gradient" else self.stride[1]

    @property
    def vectors(self) -> int:
        """Vectors of registers that hold weights, sums and a window."""
        sums = {
            "forward": self.parts[1],
            "input_gradient": self.parts[1] * self.stride[1],
            "weight_gradient": 1,
        }
        return self.kernel[1] + sums[self.kind] + self.window * self.phases

    @property
    def area(self) -> Pair:
        """Rows and columns that tiles cover."""
        if self.kind != "input_gradient":
            return self.result
        last = (self.size[1] - 1 + self.padding[1]) // self.stride[1]
        return self.size[0], last - self.first + 1


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes.

    Attributes:
        strips, rows: Of the tile.
        taps: Rows of taps at once, where the weight's gradient is summed.
        staged: Rows of it in shared memory.
        line, row, plane: How these lie there, in vectors.
        shared: Bytes of shared memory.
    """

    strips: int
    rows: int
    taps: int
    staged: int
    line: int
    row: int
    plane: int
    shared: int


def tile_of(problem: Problem, strips: int, rows: int) -> Tile:
    """A tile of so many strips and rows."""
    lanes, channels = problem.parts
    reach = (problem.kernel[0] - 1) * problem.dilation[0]
    step, taps = problem.stride[0], 1
    if problem.kind == "input_gradient":
        staged, step = (rows - 1 + reach) // step + 1, 1
    else:
        staged = (rows - 1) * step + reach + 1
    line = strips - 1 + problem.window
    apart = 8 // lanes
    row = line * problem.phases
    row += next((pad for pad in range(apart) if ((row + pad) * step - strips) % apart == 0), 0)
    plane = staged * row
    if lanes > 1:
        plane += (apart - plane) % 8
    vectors = lanes * channels * plane
    if problem.kind == "weight_gradient":
        taps = max(1, min(problem.kernel[0], MOST_THREADS[problem.kind] // (strips * rows)))
        vectors += channels * rows * strips
    return Tile(strips, rows, taps, staged, line, row, plane, vectors * VECTOR)


def evenly(length: int) -> list[int]:
    """The sizes of up to `LONGEST` of the parts of a length, which is parted as evenly as can be."""
    sizes = range(1, min(length, LONGEST) + 1)
    return [size for size in sizes if -(-length // -(-length // size)) == size]


def tiles(problem: Problem) -> Iterator[Tile]:
    """The tiles that a block can have."""
    rows, columns = problem.area
    wide, lanes = -(-columns // problem.strip), problem.parts[0]
    for strips in evenly(wide):
        if strips < min(wide, NARROWEST):
            continue
        for tall in evenly(rows):
            tile = tile_of(problem, strips, tall)
            if lanes * strips * tall * tile.taps <= MOST_THREADS[problem.kind] and tile.shared <= SHARED:
                yield tile


def blocks(problem: Problem, tile: Tile) -> int:
    """The blocks of one group of one image."""
    rows, columns = problem.area
    lanes, channels = problem.parts
    pieces = 1 if problem.kind == "weight_gradient" else -(-problem.channels // (lanes * channels))
    return -(-rows // tile.rows) * -(-columns // (tile.strips * problem.strip)) * pieces


def cost(problem: Problem, tile: Tile) -> float:
    """About how many instructions warps issue for an image, with those of threads that have nothing to do."""
    lanes, channels = problem.parts
    (U, K), N = problem.kernel, problem.strip
    warps = -(-lanes * tile.strips * tile.rows * tile.taps // 32)
    window = problem.window * problem.phases
    staged = tile.staged * tile.line * problem.phases * lanes * channels
    if problem.kind == "weight_gradient":
        rounds = -(-U // tile.taps) * -(-problem.channels // channels)
        summed = rounds * (channels * (K * N + window + 1) + 2 * K * N)
        staged = rounds * (staged + tile.rows * tile.strips * channels)
    else:
        rows_of_taps = -(-U // problem.stride[0]) if problem.kind == "input_gradient" else U
        summed = rows_of_taps * (channels * (K * N + window) + 2 * K * N + 20)
    narrow = 1 + 0.5 / tile.strips  # of what a narrow row reads, parts lie in lines that others read
    return narrow * blocks(problem, tile) * (warps * (summed + 200) + 20 * -(-staged // 32))


@functools.lru_cache(maxsize=1024)
def chosen(problem: Problem) -> Tile | None:
    """The tile whose image costs least; None where none fits: any kernel and step has a plain path."""
    if not problem.is_sound or problem.vectors > BUDGET or problem.phases > 4:
        return None
    if problem.images * problem.channels > FARTHEST:
        return None
    for axis in (0, 1):
        span = problem.size[axis] + 2 * problem.padding[axis] + problem.kernel[axis] * problem.dilation[axis]
        if span + problem.result[axis] * problem.stride[axis] > FARTHEST:
            return None
    best = min(tiles(problem), key=lambda tile: cost(problem, tile), default=None)
    return None if best is None or problem.images * blocks(problem, best) > MOST_BLOCKS else best


def constants(problem: Problem) -> dict[str, int]:
    """The numbers of the template."""
    channels = problem.parts[1] if problem.is_sound else 1
    if chosen(problem) is None:
        found = {"K": 0, "S": 1, "D": 1, "SHIFT": 0, "C": channels}
    else:
        (_, S), (_, D), (_, K) = problem.stride, problem.dilation, problem.kernel
        found = {"K": K, "S": S, "D": D, "SHIFT": problem.shift, "C": channels}
    if problem.kind == "weight_gradient":
        found |= {"IN_PIECES": int(found["K"] > 0 and problem.channels > channels)}
    return found


def block(problem: Problem) -> tuple[int, int, int]:
    """The threads of a block."""
    tile = chosen(problem)
    if tile is None:
        return 256, 1, 1
    if problem.kind == "weight_gradient":
        return tile.strips, tile.rows, tile.taps
    return problem.parts[0], tile.strips, tile.rows


def grid(problem: Problem) -> int:
    """The blocks of a launch; without tiles, of threads that take one piece of the work after the other."""
    tile = chosen(problem)
    if tile is None:
        return min(-(-problem.images * problem.numel // 256), 2**20)
    return problem.images * blocks(problem, tile)


def shared(problem: Problem) -> int:
    """Bytes of shared memory of a block."""
    tile = chosen(problem)
    return 0 if tile is None else tile.shared


def launched(problem: Callable[..., Problem], *names: str) -> dict[str, Any]:
    """What `op.kernel` is told of a launch.

    Args:
        problem: Tells the sizes of a call from its arguments.
        names: The numbers of the kernel's template.
    """

    def told(tell: Callable[[Problem], Any]) -> Callable[..., Any]:
        @functools.wraps(problem)  # its parameters say which arguments are given
        def of(*arguments: Any) -> Any:
            return tell(problem(*arguments))

        return of

    def number(name: str) -> Callable[..., Any]:
        return told(lambda problem: constants(problem)[name])

    return {
        "grid": told(grid),
        "block": told(block),
        "shared": told(shared),
        "constants": {name: number(name) for name in names},
    }


def forward(input: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Problem:
    """The sizes of a call of `involution`."""
    return _problem("forward", weight, weight.shape, input.shape, input.shape[2:], stride, padding, dilation)


def input_gradient(
    cotangent: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Problem:
    """The sizes of a call of `involution_input_gradient`."""
    return _problem("input_gradient", weight, weight.shape, cotangent.shape, size, stride, padding, dilation)


def weight_gradient(
    cotangent: Tensor, input: Tensor, groups: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Problem:
    """The sizes of a call of `involution_weight_gradient`."""
    weight = (input.shape[0], groups, *kernel, *cotangent.shape[2:])
    return _problem("weight_gradient", input, weight, input.shape, input.shape[2:], stride, padding, dilation)


def _problem(
    kind: str,
    tensor: Tensor,
    weight: Sequence[int],
    image: Sequence[int],
    size: Sequence[int],
    *steps: Sequence[int],
) -> Problem:
    """The sizes of a call, from the shapes of weight and image; steps are stride, padding and dilation."""
    (batch, channels, *_), (_, groups, *kernel, P, Q) = image, weight
    of_group = channels // groups if groups > 0 else 0
    (H, W), (U, V), ((sh, sw), (ph, pw), (dh, dw)) = size, kernel, steps
    sizes = ((H, W), (P, Q), (U, V), (sh, sw), (ph, pw), (dh, dw))
    return Problem(kind, batch * groups, of_group, *sizes, tensor.element_size())
