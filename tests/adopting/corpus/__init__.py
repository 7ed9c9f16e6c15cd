"""Functions of our own writing, as public code has them: what `adopt` must take.

| module | what its Functions cover |
|---|---|
| founding | the founding documents': static, setup_context, non-static, optional tensor, a view, symbolic |
| plain_arguments | callables, modules, tuples, None, strings, dtypes, *args, more and fewer gradients |
| results | in place, the input returned, nested, None, integers, float32 of float64, not materialised |
| saving | attributes, bool masks, saving by need, None, results, intermediates, computed again |
| styles | classmethods, inherited, nested, factories, jvp, vmap, generate_vmap_rule, once_differentiable |
| gradient_kinds | surrogates, nonlinear, stochastic, approximate |
| tensor_algebra | indices, reductions, products, windows, broadcast gradients |
| beyond_real_torch | complex numbers, NumPy |

What each one covers is its `covers`; FEATURES lists all that some Function must.
"""

from __future__ import annotations

from corpus import (
    beyond_real_torch,
    founding,
    gradient_kinds,
    plain_arguments,
    results,
    saving,
    styles,
    tensor_algebra,
)
from corpus.entry import Entry, structure, tensors

MODULES = (
    founding,
    plain_arguments,
    results,
    saving,
    styles,
    gradient_kinds,
    tensor_algebra,
    beyond_real_torch,
)
ENTRIES: dict[str, Entry] = {entry.name: entry for module in MODULES for entry in module.ENTRIES}

CONTEXT = """save_for_forward, attribute, tensor attribute, array attribute, needs_input_grad, mark_dirty,
mark_non_differentiable, set_materialize_grads, once_differentiable, setup_context, jvp, vmap,
generate_vmap_rule, saved None, saving by need, saves its result, saved intermediate, bool saved,
computed again, runs again in its backward"""
STYLES = """static old style, setup_context, non-static, classmethods, inherited, nested class,
made by a factory, made by type(), symbolic"""
ARGUMENTS = """plain number, optional tensor, callable argument, module argument, tuple argument,
None argument, string argument, dtype argument, bool argument, any number of arguments, dim and keepdim,
integer tensor"""
TYPES = """types from annotations, types from defaults, types from samples, types by default Tensor,
signature by text, signature by function"""
GRADIENTS = """more gradients than inputs, fewer gradients than inputs, a gradient left out,
broadcast gradient, expanded gradient, incoming gradient returned, surrogate,
nonlinear in the incoming gradient, stochastic, approximate, two kinds, reference, complex, NumPy"""
RESULTS = """input returned, view of an input, nested result, None result, integer result,
integer result only, several results, float32 result of float64"""
FEATURES: frozenset[str] = frozenset(
    " ".join(feature.split())
    for group in (CONTEXT, STYLES, ARGUMENTS, TYPES, GRADIENTS, RESULTS)
    for feature in group.split(",")
)

__all__ = ["ENTRIES", "FEATURES", "Entry", "structure", "tensors"]
