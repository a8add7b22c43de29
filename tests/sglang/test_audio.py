"""Audio in chats on the real SGLang next to vLLM: blocks are found where they are cached, and a clip that fills the window is heard alike.

Of the long form: the model needs a fleet of its own. The engine without a fleet is always tested, in the contract suite.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.sglang.conftest import MODEL, SGLANG, VLLM, Mixed
from tests.support.clients.media_chat import ask, ask_again
from tests.support.engines.multimodal import tiny_audio_model
from tests.support.engines.multimodal.tiny_audio_model import RATE_HZ
from tests.support.media.images import data_url
from tests.support.media.recordings import tone, wav
from tests.support.processes.fleet import fleet
from tests.support.processes.restarted import kept_sglang_worker

pytestmark = [
    pytest.mark.soak,
    pytest.mark.vllm,
    pytest.mark.xdist_group("sglang"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]


def clip(seconds: float, hz: float = 440.0) -> str:
    """A tone as a data URL."""
    return data_url(wav(tone(seconds, RATE_HZ, hz=hz), RATE_HZ), "audio/wav")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a fleet with a worker of each engine. OpenAI's own client, without its retries: an error is seen, not repeated."""
    folder: Path = tmp_path_factory.mktemp("hearing")
    model = (
        "--model",
        str(tiny_audio_model.ensure()),
        "--served-model-name",
        MODEL,
        "--max-model-len",
        "2048",
    )
    limits = ("--workers", "1", "--kv-cache-mib", "256", "--client-policies", "kv,direct")
    async with (
        fleet(folder, "--engine", "vllm", *model, *limits, ready_s=240, vllm=True) as up,
        kept_sglang_worker(folder, up.nats, SGLANG, *model, "--", "--max-running-requests", "4") as worker,
    ):
        await Mixed(up, worker).until_ready()
        async with openai.AsyncOpenAI(
            base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=90
        ) as made:
            yield made


async def test_the_same_audio_is_found_where_it_is_cached_and_other_audio_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    """What the router expects is what SGLang finds; its tokens count as audio; two clips are told apart by their order."""
    plain = await ask(client, "What is this?", worker=SGLANG)
    first = await ask(client, clip(4.0), "What is this?", worker=SGLANG)
    assert (first.tokens, first.audio, first.cached) == (plain.tokens + 100 + 2, 100, 0)
    again = await ask_again(client, clip(4.0), "What is this?", worker=SGLANG)
    assert (again.text, again.worker) == (first.text, first.worker)
    assert again.cached == again.expected * 32 >= 96
    other = await ask(client, clip(4.0, hz=660.0), "What is this?", worker=SGLANG)
    assert other.text != first.text
    shifted = await ask(client, "Hear: ", clip(4.0), "What is this?", worker=SGLANG)
    salted = await ask(client, clip(4.0), "What is this?", worker=SGLANG, cache_salt="tenant")
    assert salted.text == first.text
    assert [(one.cached, one.expected) for one in (other, shifted, salted)] == [(0, 0)] * 3
    two = await ask(client, clip(2.0), clip(3.0), "Which is first?", worker=SGLANG)
    swapped = await ask(client, clip(3.0), clip(2.0), "Which is first?", worker=SGLANG)
    assert two.text != swapped.text
    assert swapped.cached == swapped.expected == 0


async def test_both_engines_hear_a_clip_that_fills_the_window_alike(client: openai.AsyncOpenAI) -> None:
    """The same greedy tokens with the same weights."""
    found = [await ask(client, clip(30.0, hz=330.0), "What is this?", worker=one) for one in (VLLM, SGLANG)]
    assert found[0].worker != found[1].worker
    assert found[0].text == found[1].text
    assert found[0].audio == found[1].audio == 750
