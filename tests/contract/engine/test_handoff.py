"""The `Engine` contract on prefill and decode legs: the shipped checks, and what depends on an engine's own parameters."""

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.engines.conformance import handoff
from headwater.engines.conformance.case import Check, checks_of
from headwater.engines.engine import EngineError, Pinned, Transfer, seal, unseal
from headwater.schemas.inference import Leg
from tests.support.ports.conformance import hold, parametrized
from tests.support.ports.engines import Answer, EngineCase, free_port
from tests.support.ports.waiting import POLL_S

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

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


@parametrized(checks_of(handoff), "pair")
async def test_handoff(pair: Pair, one: Check) -> None:
    await hold(one, *pair)


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
