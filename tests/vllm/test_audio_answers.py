"""What the tiny model that hears answers: the real vLLM without a fleet, and Hugging Face's implementation. `test_audio` is the long form, in a fleet."""

import asyncio
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headwater.engines.conformance.case import EngineCase
from headwater.engines.vllm import VllmOptions, preload
from headwater.engines.vllm.encoder import VllmEncoder
from headwater.schemas import hashing
from headwater.schemas.media import PromptMedia
from tests.support.engines.multimodal import audio_reference, tiny_audio_model
from tests.support.engines.multimodal.audio_reference import ANSWERS, BEFORE, noise, prompt
from tests.support.engines.settings import engine_settings
from tests.support.ports.engines import started, vllm_engine
from tests.support.ports.waiting import eventually
from tests.support.processes import zygote

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(600),
    # Its own libraries' are not ours to fail on.
    pytest.mark.filterwarnings("ignore"),
]


def clip(seconds: float) -> PromptMedia:
    """The clip of the reference's prompt."""
    heard = noise(seconds)
    count = (len(heard) + 319) // 640
    return PromptMedia("audio", f"{count:032x}"[::-1], len(BEFORE) + 1, count, heard.shape, heard.tobytes())


async def two_clips(
    case: EngineCase, placeholder: int, clips: list[PromptMedia], request: str = "together"
) -> list[int]:
    """What the engine answers about both clips in one prompt."""
    first, second = clips
    begins = prompt(placeholder, first.tokens)
    tokens = [*begins, *prompt(placeholder, second.tokens)]
    media = (first, replace(second, start=len(begins) + second.start))
    return (await case.submit(replace(case.request(tokens), request=request, media=media)).ended()).tokens


@pytest.mark.soak
async def test_the_reference_is_what_hugging_face_answers() -> None:
    """Computed again, with the packages that vLLM runs on."""
    process = await zygote.start("-c", audio_reference.RUN, stdout=zygote.PIPE, vllm=True)
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1]) == [list(answer) for answer in ANSWERS.values()]


@pytest.fixture(scope="module")
def imported() -> None:
    """VLLM in this process. The processes of its engines are forks of it, instead of importing it again, four times."""
    preload.preload()


@pytest.mark.soak
@pytest.mark.usefixtures("imported")
async def test_vllm_answers_as_hugging_face_does() -> None:
    """With as many tokens as it was seen to make of a clip; the same clip is found where it is cached, under the names of an edge.

    Given the embeddings that an encode worker computes, of one clip or of two, it gives the same tokens and encodes nothing.
    """
    encoder = VllmEncoder(
        engine_settings(VllmOptions(), model := str(tiny_audio_model.ensure()), max_model_len=1024)
    )
    assert (await encoder.start()).media.audio is not None
    try:
        encoded = {seconds: await encoder.encode(clip(seconds)) for seconds in ANSWERS}
    finally:
        await encoder.stop()
    engine: Any = vllm_engine(model, max_model_len=1024, kv_cache_mib=64, reads_embeddings=True)
    async with started(engine) as case:
        support = case.info.media.audio
        assert support is not None
        assert (support.stride, support.samples_max) == (640, 480_000)
        for seconds, expected in ANSWERS.items():
            item = clip(seconds)
            count = item.tokens
            tokens = prompt(support.placeholder, count)
            request = replace(case.request(tokens), media=(item,))
            found = await case.submit(request).ended()
            assert (found.cached_tokens, found.tokens) == (0, list(expected))
            digests = hashing.media_digests([(item.id, item.start, count)], case.info.block_size)
            names = hashing.sequence_hashes(
                np.array(tokens, np.uint32), case.info.block_size, multimodal=digests
            )
            await eventually(partial(case.kv.holds, names))
            again = await case.submit(replace(case.request(tokens), media=(item,))).ended()
            assert (again.cached_tokens > 0, again.tokens) == (True, list(expected))
            other = replace(request, request="other", media=(replace(item, id=item.id[::-1]),))
            assert (await case.submit(other).ended()).cached_tokens == 0
        heard_together = await two_clips(case, support.placeholder, [clip(seconds) for seconds in ANSWERS])
        computed = engine._embeddings.encoded
        both = []
        for seconds, expected in ANSWERS.items():
            # Under another name: what was encoded under its own is in vLLM's cache.
            item = replace(clip(seconds), data=b"")
            item = replace(item, id=f"f{item.id[1:]}")
            await engine.put_embedding(item, encoded[seconds])
            assert engine.holds_embedding(item)
            request = replace(case.request(prompt(support.placeholder, item.tokens)), media=(item,))
            found = await case.submit(request).ended()
            assert (found.cached_tokens, found.tokens) == (0, list(expected))
            both.append(item)
        assert await two_clips(case, support.placeholder, both, request="given") == heard_together
        assert engine._embeddings.encoded == computed
