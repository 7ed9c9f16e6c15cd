"""Detect a term that is missing, has the wrong sign, or counts more than once.

Terms are of three kinds: the grad_output of one of several results; the grad_output of some elements of a
result; and the part that flows through one edge of the reference. The gradient is linear in each of them, so
the difference from the right one must be a multiple of the term, the same on every fresh input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import torch
from torch import Tensor

from opsmith.checking.diagnosis.conditions import RELATIONS
from opsmith.checking.diagnosis.detectors.region import index_rules
from opsmith.checking.diagnosis.detectors.scale import factor_of, shown_factor
from opsmith.checking.diagnosis.evidence import Detection, Evidence, Pair, Prediction
from opsmith.checking.diagnosis.gradient_paths import GradientPaths, OperandEdge
from opsmith.checking.numerics.compare import in_double, largest_magnitude

PAIRS = 30
"""Largest number of distinct edges for which all pairs are tried."""

Term = Callable[[Pair], Tensor | None]
"""Computes a term of the right gradient of a pair; None where there is none."""


def missing_term(evidence: Evidence) -> Iterator[Detection]:
    """Detect a wrong weight of a term: of a result, of some elements, of an edge, of two edges."""
    if not bool(evidence.first.got.isfinite().all()):
        return
    for missing in (True, False):
        for terms in (_of_results, _of_elements, _of_edges):
            for words, term in terms(evidence):
                found = _tested(evidence, words, term, missing=missing)
                if found is not None:
                    yield found
                    return
        if missing:
            hypotheses = chain(_of_two_edges(evidence), _of_a_summand(evidence))
            for each in evidence.first_fitting(hypotheses):
                yield each
                return


def _tested(evidence: Evidence, words: str, term: Term, *, missing: bool) -> Detection | None:
    """Detect the weight of a term, if it explains every pair: zero, or anything but one."""
    first = term(evidence.first)
    if first is None or _trivial(evidence.first, first):
        return None
    weight = float((first.abs() ** 2).sum())
    off = evidence.first.got - evidence.first.expected
    ratio = complex((first.conj() * off).sum() / weight)
    times = 1 + (ratio if first.is_complex() and abs(ratio.imag) > 1e-9 else ratio.real)
    for plain in (0.0, -1.0, 2.0):
        times = plain if abs(times - plain) < 1e-6 else times
    if missing != (times == 0):
        return None
    if times != 0 and (not evidence.fresh or factor_of(Pair(replace(evidence.observation, got=first)))):
        return None  # the term is a multiple of the whole gradient
    more = (times - 1) if isinstance(times, complex) else float(times) - 1

    def holds(pair: Pair) -> bool:
        found = term(pair)
        return found is not None and pair.equals(pair.expected + more * found)

    if not evidence.everywhere(holds):
        return None
    measured = {"term": words, "times": times}
    if times == 0:
        return Detection("missing-term", f"it lacks {words}", measured)
    if times == -1:
        return Detection("sign", f"it has {words} with the other sign", measured, weak=True)
    reason = f"it has {shown_factor(times)} times {words}, where once is right"
    return Detection("scale", reason, measured, weak=True)


def _trivial(pair: Pair, term: Tensor) -> bool:
    """Return True if a term is zero, or the whole gradient: then it explains nothing."""
    return (
        largest_magnitude(term) <= pair.rounding or largest_magnitude(term - pair.expected) <= pair.rounding
    )


def _of_results(evidence: Evidence) -> Iterator[tuple[str, Term]]:
    """Yield the term of each of several results."""
    names = [name for name, grad in evidence.observation.grads.items() if grad is not None]
    for name in names if len(names) > 1 else ():
        yield f"the grad_output of `{name}`", partial(_masked, name=name, selected=torch.tensor(True))


def _of_elements(evidence: Evidence) -> Iterator[tuple[str, Term]]:
    """Yield terms of some elements of a result: the last row, the tail, where a value is negative."""
    several = len(evidence.observation.grads) > 1
    for name, grad in evidence.observation.grads.items():
        if grad is None:
            continue
        of = f" of `{name}`" if several else " of the result"
        for dim, size in enumerate(grad.shape):
            for words, rule in _rules(size):
                term = partial(_for_indices, name=name, dim=dim, rule=rule)
                yield f"the grad_output of {words.format('index')} of dimension {dim}{of}", term
        for label, aligned in _beside(evidence.first, name).items():
            if aligned.dtype == torch.bool:
                for truth in (True, False):
                    term = partial(_for_mask, name=name, label=label, test=partial(torch.eq, other=truth))
                    yield f"the grad_output where {label} is {truth}", term
                continue
            for words, relation in RELATIONS.items():
                term = partial(_for_mask, name=name, label=label, test=partial(_to_zero, relation=relation))
                yield f"the grad_output where {label} {words} 0", term


def _rules(size: int) -> Iterator[tuple[str, Callable[[int], frozenset[int]]]]:
    """Yield sets of indices along a dimension: the first, the last, tails; each with one description."""
    known: set[frozenset[int]] = set()
    sets = [{0}, {size - 1}, set(range(1, size)), set(range(size - 1))]
    sets += [{0, size - 1}, set(range(1, size - 1)), set(range(0, size, 2)), set(range(1, size, 2))]
    sets += [set(range(size // width * width, size)) for width in (2, 4, 8, 16, 32, 64)]
    for each in map(frozenset, sets):
        if each in known or not 0 < len(each) < size:
            continue
        known.add(each)
        for rule in index_rules(each, size):
            yield rule.words, rule.at
            break


def _for_indices(pair: Pair, name: str, dim: int, rule: Callable[[int], frozenset[int]]) -> Tensor | None:
    grad = pair.observation.grads.get(name)
    if grad is None or dim >= grad.dim():
        return None
    selected = torch.zeros(grad.shape[dim], dtype=torch.bool)
    selected[sorted(rule(grad.shape[dim]))] = True
    return _masked(pair, name, selected.reshape(-1, *[1] * (grad.dim() - dim - 1)))


def _beside(pair: Pair, name: str) -> dict[str, Tensor]:
    """Return inputs and results of the shape of a result."""
    observation = pair.observation
    grad = observation.grads[name]
    named = {f"`{label}`": each for label, each in {**observation.inputs, **observation.results}.items()}
    return {
        label: each.detach().cpu()
        for label, each in named.items()
        if isinstance(each, Tensor)
        and not each.is_complex()
        and grad is not None
        and each.shape == grad.shape
    }


def _to_zero(aligned: Tensor, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return relation(aligned, torch.zeros_like(aligned))


def _for_mask(pair: Pair, name: str, label: str, test: Callable[[Tensor], Tensor]) -> Tensor | None:
    beside = _beside(pair, name)
    return _masked(pair, name, test(beside[label])) if label in beside else None


def _masked(pair: Pair, name: str, selected: Tensor) -> Tensor | None:
    return pair.with_grads(
        lambda each, grad: grad * selected.to(grad.device) if each == name else torch.zeros_like(grad)
    )


def _of_edges(evidence: Evidence) -> Iterator[tuple[str, Term]]:
    """Yield the term that flows through each edge of the reference."""
    for edge in _edges(evidence):
        yield f"what flows through {edge}", partial(_along, compute=GradientPaths.through, edges=(edge,))


def _edges(evidence: Evidence) -> tuple[OperandEdge, ...]:
    paths = evidence.first.paths
    return () if paths is None else paths.edges


def _along(
    pair: Pair, compute: Callable[..., Tensor | None], edges: tuple[OperandEdge, ...]
) -> Tensor | None:
    """Compute a gradient from the paths of a pair, apart from some edges or through them."""
    found = None if pair.paths is None else compute(pair.paths, *edges)
    return None if found is None else in_double(found)


def _of_two_edges(evidence: Evidence) -> Iterator[tuple[Detection, Prediction]]:
    """Yield that two edges are missing together: those of one operation first."""
    distinct: dict[OperandEdge, Tensor] = {}
    for edge in _edges(evidence):
        through = _along(evidence.first, GradientPaths.through, (edge,))
        if through is None or _trivial(evidence.first, through):
            continue
        if all(largest_magnitude(through - other) > evidence.first.rounding for other in distinct.values()):
            distinct[edge] = through
    pairs = combinations([*distinct][:PAIRS], 2)
    for one, other in sorted(pairs, key=lambda two: two[0].call != two[1].call):
        words = f"it lacks what flows through {one} and through {other}"
        found = Detection("missing-term", words, {"term": f"{one} and {other}", "times": 0.0})
        yield found, partial(_along, compute=GradientPaths.without, edges=(one, other))


SUMS = frozenset({"add", "sub", "rsub", "__radd__", "__rsub__", "add_", "sub_", "__iadd__", "__isub__"})


def _of_a_summand(evidence: Evidence) -> Iterator[tuple[Detection, Prediction]]:
    """Yield that it is the gradient of the reference without a summand, as of a variance about zero."""
    for edge in _edges(evidence):
        if edge.operation in SUMS and edge.slot >= 0:
            words = f"it is right for the reference without {edge}"
            found = Detection("missing-term", words, {"term": str(edge)})
            yield found, partial(_along, compute=GradientPaths.leaving_out, edges=(edge,))


def forgotten_number(evidence: Evidence) -> Iterator[Detection]:
    """Detect a number argument whose value 0 makes the gradient right, on every fresh input."""
    yield from evidence.first_fitting(_of_numbers(evidence))


def _of_numbers(evidence: Evidence) -> Iterator[tuple[Detection, Prediction]]:
    for label, value in evidence.observation.inputs.items():
        if isinstance(value, float) and value:
            words = f"it is right for `{label}` = 0, and not for {value:g}: as if it were not there"
            found = Detection("missing-term", words, {"term": f"`{label}`", "times": 0.0})
            yield found, partial(Pair.with_inputs, changed={label: 0.0})


def missing(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that is None, or zero everywhere, on every input."""
    if not evidence.everywhere(lambda pair: not pair.got.any()):
        return
    absent = evidence.observation.got is None
    what = "it is None" if absent else "it is zero everywhere"
    size = largest_magnitude(evidence.first.expected)
    yield Detection("missing-gradient", f"{what}, where the right one goes up to {size:.3g}", {"right": size})
