"""Warnings that name the line of the user's code that led to them."""

from __future__ import annotations

import sys
import warnings

from opsmith.core.location import is_user_code


def warn_caller(message: str) -> None:
    """Warn at the innermost line of user code among the callers; at the outermost line if there is none.

    Args:
        message: Text of the `RuntimeWarning`.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_caller("the reference runs")
        >>> str(caught[0].message)
        'the reference runs'
    """
    frame, level = sys._getframe(1), 2
    while not is_user_code(frame.f_code.co_filename) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
