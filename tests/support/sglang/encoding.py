"""Images encoded by SGLang's encoder in a process of its own: with an engine in one process, each would change the other's settings."""

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

from headwater.engines.engine import EncodedImage, EngineInfo
from headwater.engines.sglang import SglangOptions
from headwater.schemas.media import PromptMedia
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.settings import engine_settings

TIMEOUT_S = 200


def encoded_apart(images: Sequence[PromptMedia]) -> list[EncodedImage]:
    """The embeddings of some images by the tiny vision model. SGLang has been imported, and runs no engine here yet."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, list(images)))
    process.start()
    there.close()
    assert here.poll(TIMEOUT_S), "the encoder did not answer"
    try:
        found: list[EncodedImage] = here.recv()
    finally:
        process.join(TIMEOUT_S)
    return found


def _run(to: Connection, images: list[PromptMedia]) -> None:
    to.send(asyncio.run(_encode(images)))


async def _encode(images: list[PromptMedia]) -> list[EncodedImage]:
    from headwater.engines.sglang.encoder import SglangEncoder

    model = str(tiny_vision_model.ensure())
    encoder = SglangEncoder(engine_settings(SglangOptions(), model, max_model_len=1024, role="encode"))
    info: EngineInfo = await encoder.start()
    assert info.media.images is not None
    found = [await encoder.encode(one) for one in images]
    again = await encoder.encode(images[0])
    assert again.cached
    assert [one.cached for one in found] == [False] * len(found)
    await encoder.check()
    await encoder.stop()
    return found
