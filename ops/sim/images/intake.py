"""The media intake of simulated edges: without processes, which virtual time does not know, and for portable pixmaps only."""

import asyncio
import base64
from functools import lru_cache
from typing import Final

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem, media_id
from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import MediaLimits
from headwater.actors.media.request.source import MediaSource, MediaTarget

DECODE_S: Final = 0.005


class SimIntake(MediaIntake):
    """Takes what `pictures.data_url` makes. See `MediaIntake`."""

    async def _fetch(
        self, source: MediaSource, limits: MediaLimits, target: MediaTarget, tenant: str
    ) -> MediaItem:
        await asyncio.sleep(DECODE_S)
        if source.encoding != "data_url" or not isinstance(source.content, str):
            raise MediaError(MediaCode.BAD_URL, "Simulated edges take pictures in data URLs only.")
        return _decoded(source.content)


@lru_cache(maxsize=64)
def _decoded(url: str) -> MediaItem:
    head, _, pixels = base64.b64decode(url.partition(",")[2]).partition(b"\n")
    _, width, height, _ = head.split()
    shape = (int(height), int(width), 3)
    data = memoryview(pixels)
    return MediaItem("image", media_id("image", "uint8", shape, data, ""), "uint8", shape, data, "ppm")
