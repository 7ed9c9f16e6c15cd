"""Forms of an input: a tensor that has one in every sample, such as symmetry, keeps it in changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import is_symmetric
from opsmith.judging.compare import largest_magnitude
from opsmith.judging.tensors import is_inexact

FEWEST = 3
"""Fewest elements that show a rule: with two, chance does it."""


@dataclass(frozen=True)
class Form:
    """Form that one tensor has in every sample.

    Args:
        label: Label of the argument.
        restored: The tensor that has it in place of a given one, from a tensor of the sample and that one.
        broken: Words for a tensor without it; empty where no such tensor is tried.
        breaking: Special values without it.
    """

    label: str
    restored: Callable[[Tensor, Tensor], Tensor]
    broken: str = ""
    breaking: tuple[float, ...] = (0.0, -0.0)

    def restore(self, given: Mapping[str, Any], changed: dict[str, Any]) -> None:
        """Restore the form in arguments that were changed, as a rule does."""
        had, now = given.get(self.label), changed.get(self.label)
        if isinstance(had, Tensor) and isinstance(now, Tensor) and now is not had:
            changed[self.label] = self.restored(had, now)


def forms_of(subject: Subject) -> tuple[Form, ...]:
    """The forms that inputs have in every sample of the author.

    Example:
        >>> import torch, opsmith
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> @opsmith.operator("demo::inverse")
        ... def inverse(x: torch.Tensor) -> torch.Tensor:
        ...     return x.inverse()
        >>> given = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> symmetric, definite = forms_of(subject_of(inverse, [(given,)], 0, EFFORTS["quick"]))
        >>> symmetric.restored(given, torch.tensor([[2.0, 1.0], [0.0, 2.0]]))
        tensor([[2., 0.],
                [0., 2.]])
    """
    samples = subject.samples
    find = partial(_forms_of, samples, subject if subject.kind.own_forward else None)
    return subject.once("forms", samples[0], find) if samples else ()


def symmetric_inputs(subject: Subject) -> frozenset[str]:
    """Labels of the inputs that are symmetric matrices in every sample of the author, and not by chance."""
    return frozenset(form.label for form in forms_of(subject) if form.restored is _mirrored)


def _forms_of(every_sample: Sequence[Sample], function_class: Subject | None) -> tuple[Form, ...]:
    """The forms; norms of a class alone, since a reference says what is right for all vectors."""
    samples, found = [each for each in every_sample if not each.origin], list[Form]()
    for label in dict.fromkeys(each.labels[argnum] for each in samples for argnum in each.inexact):
        places = [(each, each.labels.index(label)) for each in samples if label in each.labels]
        values = [each.flat[at] for each, at in places if at in each.inexact and each.flat[at].numel()]
        every = [value.detach().cpu() for value in values]
        matrices = [each for each in every if each.dim() < 2 or each.shape[-2:] != (1, 1)]
        if all(map(is_symmetric, matrices)) and any(map(_shows_symmetry, matrices)):
            share = min(map(_least_share, every))
            found.append(Form(label, _mirrored))
            found += [Form(label, partial(_definite, share))] * (share > 0)
        else:
            found += [Form(label, partial(_with_equal, *places)) for places in _equal_places(every)]
            norms = _norms(every)[:1] if function_class is not None else []
            found += [Form(label, partial(_of_norm_one, *rule), NOT_ONE[rule[0]]) for rule in norms]
            if function_class is not None and not norms:
                bounds = islice(_bounds(function_class, places), 1)
                found += [Form(label, partial(_within, *rule), BEYOND[rule[0]], OUTSIDE) for rule in bounds]
    return tuple(found)


NOT_ONE = {
    1: "and no longer sums to one, although it sums to one in every sample",
    2: "and no longer has norm one, although it has norm one in every sample",
}

FEW_DIGITS = 1e-5
"""Eps of dtypes in which chance gives vectors a norm of one."""

Dims = tuple[int, ...]

_VECTORS: tuple[Dims, ...] = ((-1,), (-2,), ())
"""Dimensions of the vectors that a tensor may hold: rows, columns, or itself."""


def _norms(every: Sequence[Tensor]) -> list[tuple[int, Dims]]:
    """The norms, 1 of probabilities and 2 of unit vectors, that are one for all vectors in all tensors.

    Vectors of zeros and ones have it by chance if they are few, or rows and columns both, as of the identity.
    """
    held = partial(_is_of_norm_one, every)
    found = [rule for rule in product((1, 2), _VECTORS) if held(*rule) and _sizes(rule[1], every)[0] > 1]
    if any(bool(((each != 0) & (each.abs() != 1)).any()) for each in every):
        return found
    both = held(1, (-1,)) and held(1, (-2,))
    return [] if both else [rule for rule in found if _sizes(rule[1], every)[1] >= FEWEST]


def _sizes(dims: Dims, every: Sequence[Tensor]) -> tuple[int, int]:
    """The size of the largest of the vectors, and their number."""
    sizes = [each.shape[dims[0]] if dims else each.numel() for each in every]
    return max(sizes), sum(each.numel() // size for each, size in zip(every, sizes, strict=True))


def _is_of_norm_one(every: Sequence[Tensor], order: int, dims: Dims) -> bool:
    for vectors in every:
        negative = order == 1 and (vectors.is_complex() or bool((vectors < 0).any()))
        if negative or vectors.dim() < max((-dim for dim in dims), default=1):
            return False
        eps, size = torch.finfo(vectors.dtype).eps, vectors.shape[dims[0]] if dims else vectors.numel()
        off = (_norm(order, dims, vectors) - 1).abs()
        if eps > FEW_DIGITS or bool((off > (8 + 2 * math.sqrt(size)) * eps).any()):
            return False
    return bool(every)


def _norm(order: float, dims: Dims, vectors: Tensor) -> Tensor:
    wide = vectors.to(torch.complex128 if vectors.is_complex() else torch.float64)
    norms: Tensor = torch.linalg.vector_norm(wide, order, dims or None, keepdim=True)
    return norms


def _of_norm_one(order: int, dims: Dims, given: Tensor, changed: Tensor) -> Tensor:
    """The tensor with each vector divided by its norm; a vector of zeros keeps the sample's values."""
    if changed.dim() < given.dim() or not changed.numel() or not bool(changed.isfinite().all()):
        return changed
    made = changed.clamp(min=0) if order == 1 else changed
    norm = _norm(order, dims, made)
    count = changed.shape[dims[0]] if dims else changed.numel()
    usual = given if given.shape == changed.shape else torch.full_like(changed, count ** (-1 / order))
    return torch.where(norm > 0, made / norm, usual).to(changed.dtype)


BEYOND = {
    2.0: "and no longer has norms below one, as in every sample",
    math.inf: "and is no longer between -1 and 1, as in every sample",
}

OUTSIDE = (2.0, -2.0, 3.0, -3.0)
"""Values outside of a unit ball."""

INSIDE = (2.0**-3, 2.0**-5, 2.0**-7)
"""Distances from a bound at which slopes are measured."""

STEEPER = 1.6
"""Minimum growth of a slope from one to the next: a square root has 2, a logarithm 4."""

FLAT = 0.25
"""Maximum slope beyond a bound, as a share of the slope before it."""

NEAR = 0.9
"""Norm that is restored, if no sample has a larger one."""


def _bounds(subject: Subject, places: Sequence[tuple[Sample, int]]) -> Iterator[tuple[float, Dims, float]]:
    """The norms that are at most one in all samples, and at which the forward ends; with the largest norm to
    restore.

    Small numbers have such norms by chance, but no forward ends at these. It ends where its slope grows like
    that of a root or of a logarithm, and beyond is flat, not finite or an exception, as of a distance in the
    Poincaré ball, or of an arcsine. A projection into a ball has a kink there, and does not end.
    """
    where = [(sample, at) for sample, at in places if at in sample.inexact and sample.flat[at].numel()]
    for order, dims in (*product((2.0,), _VECTORS), (math.inf, ())):
        if any(sample.flat[at].dim() < max((-dim for dim in dims), default=1) for sample, at in where):
            continue
        norms = [_lengths(order, dims, sample.flat[at].detach().cpu()) for sample, at in where]
        most = max(map(largest_magnitude, norms), default=0.0)
        if not 0 < most <= 1 or subject.draws:
            continue
        vectors = ((at, one) for at, every in enumerate(norms) for one in every.flatten().nonzero()[:FEWEST])
        chosen = [(*where[at], norms[at], int(one)) for at, one in islice(vectors, FEWEST)]
        if all(_ends_at_one(subject, *vector) for vector in chosen):
            yield order, dims, max(most, NEAR)


def _lengths(order: float, dims: Dims, tensor: Tensor) -> Tensor:
    """The norms of vectors; of numbers alone, their absolute values."""
    return tensor.abs().double() if order == math.inf else _norm(order, dims, tensor)


def _ends_at_one(subject: Subject, sample: Sample, argnum: int, norms: Tensor, one: int) -> bool:
    """True if the forward ends where a vector has norm one, and the other vectors stay."""
    chosen = torch.zeros_like(norms, dtype=torch.bool)
    chosen.view(-1)[one] = True

    def results(norm: float) -> Tensor | None:
        flat = sample.in_double()
        flat[argnum] = flat[argnum] * torch.where(chosen, norm / norms, 1.0)
        with Overlooking(), torch.no_grad():  # the properties report its exceptions for a sample
            found = [each.double().flatten() for each in subject.plain(sample)(flat) if is_inexact(each)]
            return torch.cat(found).cpu() if found else None
        return None

    def slope(distance: float) -> float:
        """The slope at a distance from one; nan if it is not finite, or if the forward raises."""
        below, above = (results(1 - distance + side * distance / 4) for side in (-1, 1))
        if below is None or above is None or below.shape != above.shape:
            return math.nan
        return float((above - below).norm()) / abs(distance / 2)

    steepest = 0.0
    for distance in INSIDE:
        now = slope(distance)
        if not 0 < now < math.inf or now < STEEPER * steepest:
            return False
        steepest = now
    return not slope(-INSIDE[-1]) > FLAT * steepest


def _within(order: float, dims: Dims, most: float, given: Tensor, changed: Tensor) -> Tensor:
    """The tensor with each vector shortened to a norm."""
    if changed.dim() < max((-dim for dim in dims), default=0) or not bool(changed.isfinite().all()):
        return changed
    norms = _lengths(order, dims, changed)
    return torch.where(norms > most, changed * (most / norms), changed).to(changed.dtype)


def _shows_symmetry(matrices: Tensor) -> bool:
    """True where no chance makes a matrix symmetric, as it makes one that is diagonal or constant."""
    off = matrices - torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1))
    return bool(off.any()) and bool((matrices != matrices.flatten()[0]).any())


def _moved(given: Tensor, changed: Tensor) -> Tensor:
    """Mark the elements that were changed, of tensors of one shape."""
    had = given.detach().to(changed)
    return (had != changed) & ~(had.isnan() & changed.isnan())


def _is_square(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and tensor.numel() > 0


def _mirrored(given: Tensor, changed: Tensor) -> Tensor:
    """The matrix with its lower triangle in the upper one; what was changed there alone, in the lower one."""
    if not _is_square(changed):
        return changed
    if given.shape != changed.shape:
        return (changed + changed.mH) / 2
    moved = _moved(given, changed)
    follows = (~(moved & ~moved.mT)).triu(1) | (moved.mT & ~moved).tril(-1)
    return torch.where(follows, changed.mH, changed)


def _least_share(matrices: Tensor) -> float:
    """The smallest eigenvalue of symmetric matrices as a share of the largest one, in the worst of them."""
    values = torch.linalg.eigvalsh(_scaled(matrices)[0])
    return float((values[..., 0] / values.abs().amax(-1)).nan_to_num().min())


def _scaled(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices over their largest element, so that no eigenvalue overflows, and that element."""
    wide = matrices.to(torch.complex128 if matrices.is_complex() else torch.float64)
    scale = wide.abs().amax()
    scale = torch.where(scale > 0, scale, 1.0)
    return wide / scale, scale


LARGEST_SHARE = 0.5
"""Largest such share that is restored: only a multiple of the identity has all of it."""


def _definite(share: float, given: Tensor, changed: Tensor) -> Tensor:
    """The matrices with larger diagonals where they are not positive definite.

    Args:
        share: The smallest eigenvalue in every sample as a share of the largest one.
        given: The tensor of the sample.
        changed: Symmetric matrices.
    """
    if not _is_square(changed) or not bool(changed.isfinite().all()):
        return changed
    wide, scale = _scaled(changed)
    if not bool(torch.linalg.cholesky_ex(wide).info.any()):
        return changed
    values = torch.linalg.eigvalsh(wide)
    share, least, most = min(share, LARGEST_SHARE), values[..., 0], values.abs().amax(-1)
    added = (share * torch.where(most > 0, most, 1.0) - least) / (1 - share)
    more = torch.where(least > 0, 0.0, added * scale)[..., None, None]
    return changed + (more * torch.eye(changed.shape[-1], device=changed.device)).to(changed.dtype)


MOST_PLACES = 64
"""Largest size of rows in which equal elements are looked for."""


def _equal_places(every: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Pairs of places of a row that hold the same in every row, after the size of the rows."""
    sizes = {each.shape[-1] if each.dim() else 0 for each in every}
    size = max(sizes, default=0)
    if len(sizes) != 1 or not 2 < size <= MOST_PLACES:
        return []
    rows = [each.reshape(-1, size) for each in every]
    firsts: dict[complex, int] = {}
    places = [(firsts.setdefault(value, at), at) for at, value in enumerate(rows[0][0].tolist())]
    pairs = [(size, first, at) for first, at in places if first < at and _alike(rows, first, at)]
    return pairs if len(pairs) < size - 1 else []  # an expanded tensor holds the same in every place


def _alike(every: Sequence[Tensor], one: int, other: int) -> bool:
    """True for places that hold equal numbers, of which enough differ from row to row."""
    same = all(torch.equal(rows[:, one], rows[:, other]) for rows in every)
    return same and len({value for rows in every for value in rows[:, one].tolist()}) >= FEWEST


def _with_equal(size: int, first: int, second: int, given: Tensor, changed: Tensor) -> Tensor:
    """The tensor with the same in two places of each row: what was changed there, first of the first one."""
    if not changed.dim() or changed.shape[-1] != size:
        return changed
    same = changed[..., first]
    if given.shape == changed.shape:
        moved = _moved(given, changed)
        same = torch.where(moved[..., second] & ~moved[..., first], changed[..., second], same)
    made = changed.clone(memory_format=torch.contiguous_format)
    made[..., first] = made[..., second] = same
    return made


def placed(
    forms: Sequence[Form], given: Tensor, special: Mapping[int, complex]
) -> tuple[Tensor, dict[int, complex]]:
    """A tensor with other values in some places, and what stands there once its forms are restored.

    In a symmetric matrix they stand in both triangles; one that stands on a diagonal which must be larger for
    the matrix to be positive definite is left out.

    Args:
        forms: The forms of the input.
        given: Its own values.
        special: The other values, by position.
    """
    changed = given.clone(memory_format=torch.contiguous_format)
    for position, value in special.items():
        changed.view(-1)[position].fill_(value)
    for form in forms:
        changed = form.restored(given, changed)
    if not forms:
        return changed, {**special}
    places = {*special, *_moved(given, changed).flatten().nonzero().flatten().tolist()}
    now = {position: changed.contiguous().view(-1)[position].item() for position in sorted(places)}
    known = {*map(repr, map(complex, special.values()))}
    return changed, {at: value for at, value in now.items() if repr(complex(value)) in known}
