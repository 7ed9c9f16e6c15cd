"""Bundled operators, written with the public API only, as examples to copy.

Each operator is a function with a lower-case name. Operators with parameters, and activations, are modules,
too. `Involution2d` is a layer that calls `involution`; `opsmith.ops.rednet` has networks of such layers.
`opsmith.ops.decoder` is a language model made of the in-place operators.
"""

from __future__ import annotations

from opsmith.core.collector import importing_without_garbage_collection

with importing_without_garbage_collection():
    from opsmith.ops.adamw import adamw_
    from opsmith.ops.elementwise import Add, Exp, Mul, add, exp, mul
    from opsmith.ops.involution import Involution2d, involution
    from opsmith.ops.kv_cache import write_kv_cache
    from opsmith.ops.linear import Linear, linear
    from opsmith.ops.paged_attention import paged_attention
    from opsmith.ops.rms_norm import RMSNorm, add_rms_norm_, rms_norm
    from opsmith.ops.rope import rope_, rope_table
    from opsmith.ops.swiglu import swiglu_
    from opsmith.ops.write_linear import write_linear

__all__ = [
    "Add",
    "Exp",
    "Involution2d",
    "Linear",
    "Mul",
    "RMSNorm",
    "adamw_",
    "add",
    "add_rms_norm_",
    "exp",
    "involution",
    "linear",
    "mul",
    "paged_attention",
    "rms_norm",
    "rope_",
    "rope_table",
    "swiglu_",
    "write_kv_cache",
    "write_linear",
]
