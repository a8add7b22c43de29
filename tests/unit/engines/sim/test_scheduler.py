"""The simulated engine's scheduler: what a step contains, and which blocks a sequence finds when it starts."""

from headwater.engines.sim.cache import PagedCache
from headwater.engines.sim.scheduler import Limits, Scheduled, SimScheduler, StepPlan

SIZE = 16


class Prompt(Scheduled, eq=False):
    """A prompt of known blocks; those with generated tokens are its own."""

    def hash_blocks(self, count: int, size: int) -> None:
        assert size == SIZE
        while len(self.hashes) < count:
            self.hashes.append(hash((id(self), len(self.hashes))) & 0xFFFF_FFFF_FFFF)


def prompt(blocks: list[int], more: int = 0) -> Prompt:
    """Full blocks with these hashes, and `more` tokens."""
    length = len(blocks) * SIZE + more
    return Prompt(length, length, hashes=list(blocks))


def scheduler(blocks: int = 100, step_tokens: int = 1_000) -> SimScheduler[Prompt]:
    return SimScheduler(Limits(SIZE, step_tokens, 8), PagedCache(blocks))


def end(step: StepPlan[Prompt], running: SimScheduler[Prompt]) -> None:
    """The step has ended: its sequences have computed what was planned, and some have got a token."""
    for sequence, count in step.chunks:
        if running.compute(sequence, count):
            sequence.length += 1


def test_prompts_that_start_in_one_step_share_blocks() -> None:
    """The second one computes its own part only, as if the first had been computed before."""
    one = scheduler()
    first, second = prompt([1, 2, 3], more=5), prompt([1, 2, 3, 4], more=7)
    one.waiting += [first, second]
    plan = one.plan()
    assert [(s.cached, count) for s, count in plan.chunks] == [(0, 53), (3 * SIZE, SIZE + 7)]
    assert plan.prompt_tokens == 53 + SIZE + 7


def test_only_what_a_step_computes_is_shared_in_it() -> None:
    """The budget ends in the first prompt's third block: the second starts in the next step, and finds all but what it adds."""
    one = scheduler(step_tokens=40)
    first, second = prompt([1, 2, 3]), prompt([1, 2, 3, 4])
    one.waiting += [first, second]
    end(one.plan(), one)
    assert second.cached < 0
    plan = one.plan()
    assert [(s.cached, count) for s, count in plan.chunks] == [(0, 8), (3 * SIZE, SIZE)]


def test_a_chunk_of_a_running_prompt_is_shared_in_its_step() -> None:
    """Its second chunk is planned before a waiting prompt starts."""
    one = scheduler(step_tokens=32)
    first = prompt([1, 2, 3])
    one.waiting.append(first)
    end(one.plan(), one)
    later = prompt([1, 2, 3], more=1)
    one.waiting.append(later)
    assert [count for _, count in one.plan().chunks] == [SIZE, 1]
    assert later.cached == 3 * SIZE
