"""torch's messages: texts of errors that opsmith recognises, and a region that silences the exporter.

The texts differ between versions of torch: each tuple has parts of the texts of all versions. A new text
belongs here.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

EXPORTER_LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


KERNEL_OVERRIDDEN = "Warning only once for all operators"
"""Beginning of a warning: a kernel replaces another kernel."""

LEAF_WRITTEN = ("leaf Variable that requires grad",)
"""An in-place operation on a leaf that requires a gradient."""

SAVED_WRITTEN = ("modified by an inplace operation",)
"""A backward whose saved tensor was overwritten after it was saved."""

GRAPH_FREED = ("freed",)
"""Saved tensors of a graph whose backward has run."""

NO_DERIVATIVE = (
    "marked with @once_differentiable",
    "derivative for aten::",
    "the derivative for '",
    "support automatic differentiation",
    "more than one element of the written-to tensor",
)
"""A second-order gradient through `once_differentiable`, or a torch operation that has no derivative; forward
mode into a result whose elements share memory."""

NO_DTYPE_KERNEL = ("not implemented for", "unsupported ScalarType")
"""An operation without a kernel for a dtype."""

UNSUPPORTED_SIZE = (
    "not supported",
    "(batch mode) tensor with",
    "Non-empty ",
    "to have non-zero size",
    "must not be empty",
    "to be at least 1 at dimension",
)
"""A size that an operation does not take, such as images without channels for pooling; a RuntimeError."""

SHARED = ("refers to a single memory location",)
"""A write into a tensor whose elements share memory."""

LAYOUT_REFUSED = ("view size is not compatible", "setStorage", "use .reshape(", *SHARED)
"""An operation that does not take the strides of a tensor."""

LAZY_BIT = ("negative bit", "conjugate bit", "DispatchKey Negative doesn't", "DispatchKey Conjugate doesn't")
"""A view whose negation or conjugation is pending, given to NumPy or to `Tensor.new`."""

NO_DATA = ("Cannot access data pointer of Tensor that doesn't have storage",)
"""A use of the memory of a tensor without memory, such as a tensor under a transform."""

NO_BATCHING_RULE = (
    "In order to use an autograd.Function with functorch transforms",
    "does not have vmap support",
    "Batching rule not implemented",
    "vmap: It looks like you're",
    "vmap: inplace",
    "vmap: aten::",
    "accessing the data under vmap transform is not allowed",
    *NO_DATA,
    "data-dependent control flow",
    "not supported with functorch",
    "not supported under functorch",
    "We do not support",
    "not yet support",
    "in randomness error mode",
    "does not work with functorch",
    "not compatible with functorch",
)
"""A call that `vmap` cannot batch."""

NOT_YET_IMPLEMENTED = ("NYI",)
"""A transform that does not support an `autograd.Function`: `functionalize`."""

WRITE_UNMAPPED = ("vmap: inplace", "doesn't match the broadcast shape")
"""A write, under `vmap`, of a mapped value into a tensor that is not mapped."""

TANGENT_COUNT = ("treespec",)
"""Forward mode over `vmap` of an `autograd.Function`: torch miscounts tangents."""

NO_EXAMPLES = ("index 0 out of range for tensor of size",)
"""`vmap` of an `autograd.Function` over an empty batch."""

MIXED_WITH_DTENSOR = ("got mixed torch.Tensor and DTensor",)
"""An operation on DTensors and plain tensors, outside implicit replication."""

NOT_PLACED = (
    "Sharding propagation failed for",
    "not supported for tensor subclasses",
    "operations that require placement changes are not supported",
    "data pointer on an invalid python storage",
)
"""An operation for which DTensor cannot derive placements, such as one whose shape depends on numbers;
`Tensor.numpy`, `Tensor.tolist` and the memory of a DTensor."""

NO_ACCELERATOR = ("not an accelerator",)
"""A generator requested for a device without generators."""

NO_GPU = (
    "0 active drivers",
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
)
"""Use of a GPU, by Triton or torch, on a machine without one."""

NO_SIZES_ON_META = ("data-dependent shape", "data-independent implementation does not exist")
"""A result on the device `meta` whose size depends on data."""

LOOKS_AT_DATA = ("data-dependent expression", "aten._local_scalar_dense", "aten.equal")
"""An operation in `opcheck` that needs the numbers of a tensor without data."""

RECOMPILED = ("recompile",)
"""A call that the compiled code does not support, under `fail_on_recompile`."""

CHANCE_GUARD = ("duck sizing", "stride mismatch")
"""A guard of compiled code on sizes that were equal, or on strides, by chance."""

OPCHECK_DIFFERS = ("are different in eager-mode PyTorch",)
"""Results of `opcheck` that differ between eager mode and a trace."""


def has_message(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Return True if the message of an error contains one of these texts.

    Example:
        >>> has_message(RuntimeError("mul not implemented for 'Bool'"), NO_DTYPE_KERNEL)
        True
    """
    message = str(error)
    return any(text in message for text in texts)


@contextmanager
def quiet_exporter(*others: str) -> Iterator[None]:
    """Context that silences the exporter and graph passes: warnings, lines of logs, text on stderr.

    Args:
        others: Names of other loggers to silence.
    """
    loggers = [logging.getLogger(name) for name in (*EXPORTER_LOGGERS, *others)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
