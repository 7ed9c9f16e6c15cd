"""Launch parameters of the CUDA kernels of involution: the tile of a block, chosen by the sizes of a call.

The layout of a tile in shared memory is computed as `layout` in cuda/involution.cuh does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

VECTOR = 16
"""Bytes of shared memory that a thread reads at once; a strip has as many bytes, in the type of the sums."""
LANES, CHANNELS = 4, 4
"""Maximum number of threads that share the channels of a strip, and channels of a thread at a time."""
STAGED = 16
"""Number of a group's channels in shared memory at a time, while the weight's gradient is summed."""
SHARED = 48 * 1024
"""Bytes of shared memory of a block, which every GPU has by default: three such blocks fit on sm_80."""
NARROWEST = 4
"""Minimum number of strips of a tile, if the row has as many: in 16 bits they are a sector of 32 bytes."""
LONGEST = 32
"""Maximum number of strips, and of rows, of a tile."""
MOST_THREADS = {"forward": 128, "input_gradient": 128, "weight_gradient": 256}
"""Number of threads of a block for which the kernels are compiled."""
BUDGET = 22
"""Maximum number of vectors of registers; with more, the plain path is used."""
FARTHEST = 2**30
"""Limit of rows and columns (windows beyond the image included) and channels: tiles use 32-bit integers."""

MOST_BLOCKS = 2**31 - 1
"""Maximum number of blocks of a launch."""

Pair = tuple[int, int]


class Problem(NamedTuple):
    """The sizes of a call.

    Attributes:
        kind: Name of the kernel, one of three.
        images: B G.
        channels: Number of channels of a group.
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
        """True if all sizes are valid; for invalid sizes the reference raises an error."""
        steps = (*self.stride, *self.dilation, *self.size, *self.result, *self.kernel)
        return self.channels > 0 and min(steps) > 0 and min(self.padding) >= 0

    @property
    def numel(self) -> int:
        """Number of items in a group of an image; a thread's item is a number, or channels of a pixel."""
        rows, columns = self.size if self.kind == "input_gradient" else self.result
        if self.kind == "weight_gradient":
            return self.kernel[0] * self.kernel[1] * rows * columns
        return -(-self.channels // self.parts[1]) * rows * columns

    @property
    def strip(self) -> int:
        """Number of pixels of a strip; 16-bit types are computed in float32."""
        return VECTOR // max(4, self.itemsize)

    @property
    def parts(self) -> tuple[int, int]:
        """Number of threads that share the channels of a strip, and number of channels of each at a time."""
        if self.kind == "weight_gradient":
            return 1, -(-self.channels // -(-self.channels // STAGED))
        at_once = -(-self.channels // -(-self.channels // (LANES * CHANNELS)))
        lanes = LANES if at_once > 4 else 2 if at_once > 1 else 1
        return lanes, -(-at_once // lanes)

    @property
    def reach(self) -> int:
        """Number of columns between the last tap and a strip of the input's gradient."""
        return (self.kernel[1] - 1) * self.dilation[1] // self.stride[1]

    @property
    def first(self) -> int:
        """First column of the input's gradient as its kernel counts columns: in strides, with the padding."""
        return self.padding[1] // self.stride[1]

    @property
    def shift(self) -> int:
        """Number of columns of a tile before the first tap; the tile begins at a multiple of a strip."""
        begin = self.first - self.reach if self.kind == "input_gradient" else -self.padding[1]
        return begin % self.strip

    @property
    def window(self) -> int:
        """Number of vectors of one phase of a window."""
        span = self.reach
        if self.kind != "input_gradient":
            span = (self.shift + (self.kernel[1] - 1) * self.dilation[1]) // self.stride[1]
        else:
            span += self.shift
        return (span + self.strip - 1) // self.strip + 1

    @property
    def phases(self) -> int:
        """Number of phases into which columns are divided in shared memory."""
        return 1 if self.kind == "input_gradient" else self.stride[1]

    @property
    def vectors(self) -> int:
        """Number of vectors of registers for weights, sums and a window."""
        sums = {
            "forward": self.parts[1],
            "input_gradient": self.parts[1] * self.stride[1],
            "weight_gradient": 1,
        }
        return self.kernel[1] + sums[self.kind] + self.window * self.phases

    @property
    def area(self) -> Pair:
        """Number of rows and columns that tiles cover."""
        if self.kind != "input_gradient":
            return self.result
        last = (self.size[1] - 1 + self.padding[1]) // self.stride[1]
        return self.size[0], last - self.first + 1


class Tile(NamedTuple):
    """The part of the result that a block computes.

    Attributes:
        strips, rows: Size of the tile.
        taps: Number of rows of taps at once, for the weight's gradient. staged: Number of its rows in shared
            memory. line, row, plane: Their strides, in vectors.
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
    """Return the tile with this number of strips and rows."""
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
    """Return sizes of up to `LONGEST` that divide a length as evenly as possible."""
    sizes = range(1, min(length, LONGEST) + 1)
    return [size for size in sizes if -(-length // -(-length // size)) == size]


def tiles(problem: Problem) -> Iterator[Tile]:
    """Yield the possible tiles of a block."""
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
    """Return the number of blocks for one group of one image."""
    rows, columns = problem.area
    lanes, channels = problem.parts
    pieces = 1 if problem.kind == "weight_gradient" else -(-problem.channels // (lanes * channels))
    return -(-rows // tile.rows) * -(-columns // (tile.strips * problem.strip)) * pieces


def cost(problem: Problem, tile: Tile) -> float:
    """Estimate the instructions that warps issue for an image, idle threads included.

    Each row of taps of the weight's gradient counts a copy of the tile, which most variants make only once.
    """
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
    narrow = 1 + 0.5 / tile.strips  # a narrow row shares cache lines with neighbours
    return narrow * blocks(problem, tile) * (warps * (summed + 200) + 20 * -(-staged // 32))


@functools.lru_cache(maxsize=1024)
def chosen(problem: Problem) -> Tile | None:
    """Return the cheapest tile; None if no tile fits, so that the plain path is used."""
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
    """Return the parameters of the template."""
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
    """Return the number of threads of a block."""
    tile = chosen(problem)
    if tile is None:
        return MOST_THREADS[problem.kind], 1, 1
    if problem.kind == "weight_gradient":
        return tile.strips, tile.rows, tile.taps
    return problem.parts[0], tile.strips, tile.rows


def grid(problem: Problem) -> int:
    """Return the number of blocks of a launch; without tiles, threads loop over the items."""
    tile = chosen(problem)
    if tile is None:
        return min(-(-problem.images * problem.numel // MOST_THREADS[problem.kind]), 2**20)
    return problem.images * blocks(problem, tile)


def shared(problem: Problem) -> int:
    """Return the bytes of shared memory of a block."""
    tile = chosen(problem)
    return 0 if tile is None else tile.shared


def launched(problem: Callable[..., Problem], *names: str) -> dict[str, Any]:
    """Return the options of `op.kernel` for a launch.

    Args:
        problem: Function that returns the sizes of a call from its arguments.
        names: Parameters of the kernel's template.
    """

    def rule(value: Callable[[Problem], Any]) -> Callable[..., Any]:
        @functools.wraps(problem)  # its parameter names are the names of the arguments
        def of(*arguments: Any) -> Any:
            return value(problem(*arguments))

        return of

    def number(name: str) -> Callable[..., Any]:
        return rule(lambda problem: constants(problem)[name])

    return {
        "grid": rule(grid),
        "block": rule(block),
        "shared": rule(shared),
        "constants": {name: number(name) for name in names},
    }


def forward(input: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Problem:
    """Return the sizes of a call of `involution`."""
    return _problem("forward", weight, weight.shape, input.shape, input.shape[2:], stride, padding, dilation)


def input_gradient(
    cotangent: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Problem:
    """Return the sizes of a call of `involution_input_gradient`."""
    return _problem("input_gradient", weight, weight.shape, cotangent.shape, size, stride, padding, dilation)


def weight_gradient(
    cotangent: Tensor, input: Tensor, groups: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Problem:
    """Return the sizes of a call of `involution_weight_gradient`."""
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
    """Return the sizes of a call from the shapes of weight and image; steps: stride, padding, dilation."""
    (batch, channels, *_), (_, groups, *kernel, P, Q) = image, weight
    of_group = channels // groups if groups > 0 else 0
    (H, W), (U, V), ((sh, sw), (ph, pw), (dh, dw)) = size, kernel, steps
    sizes = ((H, W), (P, Q), (U, V), (sh, sw), (ph, pw), (dh, dw))
    return Problem(kind, batch * groups, of_group, *sizes, tensor.element_size())
