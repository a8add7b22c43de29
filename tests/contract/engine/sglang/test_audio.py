"""Audio on the real SGLang without a fleet: what is heard, what is reused, and prompts that no edge sends."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace
from tokenizers import Tokenizer

from headwater.engines.engine import RequestRejected
from headwater.schemas.media import PromptMedia
from tests.support.engines.multimodal import audio_reference, tiny_audio_model
from tests.support.engines.multimodal.media_requests import answer, answer_from_cache, rejection
from tests.support.engines.multimodal.tiny_audio_model import RATE_HZ
from tests.support.marks import SGLANG_HERE
from tests.support.ports.engines import EngineCase, sglang_engine, started

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), *SGLANG_HERE]

SECONDS = 2.0
TOKENS = 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case() -> AsyncIterator[EngineCase]:
    """An engine with the tiny model that hears."""
    engine = sglang_engine(
        str(tiny_audio_model.ensure()), max_model_len=2048, given={"skip_tokenizer_init": False}
    )
    async with started(engine) as made:
        yield made


def clip(start: int, seed: int = 1, id_: str = "") -> PromptMedia:
    """Two seconds of noise."""
    samples = round(SECONDS * RATE_HZ)
    heard = (np.random.default_rng(seed).standard_normal(samples) * 0.3).astype(np.float32)
    return PromptMedia("audio", id_ or f"{seed:032x}"[::-1], start, TOKENS, (samples,), heard.tobytes())


def placeholder(case: EngineCase) -> int:
    """The token that stands for audio; those that begin and end a clip are next to it."""
    assert case.info.media.audio is not None
    return case.info.media.audio.placeholder


def spanned(case: EngineCase, tokens: int = TOKENS) -> list[int]:
    """The tokens of a clip within those of a beginning and an end."""
    pad = placeholder(case)
    return [pad - 1, *[pad] * tokens, pad + 1]


async def test_a_clip_is_known_by_its_id(case: EngineCase) -> None:
    """Its blocks have the names that an edge computes. The id decides: samples of another id, place or tenant are never reused."""
    before, after = case.prompt(0.5), case.prompt(1)
    prompt = [*before, *spanned(case), *after]
    place = clip(len(before) + 1)
    first = await answer_from_cache(case, prompt, place)
    same_samples = await answer(case, prompt, clip(place.start, 1, "b" * 32))
    other = await answer(case, prompt, clip(place.start, 2))
    shifted = await answer(case, [7, *prompt], clip(place.start + 1))
    salted = await answer(case, prompt, place, salt="tenant")
    assert [one.cached_tokens for one in (same_samples, other, shifted, salted)] == [0] * 4
    assert same_samples.tokens == salted.tokens == first.tokens
    assert first.tokens not in (other.tokens, shifted.tokens)


async def test_clips_of_a_prompt_are_told_apart_by_their_order(case: EngineCase) -> None:
    """Two in one prompt: swapped, only what precedes the first is reused, and the answer is another."""
    before, between, after = case.prompt(1), case.prompt(0.3), case.prompt(1)
    prompt = [*before, *spanned(case), *between, *spanned(case), *after]
    first, second = len(before) + 1, len(before) + 1 + TOKENS + 1 + len(between) + 1
    one = await answer(case, prompt, clip(first, 3), clip(second, 4))
    again = await answer(case, prompt, clip(first, 3), clip(second, 4))
    assert (one.finish, again.tokens) == ("length", one.tokens)
    size = case.info.block_size
    assert again.cached_tokens == (len(prompt) - 1) // size * size
    swapped = await answer(case, prompt, clip(first, 4), clip(second, 3))
    assert swapped.cached_tokens == size
    assert swapped.tokens != one.tokens


async def test_a_clip_that_fills_the_window_is_heard_as_hugging_face_does(case: EngineCase) -> None:
    """Of shorter ones SGLang hears the silence that fills the window, too: its encoder is given no mask."""
    for seconds, expected in audio_reference.ANSWERS.items():
        heard = audio_reference.noise(seconds)
        count = (len(heard) + 319) // 640
        item = PromptMedia(
            "audio",
            f"{count:032x}"[::-1],
            len(audio_reference.BEFORE) + 1,
            count,
            heard.shape,
            heard.tobytes(),
        )
        found = await answer(case, audio_reference.prompt(placeholder(case), count), item)
        assert (tuple(found.tokens) == tuple(expected)) == (seconds == 30.0)


async def test_prompts_that_sglang_sees_otherwise_are_rejected(case: EngineCase) -> None:
    """Two clips without a token in between would be one; samples missing; a wrong count; a placeholder without a clip. What is spelled is text."""
    pad = placeholder(case)
    both = [pad - 1, *[pad] * 2 * TOKENS, pad + 1]
    assert "other media in the prompt" in await rejection(case, both, clip(1, 5), clip(1 + TOKENS, 6))
    short = await rejection(case, spanned(case), replace(clip(1), data=b"short"))
    assert "an audio clip of 128000 bytes came with 5" in short
    with pytest.raises(RequestRejected, match="this engine makes 50 of it"):
        case.submit(replace(case.request(spanned(case, 49)), media=(replace(clip(1), tokens=49),)))
    with pytest.raises(RequestRejected, match="without an audio clip"):
        case.submit(case.request(spanned(case)))
    video = PromptMedia("video", "c" * 32, 1, TOKENS, (2, 28, 28, 3))
    with pytest.raises(RequestRejected, match="no capability 'videos'"):
        case.submit(replace(case.request(spanned(case)), media=(video,)))
    tokenizer = Tokenizer.from_file(str(tiny_audio_model.ensure() / "tokenizer.json"))
    pieces = ["<|", "audio_bos", "|>", "<|", "AUDIO", "|>", "<|", "audio_eos", "|>"]
    spelled = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert tokenizer.decode(spelled, skip_special_tokens=False) == "".join(pieces)
    assert pad not in spelled
    assert (await answer(case, [*spelled, *spanned(case)], clip(len(spelled) + 1))).finish == "length"
