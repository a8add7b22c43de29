"""Checks of prefill and decode legs, on two engines of the same kind."""

from headwater.engines.conformance.case import Answer, EngineCase, Inapplicable, check, raises
from headwater.engines.engine import Pinned, RequestRejected, Transfer
from headwater.schemas.inference import Leg

TOKENS = 5


async def _prefilled(case: EngineCase, prompt: list[int]) -> tuple[str, Pinned]:
    """The prefill leg of a prompt: its request, and what it left for another engine."""
    request = case.request(prompt, leg="prefill", max_tokens=40, min_tokens=3)
    answer = await case.submit(request).ended()
    assert answer.finish in ("stop", "length"), answer.steps
    assert answer.tokens == [], "the token of a prefill leg is not part of any answer"
    pinned = [step.pinned for step in answer.steps if step.pinned is not None]
    assert len(pinned) == 1, f"{len(pinned)} steps with pinned KV"
    assert pinned[0].lease_s > 0
    return request.request, pinned[0]


async def _decoded(case: EngineCase, prompt: list[int], pinned: Pinned | None, leg: Leg = "decode") -> Answer:
    transfer = Transfer(pinned.params, pinned.first_tokens) if pinned else None
    answer = await case.submit(case.request(prompt, leg=leg, max_tokens=TOKENS), transfer).ended()
    await case.idle()
    return answer


def _one_after_the_other(case: EngineCase) -> None:
    if case.engine.choreography == "room":
        raise Inapplicable("its legs run at the same time")


@check("generate", "handoff", subject="pair")
async def two_legs_answer_as_one_engine_does(first: EngineCase, second: EngineCase) -> None:
    """Equal tokens at temperature 0, whichever way round."""
    _one_after_the_other(first)
    for blocks, prefill_case, other in ((0.5, first, second), (1.5, first, second), (1.5, second, first)):
        prompt = prefill_case.prompt(blocks)
        _, pinned = await _prefilled(prefill_case, prompt)
        answer = await _decoded(other, prompt, pinned)
        assert (answer.finish, len(answer.tokens)) == ("length", TOKENS), answer.steps
        assert answer.tokens == (await prefill_case.generate(prompt, max_tokens=TOKENS)).tokens


@check("generate", "handoff", "kv_events", subject="pair")
async def fetched_blocks_are_announced_and_used_again(first: EngineCase, second: EngineCase) -> None:
    """The decode engine has the prompt from then on; it counts what it fetched as cached, if it counts at all."""
    _one_after_the_other(first)
    prompt, size = first.prompt(1.5), first.info.block_size
    _, pinned = await _prefilled(first, prompt)
    cached = (await _decoded(second, prompt, pinned)).cached_tokens
    assert cached == -1 or cached >= len(prompt) - size
    await second.holds(second.hashes(prompt))
    assert (await second.generate(prompt, max_tokens=1)).cached_tokens == size


@check("generate", "handoff", subject="pair")
async def prefix_that_the_decode_engine_has_is_not_in_the_way(first: EngineCase, second: EngineCase) -> None:
    """All of the prompt's blocks, or a part: the answer is the same."""
    _one_after_the_other(first)
    prefix = first.prompt(1)
    await second.generate(prefix + second.prompt(0.2), max_tokens=1)
    for prompt in (prefix + first.prompt(0.2), prefix + first.prompt(1.2)):
        _, pinned = await _prefilled(first, prompt)
        answer = await _decoded(second, prompt, pinned)
        assert answer.tokens == (await first.generate(prompt, max_tokens=TOKENS)).tokens


@check("generate", "handoff", subject="pair")
async def handoff_counts_for_a_decode_leg_only(first: EngineCase, second: EngineCase) -> None:
    """A whole request with parameters next to it answers by itself and leaves them usable."""
    _one_after_the_other(first)
    prompt = first.prompt(1.5)
    _, pinned = await _prefilled(first, prompt)
    whole_answer = await _decoded(second, prompt, pinned, leg="")
    assert whole_answer.cached_tokens in (-1, 0)
    assert (await _decoded(second, prompt, pinned)).tokens == whole_answer.tokens


@check("generate", "handoff", subject="pair")
async def used_handoff_is_rejected(first: EngineCase, second: EngineCase) -> None:
    """Its KV may be another prompt's by now: an error, never an answer."""
    _one_after_the_other(first)
    prompt, other = first.prompt(1.5), first.prompt(1.5)
    _, pinned = await _prefilled(first, prompt)
    await _decoded(second, prompt, pinned)
    for again in (prompt, other):
        answer = await _decoded(second, again, pinned)
        assert (answer.finish, answer.tokens) == ("error", []), answer.steps
        assert answer.steps[-1].detail


@check("generate", "handoff", subject="pair")
async def unusable_handoff_ends_in_an_error(first: EngineCase, second: EngineCase) -> None:
    """Another prompt's, not readable, released: no token of it."""
    _one_after_the_other(first)
    prompt, other = first.prompt(1.5), first.prompt(1.5)
    request, pinned = await _prefilled(first, prompt)
    for bad in (b"", b"\xff", pinned.params[: len(pinned.params) // 2]):
        answer = await _decoded(second, prompt, pinned._replace(params=bad))
        assert (answer.finish, answer.tokens) == ("error", []), (bad, answer.steps)
        assert answer.steps[-1].detail
    answer = await _decoded(second, other, pinned)
    assert (answer.finish, answer.tokens) == ("error", []), "the KV of another prompt was accepted"
    assert answer.steps[-1].detail
    for _ in range(2):
        await first.engine.release(request, pinned.params)


@check("generate", "handoff", subject="pair")
async def decode_leg_without_a_handoff_computes_the_prompt(first: EngineCase, second: EngineCase) -> None:
    """A decode leg may come without a hand-off, if the prefill did not find the prompt's KV worth a transfer."""
    prompt = first.prompt(1.5)
    answer = await _decoded(second, prompt, None)
    assert answer.cached_tokens in (-1, 0)
    assert answer.tokens == (await first.generate(prompt, max_tokens=TOKENS)).tokens


@check("generate", "handoff", subject="pair")
async def aborted_legs_end_with_an_abort(first: EngineCase, second: EngineCase) -> None:
    """Aborted legs of both kinds end, and both engines answer afterwards."""
    prompt = first.prompt(2.5)
    request = first.request(prompt, leg="prefill")
    answer = first.submit(request)
    first.engine.abort(request.request)
    assert (await answer.ended()).finish == "abort"
    assert all(step.pinned is None for step in answer.steps)
    await first.idle()
    if first.engine.choreography != "room":
        _, pinned = await _prefilled(first, prompt)
        decode = second.request(prompt, leg="decode", max_tokens=second.info.context_length // 2)
        answer = second.submit(decode, Transfer(pinned.params, pinned.first_tokens))
        await answer.begun()
        second.engine.abort(decode.request)
        assert (await answer.ended()).finish in ("abort", "stop")
        await second.idle()
    assert (await second.generate(prompt)).tokens == (await first.generate(prompt)).tokens


@check("generate", "handoff", subject="pair")
async def engines_that_pair_have_the_same_name_for_it(first: EngineCase, second: EngineCase) -> None:
    """`pairs_with`: engine, version, model and types in it. What can never work is rejected on any leg."""
    assert first.info.pairs_with == second.info.pairs_with != ""
    long = first.prompt(1) * (first.info.context_length // first.info.block_size + 1)
    for leg in ("prefill", "decode"):
        with raises(RequestRejected):
            first.submit(first.request(long, leg=leg))
