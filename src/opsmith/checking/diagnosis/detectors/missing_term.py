"""Detect a term of a gradient that is missing, has the wrong sign, or is added more than once.

There are three kinds of terms: the grad_output of one of several results, the grad_output of some elements of
a result, and the part that flows through one edge of the reference. The gradient is linear in each term, so
its error must be a multiple of the term, with the same factor on every fresh input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, combinations, islice, product

import torch
from torch import Tensor

from opsmith.checking.diagnosis.detectors.region import WIDTHS, IndexRule, index_rules, mask_of
from opsmith.checking.diagnosis.detectors.scale import factor_of, shown_factor
from opsmith.checking.diagnosis.gradient_paths import GradientPaths, OperandEdge
from opsmith.checking.diagnosis.observation import (
    COMPARISONS,
    FEW,
    SAME,
    Detection,
    Evidence,
    Observation,
    Prediction,
    along,
    multiple,
    times,
)
from opsmith.judging.compare import in_double, largest_magnitude

STEPS = (-1, 1, -2, 2)
"""Distances of the indices of missing entries of a Jacobian."""

PAIRS = 30
"""Maximum number of distinct edges for which all pairs are tried."""


def missing_term(evidence: Evidence) -> Iterator[Detection]:
    """Detect a wrong weight of a term (a result, some elements, an edge, two edges)."""
    if not bool(evidence.first.got.isfinite().all()):
        return
    for missing in (True, False):
        for words, term in chain(_of_elements(evidence), _of_edges(evidence)):
            hypothesis = _weight(evidence, words, term, missing=missing)
            if hypothesis is not None:
                yield hypothesis
        if missing:
            yield from _of_two_edges(evidence)
            yield from _of_a_summand(evidence)


def _weight(evidence: Evidence, words: str, term: Prediction, *, missing: bool) -> Detection | None:
    """Make the hypothesis that the weight of a term is zero, or any number but one."""
    first = term(evidence.first)
    if first is None or _trivial(evidence.first, first):
        return None
    off = multiple(first, evidence.first.got - evidence.first.expected)
    assert off is not None
    weight = next((plain for plain in (0.0, -1.0, 2.0) if abs(1 + off - plain) < SAME), 1 + off)
    if missing != (weight == 0):
        return None
    if weight != 0 and (not evidence.fresh or factor_of(replace(evidence.first, computed=first))):
        return None  # the term is a multiple of the whole gradient

    def predicted(pair: Observation) -> Tensor | None:
        found = term(pair)
        return None if found is None else pair.expected + times(complex(weight - 1), found)

    measured = {"term": words, "times": weight if weight.imag else weight.real}
    if weight == 0:
        return Detection("missing-term", f"it lacks {words}", measured, predicted=predicted)
    if weight == -1:
        return Detection("sign", f"it has {words} with the wrong sign", measured, True, predicted)
    reason = f"it has {words} with the factor {shown_factor(weight)}, but the right factor is 1"
    return Detection("scale", reason, measured, True, predicted)


def _trivial(pair: Observation, term: Tensor) -> bool:
    """Return True if a term is zero or the whole gradient, so that it explains nothing."""
    return min(largest_magnitude(term), largest_magnitude(term - pair.expected)) <= pair.rounding


def _of_elements(evidence: Evidence) -> Iterator[tuple[str, Prediction]]:
    """Yield terms of each of several results, and of some elements, such as the last row."""
    first = evidence.first
    for name in first.given if len(first.given) > 1 else ():
        yield f"the grad_output of `{name}`", partial(_masked, name=name, selected=torch.ones_like)
    for name, grad in first.given.items():
        for dim, size in enumerate(grad.shape):
            for rule in _rules(size):
                words = f"the grad_output of {rule.words.format('index')} of dimension {dim}{first.of(name)}"
                yield words, partial(_masked, name=name, selected=partial(_at_indices, dim=dim, rule=rule))
        for label, aligned in _beside(first, name).items():
            truths = {"is True": torch.ne, "is False": torch.eq}
            numbers = {f"{words[0]} 0": relation for relation, words in COMPARISONS.items()}
            for words, relation in (truths if aligned.dtype == torch.bool else numbers).items():
                selected = partial(
                    _masked, name=name, label=label, selected=partial(_to_zero, relation=relation)
                )
                yield f"the grad_output where {label} {words}", selected


def _rules(size: int) -> Iterator[IndexRule]:
    """Yield indices along a dimension: the first, the last, tails; each with one description."""
    cuts = [slice(1), slice(-1, None), slice(1, None), slice(-1), slice(None, None, max(size - 1, 1))]
    cuts += [slice(1, -1), slice(None, None, 2), slice(1, None, 2)]
    cuts += [slice(size // width * width, None) for width in (2, *WIDTHS)]
    for each in dict.fromkeys(range(size)[cut] for cut in cuts):
        yield from islice(index_rules([*each], size), 1)


def _at_indices(grad: Tensor, dim: int, rule: IndexRule) -> Tensor:
    return along(mask_of(rule.at(grad.shape[dim]), grad.shape[dim]), dim, grad.dim())


def _to_zero(aligned: Tensor, relation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return relation(aligned, torch.zeros_like(aligned))


def _beside(pair: Observation, name: str) -> dict[str, Tensor]:
    """Return inputs and results of the shape of a result."""
    return {
        f"`{label}`": each.detach().cpu()
        for label, each in {**pair.inputs, **pair.results}.items()
        if isinstance(each, Tensor) and not each.is_complex() and each.shape == pair.given[name].shape
    }


def _masked(
    pair: Observation, name: str, selected: Callable[[Tensor], Tensor], label: str = ""
) -> Tensor | None:
    """Compute the right gradient for some elements of one grad_output, maybe selected by aligned values."""
    grad = pair.given[name]
    of = _beside(pair, name).get(label) if label else grad
    others = {each: torch.zeros_like(value) for each, value in pair.given.items()}
    return None if of is None else pair.right_for({**others, name: grad * selected(of).to(grad.device)})


def _of_edges(evidence: Evidence) -> Iterator[tuple[str, Prediction]]:
    """Yield the term that flows through each edge of the reference."""
    for edge in _edges(evidence):
        yield (
            f"the part that flows through {edge}",
            partial(_along, compute=GradientPaths.through, edges=(edge,)),
        )


def _edges(evidence: Evidence) -> Sequence[OperandEdge]:
    paths = evidence.first.paths
    return () if paths is None else paths.edges


def _along(
    pair: Observation, compute: Callable[..., Tensor | None], edges: tuple[OperandEdge, ...]
) -> Tensor | None:
    """Compute a gradient from the paths of a pair, without some edges or only through them."""
    found = None if pair.paths is None else compute(pair.paths, *edges)
    return None if found is None else in_double(found)


def _of_two_edges(evidence: Evidence) -> Iterator[Detection]:
    """Yield hypotheses that two edges are missing together; edges of one operation come first."""
    distinct: dict[OperandEdge, Tensor] = {}
    for edge in _edges(evidence):
        through = _along(evidence.first, GradientPaths.through, (edge,))
        if through is None or _trivial(evidence.first, through):
            continue
        if all(largest_magnitude(through - other) > evidence.first.rounding for other in distinct.values()):
            distinct[edge] = through
    pairs = combinations([*distinct][:PAIRS], 2)
    for one, other in sorted(pairs, key=lambda two: two[0].call != two[1].call):
        words = f"it lacks the parts that flow through {one} and through {other}"
        measured = {"term": f"{one} and {other}", "times": 0.0}
        without = partial(_along, compute=GradientPaths.without, edges=(one, other))
        yield Detection("missing-term", words, measured, predicted=without)


SUMS = frozenset({"add", "sub", "rsub", "__radd__", "__rsub__", "add_", "sub_", "__iadd__", "__isub__"})


def _of_a_summand(evidence: Evidence) -> Iterator[Detection]:
    """Yield hypotheses that the reference's gradient without a summand was computed."""
    for edge in _edges(evidence):
        if edge.operation in SUMS and edge.slot >= 0:
            words = f"it is right for the reference without {edge}"
            left_out = partial(_along, compute=GradientPaths.leaving_out, edges=(edge,))
            yield Detection("missing-term", words, {"term": str(edge)}, predicted=left_out)


def forgotten_number(evidence: Evidence) -> Iterator[Detection]:
    """Detect a number argument whose value 0 makes the gradient right, on every fresh input."""
    for label, value in evidence.first.inputs.items():
        if isinstance(value, float) and value:
            words = (
                f"it is right for `{label}` = 0, but not for `{label}` = {value:g}: the term with "
                f"`{label}` is missing"
            )
            predicted = partial(Observation.right_for, inputs={label: 0.0})
            yield Detection("missing-term", words, {"term": f"`{label}`", "times": 0.0}, predicted=predicted)


def jacobian_sparsity(evidence: Evidence) -> Iterator[Detection]:
    """Detect missing entries of the Jacobian, by the indices of the grad_output and of the gradient."""
    first, jacobian = evidence.first, cache(_jacobian)
    for name in first.given:
        there = jacobian(first, name) != 0
        several = first.given[name].dim() > 0 and there.dim() > 1
        for words, related in _relations(first, name, there) if several else ():
            if min(int((there & related).sum()), int((there & ~related).sum())) >= FEW:
                predicted = partial(_without, jacobian=jacobian, name=name, related=related)
                yield Detection("missing-term", words, predicted=predicted)


def _jacobian(pair: Observation, name: str) -> Tensor:
    """Compute the Jacobian's entries times each element of a grad_output; none if this takes long."""
    return torch.stack([*pair.parts(name)] or [torch.zeros(())])


def _without(
    pair: Observation, jacobian: Callable[[Observation, str], Tensor], name: str, related: Tensor
) -> Tensor | None:
    found = jacobian(pair, name)
    return pair.expected - (found * related).sum(0) if found.shape == related.shape else None


def _relations(first: Observation, name: str, there: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield relations of indices of the grad_output and of the gradient, as masks of the Jacobian."""
    of, shape, own = first.of(name), first.given[name].shape, first.expected.shape
    at = torch.unravel_index(torch.arange(len(there)), shape)
    outer = [along(each, 0, 1 + len(own)).expand(there.shape) for each in at]
    inner = [along(torch.arange(size), dim, len(own)).expand(there.shape) for dim, size in enumerate(own)]
    if shape == own:
        apart = [one != other for one, other in zip(outer, inner, strict=True)]
        dims = [str(dim) for dim, each in enumerate(apart) if bool((each & there).any())]
        where = (
            f" along dimension{'s' * (len(dims) > 1)} {' and '.join(dims)}" if len(dims) < len(own) else ""
        )
        other = torch.stack(apart).any(0)
        yield (
            f"it has only the grad_output of the same element{of}; the grad_output of the other "
            f"elements{where} is missing",
            other,
        )
        yield (
            (
                f"it lacks the grad_output of the same element{of}, and has only the grad_output of the "
                "other elements"
            ),
            ~other,
        )
    pairs = product(range(len(shape)), range(len(own)))
    for p, q in sorted(pairs, key=lambda each: each[0] != each[1]):
        for relation, (_, word, _) in COMPARISONS.items():
            words = f"the index in dimension {p}{of} is {word} the gradient's index in dimension {q}"
            yield f"it lacks the grad_output where {words}", relation(outer[p], inner[q])
        for step in STEPS:
            words = f"{abs(step)} {'greater' if step > 0 else 'less'} than"
            words = (
                f"it lacks the grad_output where the index in dimension {p}{of} is {words} the "
                f"gradient's index in dimension {q}"
            )
            yield words, outer[p] - inner[q] == step


def missing(evidence: Evidence) -> Iterator[Detection]:
    """Detect a gradient that is None, or zero everywhere, on every input."""
    if not evidence.everywhere(lambda pair: not pair.got.any()):
        return
    what = "it is None" if evidence.first.computed is None else "it is zero everywhere"
    size = largest_magnitude(evidence.first.expected)
    yield Detection("missing-gradient", f"{what}, but the right values go up to {size:.3g}", {"right": size})
