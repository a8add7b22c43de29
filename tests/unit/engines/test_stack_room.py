"""Room on Python's stack: no loop below it pays for a chunk of the stack with each call."""

import multiprocessing
import resource
from multiprocessing.connection import Connection

import pytest

from headwater.engines.process import with_stack_room

CALLS = 500
DEPTHS = 300
"""More than the frames of `at` that fill a chunk of 16 KiB."""


def most_faults() -> int:
    """The page faults of `CALLS` calls, at the depth of the stack where they cause the most."""

    def at(depth: int) -> int:
        if depth > 0:
            return at(depth - 1)
        if depth < 0:
            return 0
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(CALLS):
            # A frame of the same size: one of the depths is the last that its chunk has room for.
            at(-1)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    return max(at(depth) for depth in range(DEPTHS))


def most_faults_of_a_fork() -> int:
    """The same in a fork of this process."""

    def send(wire: Connection) -> None:
        wire.send(most_faults())

    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork").Process(target=send, args=(theirs,))
    fork.start()
    found: int = ours.recv()
    fork.join()
    return found


def test_calls_need_no_memory_at_any_depth() -> None:
    """Without the room there are one or two depths of the stack at which each call maps a page, up to Python 3.12."""
    assert with_stack_room(most_faults)() < CALLS / 2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_has_the_room_of_its_parent() -> None:
    """An engine's core is one, and its loops are some thirty frames further up."""
    assert with_stack_room(most_faults_of_a_fork)() < CALLS / 2


def test_arguments_and_results_pass() -> None:
    """And exceptions."""

    def fails(*args: int, **kwargs: int) -> tuple[tuple[int, ...], dict[str, int]]:
        if not args:
            raise ValueError("none")
        return args, kwargs

    assert with_stack_room(fails)(1, 2, three=3) == ((1, 2), {"three": 3})
    with pytest.raises(ValueError, match="none"):
        with_stack_room(fails)()
