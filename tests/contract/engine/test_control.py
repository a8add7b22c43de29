"""The `Engine` contract on control: the shipped checks, and clearing, guides and processors."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from headwater.engines.conformance import control
from headwater.engines.conformance.case import Check, checks_of
from headwater.engines.engine import RequestRejected
from headwater.engines.vllm.engine import VllmEngine
from headwater.schemas import hashing
from headwater.schemas.inference import EmbedRequest, Guide, GuideKind
from tests.support.engines import tiny_model
from tests.support.ports.conformance import hold, parametrized
from tests.support.ports.engines import EngineCase, rebuilt
from tests.support.ports.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG = 400


def has(case: EngineCase, *capabilities: str) -> None:
    """Skip unless the engine has all of these."""
    lacks = set(capabilities) - case.engine.capabilities
    if lacks:
        pytest.skip(f"{case.engine.name} has no {', '.join(sorted(lacks))} here")


GENERATING = [one for one in checks_of(control) if not {"embed", "lora"} & set(one.needs)]
POOLING = [one for one in checks_of(control) if not {"generate", "pause", "sleep"} & set(one.needs)]


@parametrized(GENERATING, "one")
async def test_control(full_case: EngineCase, one: Check) -> None:
    await hold(one, full_case)


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


async def test_guides_decide_what_can_be_said(full_case: EngineCase) -> None:
    """One of the choices, a match of the expression, JSON of the schema; nonsense is refused."""
    has(full_case, "guide")
    case = full_case
    tokenizer = Tokenizer.from_file(str(tiny_model.ensure() / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is").ids

    async def guided(kind: GuideKind, value: str) -> str:
        answer = await case.generate(prompt, guide=Guide(kind, value), ignore_eos=False, max_tokens=100)
        assert answer.finish == "stop", answer.steps[-1]
        text: str = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return text

    assert await guided("choice", '["north", "south"]') in ("north", "south")
    assert len(await guided("regex", "[0-9]{3}x")) == 4
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
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


@parametrized(POOLING, "one")
async def test_control_of_pooling(pooling_case: EngineCase, one: Check) -> None:
    await hold(one, pooling_case)


async def test_vectors_have_length_one(pooling_case: EngineCase) -> None:
    """As these models are trained: similarity is a product."""
    packed = tuple(hashing.pack_tokens(pooling_case.prompt(blocks)) for blocks in (0.3, 1.5))
    for vector in await pooling_case.engine.embed(EmbedRequest("e1", packed)):
        assert np.linalg.norm(np.frombuffer(vector, "<f4")) == pytest.approx(1.0, abs=1e-3)
