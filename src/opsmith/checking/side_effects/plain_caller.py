"""Calls as a user's script makes them: no frame, module, argument or variable shows that a check runs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import opsmith
from opsmith.checking.processes.watchdog import POLL_S

SCRIPT = "script.py"
"""File of the caller's frames, and `sys.argv`."""

MODULES = ("opsmith.checking", "opsmith.cli", "opsmith.testing", "pytest", "_pytest")
"""Beginnings of the names of modules that a script does not import."""

VARIABLES = "PYTEST_"
"""Beginning of the names of the environment's variables that a script does not have."""

_OPSMITH = Path(opsmith.__file__).parent


@contextmanager
def as_a_script() -> Iterator[None]:
    """A region in which modules, arguments and variables are those of a script.

    Example:
        >>> with as_a_script():
        ...     sys.argv, "opsmith.checking" in sys.modules
        (['script.py'], False)
    """
    modules = {name: sys.modules[name] for name in [*sys.modules] if name.startswith(MODULES)}
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    arguments = sys.argv
    try:
        for name in modules:
            del sys.modules[name]
        for name in variables:
            del os.environ[name]
        sys.argv = [SCRIPT]
        yield
    finally:
        sys.argv = arguments
        os.environ.update(variables)
        sys.modules.update(modules)


def call_plainly(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function in a new thread, whose frames are those of a script.

    Args:
        function: The function; code of opsmith's that wraps it gets the name of the script, too.
        args: Its arguments.
        kwargs: Its arguments by name.

    Example:
        >>> call_plainly(lambda: sys._getframe(1).f_code.co_filename, (), {})
        'script.py'
    """
    given: list[Any] = []
    raised: list[BaseException] = []
    work = _moved(_work), _moved(function), args, kwargs, given, raised
    thread = threading.Thread(target=copy_context().run, args=work, daemon=True)
    thread.start()
    while thread.is_alive():  # a call that is to be stopped is stopped at the next line of Python
        thread.join(POLL_S)
    if raised:
        raise raised[0]
    return given[0]


def _work(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: list[Any],
    raised: list[BaseException],
) -> None:
    try:
        given.append(function(*args, **kwargs))
    except BaseException as error:
        raised.append(error)


def _moved(function: Any) -> Any:
    """The same code under the name of a script, with the functions that it wraps."""
    if not isinstance(function, FunctionType) or not _is_opsmiths(function):
        return function
    code = function.__code__.replace(co_filename=SCRIPT)
    cells = tuple(CellType(_moved(each.cell_contents)) for each in function.__closure__ or ())
    names = {**function.__globals__, "__name__": "__main__", "__file__": SCRIPT}
    return FunctionType(code, names, function.__name__, function.__defaults__, cells)


def _is_opsmiths(function: FunctionType) -> bool:
    return Path(function.__code__.co_filename).is_relative_to(_OPSMITH)
