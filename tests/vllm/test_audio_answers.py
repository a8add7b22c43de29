"""What the tiny model that hears answers: the real vLLM without a fleet, and Hugging Face's implementation. `test_audio` is the long form, in a fleet."""

import asyncio
import json
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from headwater.schemas import hashing
from headwater.schemas.messages.media import PromptMedia
from tests.support.engines.multimodal import audio_reference, tiny_audio_model
from tests.support.engines.multimodal.audio_reference import ANSWERS, BEFORE, noise, prompt
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


async def test_the_reference_is_what_hugging_face_answers() -> None:
    """Computed again, with the packages that vLLM runs on."""
    process = await zygote.start("-c", audio_reference.RUN, stdout=zygote.PIPE, vllm=True)
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1]) == [list(answer) for answer in ANSWERS.values()]


async def test_vllm_answers_as_hugging_face_does() -> None:
    """With as many tokens as it was seen to make of a clip; the same clip is found where it is cached, under the names of an edge."""
    engine = vllm_engine(str(tiny_audio_model.ensure()), max_model_len=1024, kv_cache_mib=64)
    async with started(engine) as case:
        support = case.info.media.audio
        assert support is not None
        assert (support.stride, support.samples_max) == (640, 480_000)
        for seconds, expected in ANSWERS.items():
            heard = noise(seconds)
            count = (len(heard) + 319) // 640
            item = PromptMedia(
                "audio", f"{count:032x}"[::-1], len(BEFORE) + 1, count, heard.shape, heard.tobytes()
            )
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
