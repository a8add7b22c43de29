"""The `Engine` contract on control: pause, sleep, clear, vectors, guides, processors; what is missing is named."""

import json
from collections.abc import Awaitable, Callable
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer

from headwater.engines.engine import EngineError, NotSupported, PauseMode, RequestRejected
from headwater.engines.vllm import VllmEngine
from headwater.ops.worker import default_model
from headwater.schemas import hashing
from headwater.schemas.events.kv import BlocksCleared
from headwater.schemas.messages.inference import EmbedRequest, Guide, GuideKind
from tests.support.ports.engines import EngineCase, rebuilt
from tests.support.ports.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]

LONG = 400


def has(case: EngineCase, *capabilities: str) -> None:
    """Skip unless the engine has all of these."""
    lacks = set(capabilities) - case.engine.capabilities
    if lacks:
        pytest.skip(f"{case.engine.name} has no {', '.join(sorted(lacks))} here")


async def test_what_an_engine_lacks_is_refused_by_name(full_case: EngineCase) -> None:
    """Every optional call and every optional part of a request."""
    case, engine = full_case, full_case.engine
    prompt = case.prompt(1.5)
    requests = {
        "guide": case.request(prompt, guide=Guide("choice", '["a", "b"]')),
        "processors": case.request(prompt, processors={"only": {"token": 5}}),
        "logprobs": case.request(prompt, logprobs=1),
        "logit_bias": case.request(prompt, logit_bias={5: 1.0}),
        "handoff": case.request(prompt, leg="prefill"),
    }
    for capability, request in requests.items():
        if capability not in engine.capabilities:
            with pytest.raises(NotSupported, match=capability):
                case.submit(request)
    calls: dict[str, tuple[Callable[[], Awaitable[object]], ...]] = {
        "sleep": (lambda: engine.sleep(1), engine.wake),
        "pause": (lambda: engine.pause("keep"), engine.resume),
        "profile": (lambda: engine.profile(on=True), lambda: engine.profile(on=False)),
        "handoff": (lambda: engine.release("r", b"{}"),),
        "embed": (lambda: engine.embed(EmbedRequest("r", (hashing.pack_tokens(prompt),))),),
    }
    for capability, makes in calls.items():
        for make in makes:
            if capability not in engine.capabilities:
                with pytest.raises(NotSupported, match=capability):
                    await make()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pause_stops_and_resume_goes_on(full_case: EngineCase, mode: PauseMode) -> None:
    """What ran is aborted, ends, or goes on where it was; what came meanwhile waits; the cache stays."""
    has(full_case, "pause")
    case, engine = full_case, full_case.engine
    prompt = case.prompt(1.5)
    length = 24 if mode == "wait" else LONG
    whole = (await case.generate(prompt, seed=5, max_tokens=40)).tokens
    request = case.request(prompt, seed=5, max_tokens=length)
    running = case.submit(request)
    await running.begun()
    await engine.pause(mode)
    if mode != "keep":
        await running.ended()
        assert running.finish == ("abort" if mode == "abort" else "length")
    reached = len(running.steps)
    late = case.submit(case.request(prompt, seed=5, max_tokens=4))
    await engine.check()
    assert (len(running.steps), late.steps) == (reached, [])
    await engine.resume()
    assert (await late.ended()).tokens == whole[:4]
    assert late.cached_tokens == case.info.block_size
    if mode == "keep":
        await eventually(lambda: len(running.tokens) >= 40)
        assert running.tokens[:40] == whole
        engine.abort(request.request)
        await running.ended()
    await case.idle()


async def test_clear_is_told_when_it_returns(full_case: EngineCase) -> None:
    """Not with the engine's next step: an idle engine makes none."""
    case = full_case
    prompt = case.prompt(2.5)
    await case.generate(prompt)
    await case.holds(case.hashes(prompt))
    await case.engine.clear_kv()
    await eventually(lambda: not +case.kv.held)
    assert not rebuilt(case)
    fresh = case.prompt(2.5)
    await case.generate(fresh)
    await case.holds(case.hashes(fresh))
    assert not case.kv.holds(case.hashes(prompt))
    await eventually(lambda: rebuilt(case) == +case.kv.held)
    assert (await case.generate(prompt)).cached_tokens == 0


async def test_after_lost_events_used_blocks_are_announced_again(full_case: EngineCase) -> None:
    """VLLM has no dump: each request has it tell of the cached blocks that it uses, until a clear."""
    case = full_case
    if not isinstance(case.engine, VllmEngine):
        pytest.skip("it loses no events, or cannot be told to announce blocks again")
    used, unused = case.prompt(2.5), case.prompt(1.5)
    for prompt in (used, unused):
        await case.generate(prompt, max_tokens=1)
        await case.holds(case.hashes(prompt))
    [rank] = case.engine._ranks
    rank.translator.lost(1)
    case.kv.held.clear()
    for _ in range(2):
        again = await case.generate(used, max_tokens=1)
        assert again.cached_tokens == 2 * case.info.block_size
        await case.holds(case.hashes(used))
        await eventually(lambda: rebuilt(case) == +case.kv.held)
    assert set((+case.kv.held).values()) == {1}
    assert not case.kv.holds(case.hashes(unused))
    await case.generate(used + case.prompt(1), max_tokens=1)
    await eventually(lambda: len(+case.kv.held) == 3)
    await case.engine.clear_kv()
    assert not rank.translator.cold


async def test_sleeping_engine_holds_nothing_and_wakes(full_case: EngineCase) -> None:
    """The cache is gone at once for whoever reads the events, and stays so; awake it answers as before."""
    case, engine = full_case, full_case.engine
    if engine.name in ("vllm", "sglang") and "sleep" not in engine.capabilities:
        # On CPU they keep their memory, and the configuration that says sleep is refused; the rest is the same.
        engine.capabilities |= {"sleep"}
        engine.__dict__["_keeps_weights"] = True
    has(case, "sleep")
    prompt = case.prompt(2.5)
    before = await case.generate(prompt, seed=5)
    await case.holds(case.hashes(prompt))
    with pytest.raises(EngineError, match="level 3"):
        await engine.sleep(3)
    request = case.request(prompt, max_tokens=LONG)
    running = case.submit(request)
    await running.begun()
    with pytest.raises(EngineError, match="running"):
        await engine.sleep(1)
    engine.abort(request.request)
    await running.ended()
    await case.idle()
    await engine.sleep(1)
    await eventually(lambda: not +case.kv.held)
    assert isinstance(case.kv.events[-1], BlocksCleared)
    assert not rebuilt(case)
    with pytest.raises(EngineError, match="is already asleep"):
        await engine.sleep(1)
    late = case.submit(case.request(prompt, seed=5))
    await engine.check()
    assert not late.steps
    await engine.wake()
    assert (await late.ended()).tokens == before.tokens
    assert late.cached_tokens == 0
    await case.holds(case.hashes(prompt))
    await case.idle()
    await eventually(lambda: rebuilt(case) == +case.kv.held)


async def test_guides_decide_what_can_be_said(full_case: EngineCase) -> None:
    """One of the choices, a match of the expression, JSON of the schema; nonsense is refused."""
    has(full_case, "guide")
    case = full_case
    tokenizer = Tokenizer.from_file(str(default_model.ensure() / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is").ids

    async def guided(kind: GuideKind, value: str) -> str:
        answer = await case.generate(prompt, guide=Guide(kind, value), ignore_eos=False, max_tokens=40)
        assert answer.finish == "stop", answer.steps[-1]
        text: str = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return text

    assert await guided("choice", '["north", "south"]') in ("north", "south")
    assert len(await guided("regex", "[0-9]{3}x")) == 4
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    assert json.loads(await guided("json_schema", json.dumps(schema)))["a"] in ("x", "y")
    assert await guided("grammar", 'root ::= "yes" | "no"') in ("yes", "no")
    wrong = (Guide("choice", "[]"), Guide("choice", "no"), Guide("json_schema", "{"), Guide("regex", ""))
    for guide in wrong:
        with pytest.raises(RequestRejected, match="guide"):
            case.submit(case.request(prompt, guide=guide))


async def test_logits_processors_are_used_by_name(full_case: EngineCase) -> None:
    """Only by the requests that name them; an unknown one is refused with those that there are."""
    has(full_case, "processors")
    case = full_case
    prompt = case.prompt(1.5)
    assert case.info.processors == ("only",)
    forced = case.submit(case.request(prompt, processors={"only": {"token": 777}}))
    free = case.submit(case.request(prompt))
    assert (await forced.ended()).tokens == [777] * 8
    assert 777 not in (await free.ended()).tokens
    for name in ("other", "kv_transfer_params"):
        with pytest.raises(RequestRejected, match="known are: only"):
            case.submit(case.request(prompt, processors={name: {"do_remote_prefill": True}}))


async def test_vectors_are_the_tokens_and_nothing_else(pooling_case: EngineCase) -> None:
    """Of length 1, the same again and in any company, different for other tokens; refusals by name."""
    case = pooling_case
    prompts = [case.prompt(blocks) for blocks in (0.3, 1.5, 1.5)]
    packed = tuple(map(hashing.pack_tokens, prompts))
    vectors = await case.engine.embed(EmbedRequest("e1", packed))
    arrays = [np.frombuffer(vector, "<f4") for vector in vectors]
    assert len({len(array) for array in arrays}) == 1
    for array in arrays:
        assert np.linalg.norm(array) == pytest.approx(1.0, abs=1e-3)
    for one, other in pairwise(arrays):
        assert one @ other < 0.999
    [alone] = await case.engine.embed(EmbedRequest("e2", packed[1:2]))
    assert np.frombuffer(alone, "<f4") == pytest.approx(arrays[1], abs=1e-3)
    with pytest.raises(RequestRejected, match="supported: "):
        await case.engine.embed(EmbedRequest("e3", packed, task="classify"))
    for wrong in ([], prompts[0] * (case.info.context_length + 1)):
        with pytest.raises(RequestRejected, match="tokens"):
            await case.engine.embed(EmbedRequest("e4", (hashing.pack_tokens(wrong),)))
    assert "embed" in case.info.tasks
    if "generate" not in case.engine.capabilities:
        with pytest.raises(NotSupported, match="generate"):
            case.submit(case.request(prompts[0]))
    await case.idle()
