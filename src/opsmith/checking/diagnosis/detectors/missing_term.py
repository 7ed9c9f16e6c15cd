"""A term of it is missing, has the other sign, or counts more than once.

Terms are found in three ways: what comes in for one of several results; what comes in for some elements of a
result; and what flows through one edge of the reference. The gradient is linear in each of them, so that the
difference from the right one has to be a multiple of the term, and the same multiple on every fresh input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from opsmith.checking.diagnosis.conditions import RELATIONS
from opsmith.checking.diagnosis.detectors.paths import Edge
from opsmith.checking.diagnosis.detectors.scale import factor_of, shown_factor
from opsmith.checking.diagnosis.hypothesis import Found, Pair, Seen
from opsmith.checking.diagnosis.region import along
from opsmith.checking.numerics.compare import peak, wide

PAIRS = 30
"""Of how many different edges every two are tried together."""

Term = Callable[[Pair], Tensor | None]
"""A term of the right gradient of a pair; None where it has none."""


def missing_term(seen: Seen) -> Iterator[Found]:
    """A term that does not count as once: of a result, of some of its elements, of an edge, of two edges."""
    if not seen.first.same_shape or not bool(seen.first.mine.isfinite().all()):
        return
    for missing in (True, False):
        for terms in (_of_results, _of_elements, _of_edges):
            for words, term in terms(seen):
                found = _tested(seen, words, term, missing=missing)
                if found is not None:
                    yield found
                    return
        if missing:
            for hypothesis in (_of_two_edges, _of_a_summand):
                for each in hypothesis(seen):
                    yield each
                    return


def _tested(seen: Seen, words: str, term: Term, *, missing: bool) -> Found | None:
    """What a term counts as, if that explains every pair: as nothing, or as something else than once."""
    first = term(seen.first)
    if first is None or _trivial(seen.first, first):
        return None
    weight = float((first.abs() ** 2).sum())
    off = seen.first.mine - seen.first.right
    ratio = complex((first.conj() * off).sum() / weight)
    times = 1 + (ratio if first.is_complex() and abs(ratio.imag) > 1e-9 else ratio.real)
    for plain in (0.0, -1.0, 2.0):
        times = plain if abs(times - plain) < 1e-6 else times
    if missing != (times == 0):
        return None
    if times != 0 and (not seen.fresh or factor_of(Pair(replace(seen.observation, got=first)))):
        return None  # a multiple of a term that is a multiple of all says nothing of that term
    more = (times - 1) if isinstance(times, complex) else float(times) - 1

    def holds(pair: Pair) -> bool:
        found = term(pair)
        return found is not None and pair.is_(pair.right + more * found)

    if not seen.everywhere(holds):
        return None
    evidence = {"term": words, "times": times}
    if times == 0:
        return Found("missing-term", f"it lacks {words}", evidence)
    if times == -1:
        return Found("sign", f"it has {words} with the other sign", evidence, weak=True)
    reason = f"it has {shown_factor(times)} times {words}, where once is right"
    return Found("scale", reason, evidence, weak=True)


def _trivial(pair: Pair, term: Tensor) -> bool:
    """Whether a term is nothing, or everything: then there is nothing to tell."""
    return peak(term) <= pair.rounding or peak(term - pair.right) <= pair.rounding


def _of_results(seen: Seen) -> Iterator[tuple[str, Term]]:
    """What comes in for each of several results."""
    names = [name for name, grad in seen.observation.grads.items() if grad is not None]
    for name in names if len(names) > 1 else ():
        yield f"what comes in for `{name}`", partial(_for_result, name=name)


def _for_result(pair: Pair, name: str) -> Tensor | None:
    grads = pair.observation.grads
    alone = [grad if each == name else _zeros(grad) for each, grad in grads.items()]
    return _right(pair, alone)


def _zeros(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else torch.zeros_like(grad)


def _right(pair: Pair, grads: list[Tensor | None]) -> Tensor | None:
    right = pair.observation.right
    return None if right is None else wide(right(grads))


def _of_elements(seen: Seen) -> Iterator[tuple[str, Term]]:
    """What comes in for some elements of a result: the last row, the tail, where a number is negative."""
    several = len(seen.observation.grads) > 1
    for name, grad in seen.observation.grads.items():
        if grad is None:
            continue
        of = f" of `{name}`" if several else " of the result"
        for dim, size in enumerate(grad.shape):
            for words, rule in _rules(size):
                term = partial(_for_indices, name=name, dim=dim, rule=rule)
                yield f"what comes in for {words.format('index')} of dimension {dim}{of}", term
        for label, lying in _beside(seen.first, name).items():
            if lying.dtype == torch.bool:
                for truth in (True, False):
                    term = partial(_for_mask, name=name, label=label, test=partial(torch.eq, other=truth))
                    yield f"what comes in where {label} is {truth}", term
                continue
            for words, relation in RELATIONS.items():
                term = partial(_for_mask, name=name, label=label, test=partial(_to_zero, relation=relation))
                yield f"what comes in where {label} {words} 0", term


def _rules(size: int) -> Iterator[tuple[str, Callable[[int], frozenset[int]]]]:
    """Sets of indices along a dimension: the first, the last, tails; each description once."""
    known: set[frozenset[int]] = set()
    sets = [{0}, {size - 1}, set(range(1, size)), set(range(size - 1))]
    sets += [{0, size - 1}, set(range(1, size - 1)), set(range(0, size, 2)), set(range(1, size, 2))]
    sets += [set(range(size // width * width, size)) for width in (2, 4, 8, 16, 32, 64)]
    for each in map(frozenset, sets):
        if each in known or not 0 < len(each) < size:
            continue
        known.add(each)
        for rule in along(each, size):
            yield rule.words, rule.at
            break


def _for_indices(pair: Pair, name: str, dim: int, rule: Callable[[int], frozenset[int]]) -> Tensor | None:
    grad = pair.observation.grads.get(name)
    if grad is None or dim >= grad.dim():
        return None
    kept = torch.zeros(grad.shape[dim], dtype=torch.bool)
    kept[sorted(rule(grad.shape[dim]))] = True
    return _masked(pair, name, kept.reshape(-1, *[1] * (grad.dim() - dim - 1)))


def _beside(pair: Pair, name: str) -> dict[str, Tensor]:
    """Inputs and results that lie beside the elements of a result."""
    seen = pair.observation
    grad = seen.grads[name]
    named = {f"`{label}`": each for label, each in {**seen.inputs, **seen.results}.items()}
    return {
        label: each.detach().cpu()
        for label, each in named.items()
        if isinstance(each, Tensor)
        and not each.is_complex()
        and grad is not None
        and each.shape == grad.shape
    }


def _to_zero(lying: Tensor, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return relation(lying, torch.zeros_like(lying))


def _for_mask(pair: Pair, name: str, label: str, test: Callable[[Tensor], Tensor]) -> Tensor | None:
    beside = _beside(pair, name)
    return _masked(pair, name, test(beside[label])) if label in beside else None


def _masked(pair: Pair, name: str, kept: Tensor) -> Tensor | None:
    masked: list[Tensor | None] = []
    for each, grad in pair.observation.grads.items():
        masked.append(_zeros(grad) if grad is None or each != name else grad * kept.to(grad.device))
    return _right(pair, masked)


def _of_edges(seen: Seen) -> Iterator[tuple[str, Term]]:
    """What flows through each edge of the reference."""
    paths = seen.first.paths
    for edge in paths.edges if paths is not None else ():
        yield f"what flows through {edge}", partial(_through, edge=edge)


def _through(pair: Pair, edge: Edge) -> Tensor | None:
    paths = pair.paths
    found = None if paths is None else paths.through(edge)
    return None if found is None else wide(found)


def _of_two_edges(seen: Seen) -> Iterator[Found]:
    """Two edges that are cut together: those of one operation first."""
    paths = seen.first.paths
    if paths is None:
        return
    distinct: list[Edge] = []
    for edge in paths.edges:
        mine = _through(seen.first, edge)
        if mine is None or _trivial(seen.first, mine):
            continue
        known = [_through(seen.first, other) for other in distinct]
        if not any(peak(mine - other) <= seen.first.rounding for other in known if other is not None):
            distinct.append(edge)
    pairs = sorted(combinations(distinct[:PAIRS], 2), key=lambda two: two[0].call != two[1].call)
    for one, other in pairs:
        if seen.everywhere(partial(_without, one=one, other=other)):
            words = f"it lacks what flows through {one} and through {other}"
            yield Found("missing-term", words, {"term": f"{one} and {other}", "times": 0.0})
            return


def _without(pair: Pair, one: Edge, other: Edge) -> bool:
    paths = pair.paths
    left = None if paths is None else paths.without(one, other)
    return left is not None and pair.is_(wide(left))


SUMS = frozenset({"add", "sub", "rsub", "__radd__", "__rsub__", "add_", "sub_", "__iadd__", "__isub__"})


def _of_a_summand(seen: Seen) -> Iterator[Found]:
    """The gradient of the reference without a summand, as of a variance that is taken about zero."""
    paths = seen.first.paths
    for edge in paths.edges if paths is not None else ():
        if edge.operation in SUMS and edge.slot >= 0 and seen.everywhere(partial(_left_out, edge=edge)):
            words = f"it is right for the reference without {edge}"
            yield Found("missing-term", words, {"term": str(edge)})
            return


def _left_out(pair: Pair, edge: Edge) -> bool:
    paths = pair.paths
    left = None if paths is None else paths.leaving_out(edge)
    return left is not None and pair.is_(wide(left))


def forgotten_number(seen: Seen) -> Iterator[Found]:
    """A number without which the gradient is right, on every fresh input."""
    if not seen.first.same_shape:
        return
    for label, value in seen.observation.inputs.items():
        if isinstance(value, float) and value and seen.everywhere(partial(_without_number, label=label)):
            words = f"it is right for `{label}` = 0, and not for {value:g}: as if it were not there"
            yield Found("missing-term", words, {"term": f"`{label}`", "times": 0.0})
            return


def _without_number(pair: Pair, label: str) -> bool:
    right_at = pair.observation.right_at
    found = None if right_at is None else right_at({label: 0.0})
    return found is not None and pair.is_(wide(found))


def missing(seen: Seen) -> Iterator[Found]:
    """Nothing, or zeros everywhere, on every input, where the right one is not zero."""
    if not seen.everywhere(_nothing):
        return
    absent = seen.observation.got is None
    what = "it is None" if absent else "it is zero everywhere"
    size = peak(seen.first.right)
    yield Found("missing-gradient", f"{what}, where the right one goes up to {size:.3g}", {"right": size})


def _nothing(pair: Pair) -> bool:
    return not bool(pair.mine.any())
