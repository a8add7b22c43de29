"""The `Engine` contract on prefill and decode legs, for engines that hand KV over by returned parameters."""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.engines.engine import EngineError, Pinned, RequestRejected, Transfer
from headwater.engines.handoff_params import seal, unseal
from headwater.schemas.messages.inference import Leg
from tests.support.ports.engines import Answer, EngineCase, free_port
from tests.support.ports.waiting import POLL_S

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

Pair = tuple[EngineCase, EngineCase]
BLOCKS = 1.5
TOKENS = 5
RELEASED_S = 8.0
"""Far below the lease."""


async def prefilled(case: EngineCase, prompt: list[int]) -> tuple[str, Pinned]:
    """The prefill leg of a prompt: its request, and what it left for another engine."""
    request = case.request(prompt, leg="prefill", max_tokens=40, min_tokens=3, logprobs=None)
    answer = await case.submit(request).ended()
    assert answer.finish in ("stop", "length")
    assert answer.tokens == [], "its token is nobody's answer"
    assert [step for step in answer.steps[:-1] if step.pinned] == []
    pinned = answer.steps[-1].pinned
    assert pinned is not None
    assert pinned.lease_s > 0
    return request.request, pinned


async def decoded(case: EngineCase, prompt: list[int], pinned: Pinned | None, leg: Leg = "decode") -> Answer:
    """The decode leg of a prompt."""
    transfer = Transfer(pinned.params, pinned.first_tokens) if pinned else None
    answer = await case.submit(case.request(prompt, leg=leg, max_tokens=TOKENS), transfer).ended()
    await case.idle()
    return answer


async def alone(case: EngineCase, prompt: list[int]) -> list[int]:
    """What the engine answers by itself."""
    return (await case.generate(prompt, max_tokens=TOKENS)).tokens


async def test_two_legs_answer_as_one_engine_does(pair: Pair) -> None:
    """Equal tokens at temperature 0, whichever way round; the decode leg computes next to nothing of the prompt."""
    for blocks, (first, second) in ((0.5, pair), (BLOCKS, pair), (BLOCKS, pair[::-1])):
        prompt = first.prompt(blocks)
        _, pinned = await prefilled(first, prompt)
        answer = await decoded(second, prompt, pinned)
        assert (answer.finish, len(answer.tokens)) == ("length", TOKENS)
        assert answer.cached_tokens >= len(prompt) - first.info.block_size
        assert answer.tokens == await alone(first, prompt)


async def test_fetched_blocks_are_announced_and_used_again(pair: Pair) -> None:
    """The decode engine holds the prompt from then on."""
    first, second = pair
    prompt = first.prompt(BLOCKS)
    _, pinned = await prefilled(first, prompt)
    await decoded(second, prompt, pinned)
    await second.holds(second.hashes(prompt))
    assert (await second.generate(prompt, max_tokens=1)).cached_tokens == second.info.block_size


async def test_prefix_that_the_decode_engine_has_is_not_in_the_way(pair: Pair) -> None:
    """All of it, or a part: the answer is the same."""
    first, second = pair
    prefix = first.prompt(1)
    await second.generate(prefix + second.prompt(0.2), max_tokens=1)
    for prompt in (prefix + first.prompt(0.2), prefix + first.prompt(1.2)):
        _, pinned = await prefilled(first, prompt)
        assert (await decoded(second, prompt, pinned)).tokens == await alone(first, prompt)


async def test_used_handoff_is_refused(pair: Pair) -> None:
    """Its blocks may be another prompt's by now: an error, never an answer."""
    first, second = pair
    prompt, other = first.prompt(BLOCKS), first.prompt(BLOCKS)
    expected = await alone(second, other)
    _, pinned = await prefilled(first, prompt)
    await decoded(second, prompt, pinned)
    for again in (prompt, other):
        answer = await decoded(second, again, pinned)
        assert (answer.finish, answer.tokens) == ("error", [])
        assert answer.steps[-1].detail
    assert await alone(second, other) == expected


async def test_a_handoff_is_good_for_its_own_prompt_only(pair: Pair) -> None:
    """Not for another one of the same length, nor once a byte has changed; unused, it stays good."""
    first, second = pair
    prompt, other = first.prompt(BLOCKS), first.prompt(BLOCKS)
    _, pinned = await prefilled(first, prompt)
    cases = [(other, pinned.params)]
    if second.engine.name != "sim":
        # The simulated one, apart from the other in another process, reads nothing that could be wrong.
        flipped = bytearray(pinned.params)
        flipped[len(flipped) // 2] ^= 1
        cases.append((prompt, bytes(flipped)))
    for asked, params in cases:
        answer = await decoded(second, asked, pinned._replace(params=params))
        assert (answer.finish, answer.tokens) == ("error", [])
        assert answer.steps[-1].detail
    assert (await decoded(second, prompt, pinned)).tokens == await alone(first, prompt)


async def test_unusable_handoffs_end_in_an_error_and_leave_nothing(pair: Pair) -> None:
    """Not readable, not whole, from an engine that is gone: no token of it, and the prompt's answer stays right."""
    first, second = pair
    prompt = first.prompt(BLOCKS)
    request, pinned = await prefilled(first, prompt)
    bad = [b"", b"\xff", b"{}", pinned.params[: len(pinned.params) // 2]]
    if second.engine.name == "vllm":
        whole = msgspec.json.decode(unseal(pinned.params))
        no_blocks: list[Any] = [[], [[]], [["a"]], None]
        changes: list[dict[str, Any]] = [
            *({key: None} for key in ("remote_request_id", "remote_port")),
            *({"remote_block_ids": blocks} for blocks in no_blocks),
            {"remote_engine_id": "gone", "remote_port": free_port()},
            {"remote_engine_id": "another", "remote_request_id": "r"},
        ]
        sealed = second.request(prompt)
        bad += [seal(msgspec.json.encode(whole | change), sealed) for change in changes]
    for params in bad:
        answer = await decoded(second, prompt, pinned._replace(params=params))
        assert (answer.finish, answer.tokens) == ("error", []), params
        assert answer.steps[-1].detail
    await first.engine.release(request, pinned.params)
    expected = await alone(first, prompt)
    assert (await decoded(second, prompt, None)).tokens == expected


async def test_decode_leg_without_a_handoff_computes_itself(pair: Pair) -> None:
    """What the prefill did not find worth handing over."""
    first, second = pair
    prompt = first.prompt(BLOCKS)
    answer = await decoded(second, prompt, None)
    assert answer.tokens == await alone(first, prompt)
    assert answer.cached_tokens == 0


async def test_handoff_counts_for_a_decode_leg_only(pair: Pair) -> None:
    """A whole request with parameters beside it answers by itself and leaves them good."""
    first, second = pair
    prompt = first.prompt(BLOCKS)
    _, pinned = await prefilled(first, prompt)
    whole = await decoded(second, prompt, pinned, leg="")
    assert whole.cached_tokens == 0
    assert (await decoded(second, prompt, pinned)).tokens == whole.tokens


async def test_released_blocks_are_free_long_before_the_lease_ends(pair: Pair) -> None:
    """Until then they are not given to others; release again, or of the unknown, is fine."""
    first, _ = pair
    request, pinned = await prefilled(first, first.prompt(BLOCKS))
    await first.idle()
    if first.engine.name == "vllm":
        with pytest.raises(EngineError, match="use blocks"):
            await first.engine.clear_kv()
    for _ in range(2):
        await first.engine.release(request, pinned.params)
    async with asyncio.timeout(RELEASED_S):
        while not await cleared(first):
            await asyncio.sleep(POLL_S)


async def cleared(case: EngineCase) -> bool:
    """Could the cache be cleared?"""
    try:
        await case.engine.clear_kv()
    except EngineError:
        return False
    return True


async def test_aborted_legs_end_with_an_abort(pair: Pair) -> None:
    """Both kinds, and both engines answer afterwards."""
    first, second = pair
    prompt = first.prompt(3.5)
    request = first.request(prompt, leg="prefill")
    answer = first.submit(request)
    first.engine.abort(request.request)
    assert (await answer.ended()).finish == "abort"
    assert answer.steps[-1].pinned is None
    _, pinned = await prefilled(first, prompt)
    request = second.request(prompt, leg="decode", max_tokens=700)
    answer = second.submit(request, Transfer(pinned.params))
    await answer.begun()
    second.engine.abort(request.request)
    assert (await answer.ended()).finish == "abort"
    assert await alone(second, prompt) == await alone(first, prompt)


async def test_engines_that_pair_say_the_same_name(pair: Pair) -> None:
    """Engine, version, model and types in it."""
    first, second = (case.info for case in pair)
    assert first.pairs_with == second.pairs_with != ""
    assert pair[0].engine.choreography == "returned"


async def test_request_that_can_never_work_is_rejected_on_any_leg(pair: Pair) -> None:
    """Before anything is pinned or fetched."""
    first, _ = pair
    long = first.prompt(1) * (first.info.context_length // first.info.block_size + 1)
    for leg in ("prefill", "decode"):
        with pytest.raises(RequestRejected):
            first.submit(first.request(long, leg=leg))
