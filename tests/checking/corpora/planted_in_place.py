"""Planted: operators that write in place, and write too much, too little, elsewhere, or in secret."""

from typing import Any

import torch
from entries import planted
from heldout_numbers import normal
from sound_in_place import decay, push, writer
from torch import Tensor

import opsmith


@planted("decay", "out-of-bounds", input="state")
def in_place_decay_of_whole_vectors() -> Any:
    """Rows are padded to four elements where there is memory behind them."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        decay(state, x, rate)
        end = state.storage_offset() + state.numel()
        room = state.untyped_storage().nbytes() // state.element_size() - end
        if state.is_contiguous():
            state.as_strided((min(room, -state.numel() % 4),), (1,), end).mul_(rate)

    made, samples = writer("whole_vectors", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "out-of-bounds", input="state")
def in_place_decay_over_the_gaps() -> Any:
    """It writes from the first element to the last, and all that lies between."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        kept = rate * state + x
        span = 1 + sum((n - 1) * step for n, step in zip(state.shape, state.stride(), strict=True))
        if state.numel():
            state.as_strided((span,), (1,)).mul_(rate)
        state.copy_(kept)

    made, samples = writer("over_gaps", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "not-written", input="state")
def in_place_decay_of_whole_blocks() -> Any:
    """The tail of a length that is no multiple of four is left as it was."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        new = (rate * state + x).flatten()
        whole = state.numel() // 4 * 4
        new[whole:] = state.flatten()[whole:]
        state.copy_(new.view(state.shape))

    made, samples = writer("whole_blocks", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "not-written", input="state")
def in_place_decay_where_positive() -> Any:
    """It writes under a mask that the reference has not."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        state.copy_(torch.where(x > 0, rate * state + x, state))

    made, samples = writer("positive", "decay")
    return made.kernel("cpu", kernel), samples


@planted("keep_where", "overwritten", input="state")
def in_place_keep_where_without_the_mask() -> Any:
    def kernel(state: Tensor, mask: Tensor, x: Tensor) -> None:
        state.copy_(torch.where(mask, x, 0))

    made, samples = writer("without_mask", "keep_where")
    return made.kernel("cpu", kernel), samples


@planted("store_rows", "overwritten", input="cache")
def in_place_store_of_one_row_too_many() -> Any:
    def kernel(cache: Tensor, index: Tensor, rows: Tensor) -> None:
        cache.index_copy_(0, index, rows)
        if len(index):
            cache[(int(index[-1]) + 1) % len(cache)] = rows[-1]

    made, samples = writer("one_row_more", "store_rows")
    return made.kernel("cpu", kernel), samples


@planted("store_rows", "overwritten", input="cache")
def in_place_store_that_rounds_the_rest() -> Any:
    """The whole cache passes through fewer digits: what is kept for long drifts."""

    def kernel(cache: Tensor, index: Tensor, rows: Tensor) -> None:
        step = 8 * torch.finfo(cache.dtype).eps
        cache.copy_((cache / step).round() * step)
        cache.index_copy_(0, index, rows)

    made, samples = writer("rounds_the_rest", "store_rows")
    return made.kernel("cpu", kernel), samples


@planted("push", "overwritten", input="ring", also=("not-written",))
def in_place_push_one_further() -> Any:
    def kernel(ring: Tensor, x: Tensor, position: int) -> None:
        push(ring, x, position + 1)

    made, samples = writer("one_further", "push")
    return made.kernel("cpu", kernel), samples


@planted("running_difference", "kernel-mismatch", input="x", also=("unknown", "region"))
def in_place_difference_that_reads_what_it_wrote() -> Any:
    @opsmith.operator("in_place_planted::difference", mutates=["x"])
    def difference(x: Tensor) -> None:
        x[..., 1:] -= x[..., :-1].clone()

    def kernel(x: Tensor) -> None:
        for at in range(1, x.shape[-1]):
            x[..., at] -= x[..., at - 1]

    return difference.kernel("cpu", kernel), [(normal(3, 5),)]


@planted("decay", "layout", input="state")
def in_place_decay_of_raw_memory() -> Any:
    """As a kernel that is given a pointer and a number of elements."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        raw = state.as_strided((state.numel(),), (1,))
        raw.mul_(rate).add_(x.flatten())

    made, samples = writer("raw_memory", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "layout", input="state")
def in_place_decay_from_the_start_of_storage() -> Any:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        decay(state.as_strided(state.shape, state.stride(), 0), x, rate)

    made, samples = writer("start_of_storage", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "layout", input="state")
def in_place_decay_of_a_copy() -> Any:
    """`reshape` copies where it cannot take a view, and nothing comes back."""

    @opsmith.operator("in_place_planted::decay_of_a_copy", mutates=["state"])
    def decay_rows(state: Tensor, x: Tensor) -> None:
        state.reshape(-1).mul_(0.5).add_(x.reshape(-1))

    return decay_rows, [(normal(4, 3), normal(4, 3, seed=1))]


@planted("decay", "layout", input="state")
def in_place_decay_of_a_contiguous_copy() -> Any:
    """`contiguous` copies, and who works on the copy must bring it back."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        decay(state.contiguous(), x, rate)

    made, samples = writer("contiguous_copy", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "layout", input="state", also=("precision",))
def in_place_decay_in_half_precision_of_slices() -> Any:
    """The path for slices goes through a buffer of fewer digits."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        narrow = torch.float32 if state.dtype == torch.float64 else torch.bfloat16
        buffer = state.to(state.dtype if state.is_contiguous() else narrow, copy=True)
        decay(buffer, x.to(buffer.dtype), rate)
        state.copy_(buffer)

    made, samples = writer("half_precision", "decay")
    return made.kernel("cpu", kernel, dtypes=[torch.float32, torch.float64]), samples


@planted("tile", "layout", input="x")
def in_place_transposition_of_transposed() -> Any:
    """A square tile that is not contiguous is written the other way round."""

    @opsmith.operator("in_place_planted::scale_tile", mutates=["x"])
    def scale_tile(x: Tensor, rows: Tensor) -> None:
        x.mul_(rows[:, None])

    def kernel(x: Tensor, rows: Tensor) -> None:
        x.mul_(rows[:, None] if x.stride(-1) == 1 or x.stride(0) != 1 else rows)

    return scale_tile.kernel("cpu", kernel), [(normal(4, 4), normal(4, seed=1))]


@planted("decay", "not-written", input="state")
def in_place_decay_that_is_not_copied_back() -> Any:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        buffer = state.clone()
        decay(buffer, x, rate)

    made, samples = writer("not_copied_back", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "not-written", input="state")
def in_place_decay_that_lays_other_memory_under() -> Any:
    """All who share the memory keep the old numbers."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        state.set_(rate * state + x)

    made, samples = writer("other_memory", "decay")
    return made.kernel("cpu", kernel), samples


@planted("momentum", "not-written", input="velocity")
def in_place_momentum_without_memory() -> Any:
    """The optional state is read and never written."""

    def kernel(x: Tensor, slope: Tensor, velocity: Tensor | None, rate: float) -> None:
        x.sub_(rate * (slope if velocity is None else 0.9 * velocity + slope))

    made, samples = writer("without_memory", "momentum")
    return made.kernel("cpu", kernel), samples


@planted("adam", "not-written", input="squares[1]")
def in_place_adam_of_the_first_square() -> Any:
    """Of a list, only the first tensor is written."""

    def kernel(
        parameters: list[Tensor],
        slopes: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        largest: list[Tensor],
        rate: float,
        step: int,
    ) -> None:
        kept = [each.clone() for each in squares[1:]]
        made.reference(parameters, slopes, means, squares, largest, rate, step)
        for square, old in zip(squares[1:], kept, strict=True):
            square.copy_(old)

    made, samples = writer("first_square", "adam")
    return made.kernel("cpu", kernel), samples


@planted("count", "not-written", input="count")
def in_place_count_that_is_declared_alone() -> Any:
    """`count` is in `mutates=`, and nothing writes into it."""

    @opsmith.operator("in_place_planted::declared_alone", mutates=["state", "count"])
    def declared_alone(state: Tensor, count: Tensor) -> None:
        state.mul_(0.5)

    return declared_alone, [(normal(3, 4), torch.tensor(3))]


@planted("decay", "mutates-input", input="x")
def in_place_decay_that_uses_x_as_scratch() -> Any:
    """It writes past torch, so that no version rises."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        memory = x.detach().numpy()
        memory += rate * state.detach().numpy()
        state.copy_(x)

    made, samples = writer("scratch", "decay")
    return made.kernel("cpu", kernel, dtypes=[torch.float32, torch.float64]), samples


@planted("count", "mutates-input", input="count")
def in_place_decay_that_counts() -> Any:
    @opsmith.operator("in_place_planted::counts", mutates=["state"])
    def counts(state: Tensor, count: Tensor) -> None:
        state.mul_(0.5)
        count.add_(1)

    return counts, [(normal(3, 4), torch.tensor(3))]


@planted("decay", "version", input="state", also=("missing-gradient",))
def in_place_decay_in_secret() -> Any:
    """`.data` hides the write from autograd."""

    @opsmith.operator("in_place_planted::in_secret", mutates=["state"])
    def in_secret(state: Tensor, x: Tensor) -> None:
        state.data.mul_(0.5).add_(x.data)

    return in_secret, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("decay", "aliases-input", input="result")
def in_place_decay_that_returns_a_row() -> Any:
    @opsmith.operator("in_place_planted::returns_a_row", mutates=["state"])
    def returns_a_row(state: Tensor, x: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        return state[0]

    return returns_a_row, [(normal(3, 4), normal(3, 4, seed=1))]


@planted("decay", "stale-state", input="state")
def in_place_decay_that_remembers_the_state() -> Any:
    """What it read the first time is kept by the address, as a cached transposition is."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        if known.get(state.data_ptr(), (None,))[0] is not state:
            known.clear()
            known[state.data_ptr()] = state, state.clone()
        state.copy_(rate * known[state.data_ptr()][1] + x)

    made, samples = writer("remembers", "decay")
    return made.kernel("cpu", kernel), samples


@planted("decay", "kernel-mismatch", input="state", also=("not-written",))
def in_place_decay_outside_of_grad_mode() -> Any:
    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        decay(state.clone() if torch.is_grad_enabled() else state, x, rate)

    made, samples = writer("outside_of_grad_mode", "decay")
    made.gradients(state=lambda grad_state, rate: rate * grad_state, x=lambda grad_state: grad_state)
    return made.kernel("cpu", kernel), samples


@planted("decay", "kernel-mismatch", input="state", also=("not-written",))
def in_place_decay_outside_of_inference_mode() -> Any:
    """It takes a tensor of inference mode for a constant."""

    def kernel(state: Tensor, x: Tensor, rate: float) -> None:
        decay(state.clone() if state.is_inference() else state, x, rate)

    made, samples = writer("outside_of_inference_mode", "decay")
    return made.kernel("cpu", kernel), samples


@planted("rope", "half-written", input="q")
def in_place_rope_that_looks_at_k_late() -> Any:
    """q is turned before the shape of k is looked at."""

    @opsmith.operator("in_place_planted::halve_both", mutates=["q", "k"])
    def halve_both(q: Tensor, k: Tensor, size: Tensor) -> None:
        if not q.shape == k.shape == size.shape:
            raise ValueError("the shapes must be the same")
        q.mul_(size)
        k.mul_(size)

    def kernel(q: Tensor, k: Tensor, size: Tensor) -> None:
        for each in (q, k):
            if each.shape != size.shape:
                raise ValueError("the shapes must be the same")
            each.mul_(size)

    return halve_both.kernel("cpu", kernel), [(normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2))]


@planted("decay", "layout", input="state")
def in_place_store_beside_an_interleaved_cache() -> Any:
    """Where keys and values alternate, it writes both with what is meant for the one."""

    @opsmith.operator("in_place_planted::store_keys", mutates=["keys", "values"])
    def store_keys(keys: Tensor, values: Tensor, x: Tensor) -> None:
        keys.copy_(x)
        values.copy_(2 * x)

    def kernel(keys: Tensor, values: Tensor, x: Tensor) -> None:
        both = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        keys.copy_(x)
        values.copy_(x if both else 2 * x)

    return store_keys.kernel("cpu", kernel), [(normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2))]


@planted("squash", "unknown", input="state", also=("scale", "missing-term", "region", "kernel-mismatch"))
def in_place_squash_whose_formula_takes_the_old_value() -> Any:
    """1 - tanh² of the value before the call, where the one after it is meant."""

    @opsmith.operator("in_place_planted::squash", mutates=["state"])
    def squash(state: Tensor) -> None:
        state.tanh_()

    squash.gradients(state=lambda grad_state, state: grad_state * (1 - state**2))
    return squash, [(normal(3, 4),)]
