"""A cached property is computed once, and takes no lock."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from opsmith.core.cached_property import cached_property


class Holder:
    def __init__(self, number: int, wait: threading.Event | None = None) -> None:
        self.number, self.wait = number, wait
        self.computed = 0
        self.begun = threading.Event()

    @cached_property
    def double(self) -> int:
        """Twice the number."""
        self.computed += 1
        self.begun.set()
        if self.wait is not None:
            self.wait.wait()
        return 2 * self.number


def test_it_is_computed_once_for_each_holder() -> None:
    holder = Holder(3)
    assert (holder.double, holder.double, holder.computed) == (6, 6, 1)
    assert Holder(4).double == 8
    assert Holder.double.__doc__ == "Twice the number."
    del holder.__dict__["double"]
    assert (holder.double, holder.computed) == (6, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_that_computes_one() -> None:
    wait = threading.Event()
    slow = Holder(1, wait)
    thread = threading.Thread(target=lambda: slow.double)
    thread.start()
    slow.begun.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os._exit(Holder(5).double)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    finally:
        wait.set()
        thread.join()
