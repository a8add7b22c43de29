"""The `Engine` contract on generation: the shipped checks, and how a model's own end of an answer stops it."""

import pytest
from tokenizers import Tokenizer

from headwater.engines.conformance import generation
from headwater.engines.conformance.case import Check, checks_of
from tests.support.engines import tiny_model
from tests.support.ports.conformance import hold, parametrized
from tests.support.ports.engines import EOS, EngineCase

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

CHAT = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"


@parametrized(checks_of(generation), "one")
async def test_generation(engine_case: EngineCase, one: Check) -> None:
    await hold(one, engine_case)


async def test_end_of_answer_stops_and_can_be_ignored(engine_case: EngineCase) -> None:
    """The model's own end token means stop, unless the request says to go on."""
    prompt = Tokenizer.from_file(str(tiny_model.ensure() / "tokenizer.json")).encode(CHAT).ids
    ended = await engine_case.generate(prompt, max_tokens=300, seed=3, ignore_eos=False)
    assert ended.finish == "stop"
    assert ended.tokens[-1] == EOS
    more = len(ended.tokens) + 20
    ignored = await engine_case.generate(prompt, max_tokens=more, seed=3, ignore_eos=True)
    assert (ignored.finish, len(ignored.tokens)) == ("length", more)
    assert ignored.tokens[: len(ended.tokens) - 1] == ended.tokens[:-1]
