"""A region in which torch's exporter says nothing: what matters of it becomes an error of ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")


@contextmanager
def hushed() -> Iterator[None]:
    """A region without warnings and log lines of the exporter: of torchvision, and of passes over a graph."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
