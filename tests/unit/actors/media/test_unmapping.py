"""Decoded values are unmapped when nothing uses them, whatever the thread that drops them is doing at that moment."""

import gc
import os
import time
from pathlib import Path
from threading import Thread

from headwater.actors.media.item import MemoryBudget, map_values

SIZE = 4096


def mapped(budget: MemoryBudget) -> memoryview:
    """Values of a page."""
    assert budget.take(SIZE)
    descriptor = os.memfd_create("values")
    try:
        os.ftruncate(descriptor, SIZE)
        return map_values(descriptor, SIZE, budget)
    finally:
        os.close(descriptor)


def maps() -> int:
    """Mapped values of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:values")


def until_unmapped(budget: MemoryBudget) -> None:
    """Wait until all of the budget is free, which only the thread that unmaps can bring about."""
    until_s = time.monotonic() + 20
    while not budget.take(SIZE):
        assert time.monotonic() < until_s, "the values were not unmapped"
        time.sleep(0.001)
    budget.give_back(SIZE)
    assert maps() == 0


def test_the_collector_may_drop_values_within_a_lock() -> None:
    """It runs at any allocation, so also where their budget, an executor or a logger is locked: waiting there would never end."""
    budget = MemoryBudget(SIZE)
    values: list[object] = [mapped(budget)]
    values.append(values)
    assert maps() == 1

    def drop() -> None:
        nonlocal values
        with budget._lock:
            values = []
            gc.collect()

    thread = Thread(target=drop, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "dropping the values waits for a lock that its own thread holds"
    until_unmapped(budget)


def test_a_fork_unmaps_its_own_values() -> None:
    """The thread of its parent is not in it."""
    budget = MemoryBudget(SIZE)
    del_in_parent = mapped(budget)
    del del_in_parent
    until_unmapped(budget)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            values = mapped(budget)
            del values
            until_unmapped(budget)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
