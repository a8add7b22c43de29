"""Images through the TensorRT-LLM adapter, with the double of the library: prompts that it expands, and blocks that events name."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from headwater.engines.conformance.case import Answer, EngineCase, started
from headwater.engines.engine import RequestRejected
from headwater.engines.model_files import NO_FILES
from headwater.engines.sim import ZERO
from headwater.engines.tensorrt_llm import TensorRtOptions
from headwater.engines.tensorrt_llm.engine import TensorRtEngine
from headwater.schemas import hashing
from headwater.schemas.events import Role
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import MediaSupport
from tests.support.engines.settings import engine_settings
from tests.support.tensorrt_llm.double import World, installed
from tests.support.tensorrt_llm.images import PLACEHOLDER, SUPPORT, InputProcessor

pytestmark = pytest.mark.timeout(120)

SIDE, TOKENS = 168, 36
SIZE = 32
"""Tokens per block: an image spans two or three."""


@pytest.fixture
def world() -> Iterator[World]:
    """The double with a model that takes images."""
    made = World(step_time=ZERO, media=MediaSupport(SUPPORT))
    made.input_processor = InputProcessor()
    with installed(made):
        yield made


def engine(world: World, role: Role = "both", **overrides: Any) -> TensorRtEngine:
    """A worker that serves whole requests, unless they say otherwise."""
    files = NO_FILES._replace(eos_token_ids=(2,))
    options = TensorRtOptions(overrides=overrides)
    return TensorRtEngine(engine_settings(options, role=role, files=files), world.clock)


def picture(seed: int, start: int) -> PromptMedia:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    return PromptMedia("image", f"{seed:032x}", start, TOKENS, pixels.shape, pixels.tobytes())


def asked(case: EngineCase, *media: PromptMedia, tokens: int = 150) -> Any:
    """A request with these images."""
    prompt = [7] * tokens
    for item in media:
        prompt[item.start : item.start + item.tokens] = [PLACEHOLDER] * item.tokens
    return msgspec.structs.replace(case.request(prompt, max_tokens=4), media=media)


def named(request: Any) -> hashing.U64:
    """The blocks of its prompt, as edges name them."""
    places = [(item.id, item.start, item.tokens) for item in request.media]
    digests = hashing.media_digests(places, SIZE)
    return hashing.sequence_hashes(hashing.unpack_tokens(request.tokens), SIZE, multimodal=digests)


async def answer(case: EngineCase, request: Any) -> Answer:
    """To a request."""
    return await case.submit(request).ended()


async def test_images_are_expanded_as_edges_count_them_and_name_their_blocks(world: World) -> None:
    """One, two of a prompt, next to each other and within one block; the answer is of each, and the same image is reused."""
    async with started(engine(world)) as case:
        assert case.info.media.images == SUPPORT
        assert "images" in case.engine.capabilities
        one = asked(case, picture(1, 40))
        first = await answer(case, one)
        await case.holds(named(one))
        again = await answer(case, asked(case, picture(1, 40)))
        assert again.tokens == first.tokens
        assert again.cached_tokens == 128
        other = await answer(case, asked(case, picture(2, 40)))
        assert other.tokens != first.tokens
        assert other.cached_tokens == 32
        for places in ((10, 46), (30, 100), (0, 64), (31, 67)):
            both = asked(case, picture(3, places[0]), picture(4, places[1]))
            await answer(case, both)
            await case.holds(named(both))


async def test_what_would_end_tensorrt_llm_is_rejected(world: World) -> None:
    """A placeholder without an image, an image with another number of tokens, and legs of requests with images."""
    async with started(engine(world)) as case:
        bare = msgspec.structs.replace(asked(case, picture(1, 40)), media=())
        with pytest.raises(RequestRejected, match="without an image"):
            case.submit(bare)
        wrong = msgspec.structs.replace(picture(1, 40), tokens=TOKENS - 1)
        with pytest.raises(RequestRejected, match="came with 35 tokens"):
            case.submit(asked(case, wrong))
    transceiver = {
        "max_seq_len": 8_192,
        "cache_transceiver_config": {
            "backend": "DEFAULT",
            "max_tokens_in_buffer": 8_192,
            "kv_transfer_timeout_ms": 60_000,
        },
    }
    async with started(engine(world, "prefill", **transceiver)) as case:
        assert "images" not in case.engine.capabilities
        assert case.info.media.images is None


@pytest.mark.parametrize("flaw", ["expand_prompt_token_ids_for_mm", "get_num_tokens_per_image", "rule"])
async def test_a_model_whose_prompts_cannot_be_predicted_serves_text(
    world: World, flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release or a model without one of the methods, or whose counts follow no known rule: the log says why."""
    if flaw == "rule":
        monkeypatch.setattr(InputProcessor, "get_num_tokens_per_image", lambda _, image: image.width % 91 + 4)
    else:
        monkeypatch.delattr(InputProcessor, flaw)
    with capture_logs() as logs:
        async with started(engine(world)) as case:
            assert "images" not in case.engine.capabilities
            with pytest.raises(RequestRejected, match="images"):
                case.submit(asked(case, picture(1, 40)))
    assert [one["kind"] for one in logs if one["event"] == "media_not_served"] == ["image"]


async def test_blocks_with_images_of_no_request_are_not_indexed(world: World) -> None:
    """Their tokens are unknown, so they would have wrong names; nor what follows them."""
    made = engine(world)
    async with started(made) as case:
        assert made._images is not None
        request = asked(case, picture(5, 40))
        with capture_logs() as logs:
            inputs = made._images.inputs
            made._images.inputs = lambda *given: (  # type: ignore[method-assign]
                inputs(*given),
                made._images._tokens.clear(),  # type: ignore[union-attr]
            )[0]
            await answer(case, request)
            await case.holds(named(request)[:1])
            await case.settle()
        held = [block for event in case.engine.held_blocks() for block in hashing.unpack_hashes(event.hashes)]
        assert not set(named(request)[1:].tolist()) & set(held)
        assert "kv_blocks_of_unknown_media" in [one["event"] for one in logs]
