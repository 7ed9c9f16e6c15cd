"""The accelerator's automatic build: a process that makes many calls without it builds it, once on a machine.

A child process with low priority compiles it into the cache. The process goes on, and attaches it when it is
ready.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from opsmith import config
from opsmith.build.packaged import package_of
from opsmith.core.forked_locks import lock_of
from opsmith.torch_library import calls_extension, capabilities
from opsmith.torch_library.autograd.primitive import RegisteredOperator

MANY_CALLS = 20_000
"""Number of calls without an accelerator after which it is built."""
EVERY = 1_000
"""Number of calls between two checks of the child process."""
PROGRAM = """
import os
os.nice(19)
from opsmith.torch_library.calls_extension import compile_unless_it_failed
compile_unless_it_failed()
"""


class OwnBuild:
    """The build of this process, and the operators that wait for it.

    Attributes:
        child: The child process; None before it has begun and after it has ended.
        begun: True once this process has decided whether to build.
    """

    def __init__(self) -> None:
        self.child: int | None = None
        self.begun = False
        self._waiting: weakref.WeakSet[RegisteredOperator] = weakref.WeakSet()
        self._numbers, self._lock = itertools.count(1), lock_of(self, "_lock")

    def wait_with(self, operator: RegisteredOperator) -> Callable[[], None] | None:
        """Note an operator without an accelerator; return a function to be called in each of its calls.

        Return None if there is nothing to wait for.
        """
        module = sys.modules.get(operator.specification.module)
        self._look_beside(package_of(getattr(module, "__file__", None)))
        if why_not():
            return None
        with self._lock:
            self._waiting.add(operator)
        return self._count

    def _look_beside(self, package: Path | None) -> None:
        """Attach the accelerator if it is next to the kernels of a package."""
        found = calls_extension.look_in(package)
        if found and capabilities.on("calls_in_cpp") and capabilities.calls_in_cpp() is None:
            self._attach()

    def _count(self) -> None:
        number = next(self._numbers)
        if number % EVERY == 0:
            if self.child is not None:
                self._look()
            elif number >= MANY_CALLS:
                self.begin()

    def begin(self, package: Path | None = None) -> None:
        """Start to build the accelerator if it is not next to a package's kernels; once in a process."""
        self._look_beside(package)
        with self._lock:
            if self.begun or why_not():
                return
            self.begun = True
            self.child = _spawn()

    def _look(self) -> None:
        """Attach the accelerator if the child has built it."""
        with self._lock:
            if self.child is None:
                return
            with suppress(ChildProcessError):  # somebody else has already waited for it
                if os.waitpid(self.child, os.WNOHANG) == (0, 0):
                    return
            self.child = None
        self._attach()

    def _attach(self) -> None:
        calls_extension.calls_extension.cache_clear()
        capabilities.calls_in_cpp.cache_clear()
        if capabilities.calls_in_cpp() is not None:
            with self._lock:
                waiting = list(self._waiting)
            for operator in waiting:
                operator.renew_routes()


OWN_BUILD = OwnBuild()


def why_not() -> str:
    """Return the reason why this process does not build the accelerator; empty if it would.

    Raises:
        UsageError: If an environment variable has an invalid value.
    """
    if config.calls_in_python():
        return f"{config.PYTHON_CALLS} turns calls in C++ off"
    if config.no_calls_build():
        return f"{config.NO_CALLS_BUILD} forbids it"
    if not capabilities.on("calls_in_cpp") or config.conservative():
        return "the capability `calls_in_cpp` is off"
    if capabilities.calls_in_cpp() is not None:
        return "they are built"
    if sys.platform != "linux":
        return "this is not Linux"
    if config.local_rank():
        return "rank 0 of this machine builds them"
    return calls_extension.earlier_failure()


def _spawn() -> int:
    """Start the child process, which may outlive this process."""
    home = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH", ""))))
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", PROGRAM],
        {**os.environ, "PYTHONPATH": paths},
        file_actions=nowhere,
        setsid=True,
    )
