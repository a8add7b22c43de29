"""Synthetic traffic: equal seeds, equal traffic; what is shared, how long it is, and the rate that a share of a fleet takes."""

import pytest

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import TRACE_BLOCK
from tests.bench.zoo.load import Demand, demand_of, requests_per_s, trace_at
from tests.bench.zoo.prompts import BlockIds, length_of
from tests.bench.zoo.traffic import CLASSES, PROMPT_MAX, generate

pytestmark = pytest.mark.soak
"""They test tools of ours."""

SHARED = {
    "agents",
    "chat",
    "code",
    "documents",
    "hot",
    "long_context",
    "prefill_decode",
    "shifting",
    "slow_worker",
    "tenants",
    "two_speeds",
}
"""Classes in which prompts have something in common."""


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_is_made_from_its_seed(name: str) -> None:
    """By arrival, with an id for each block, and with prefixes in common where the class says so."""
    found = generate(name, 150, 3)
    assert found == generate(name, 150, 3)
    assert found != generate(name, 150, 4)
    assert 100 < len(found) <= 150
    assert found[0].at == 0
    assert [one.at for one in found] == sorted(one.at for one in found)
    for one in found:
        assert len(one.ids) == -(-one.prompt_tokens // TRACE_BLOCK)
        assert 0 < one.prompt_tokens <= 2 * PROMPT_MAX
        assert 0 < one.output_tokens <= 2_000
    firsts = [one.ids[0] for one in found]
    assert (len(set(firsts)) < len(firsts)) == (name in SHARED)


def test_prompts_share_blocks_up_to_where_their_text_differs() -> None:
    """Also where two segments meet within a block."""
    blocks = BlockIds()
    system, first, second = (blocks.new_segment(tokens) for tokens in (TRACE_BLOCK * 2 + 10, 600, 600))
    one, other = blocks.ids_of([system, first]), blocks.ids_of([system, second])
    assert length_of([system, first]) == TRACE_BLOCK * 2 + 610
    assert len(one) == 4
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert blocks.ids_of([system, first]) == one


def test_the_rate_is_the_share_of_what_is_used_up_first() -> None:
    """A prompt's time is spent once for what is in common; a trace at a rate has that many requests a second."""
    step_time = StepTime()
    found = generate("hot", 200, 1)
    demand = demand_of(found, step_time)
    assert demand.output_tokens == sum(one.output_tokens for one in found) / 200
    # Most prompts are 32 blocks and more, of which nearly all are cached.
    assert demand.prefill_ms < step_time.seconds(16_384, 0.0, False) * 1000 / 2
    # Nearly nothing but prompts: the rate at which half of the time is spent on them.
    prompts = Demand(blocks=1.0, output_tokens=1.0, prefill_ms=100.0)
    assert requests_per_s(prompts, 4_000, 0.5, step_time) == pytest.approx(5.0, rel=0.01)
    assert requests_per_s(demand, 4_000, 0.8, step_time) > requests_per_s(demand, 4_000, 0.4, step_time)
    requests = trace_at("hot", found, 50.0).requests
    assert requests[-1].arrival_ns / 1e9 == pytest.approx(200 / 50.0, rel=0.01)
    assert [one.ids for one in requests] == [one.ids for one in found]
