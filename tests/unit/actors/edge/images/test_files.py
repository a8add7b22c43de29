"""Images at a URL: of their tenant alone, for a time, and with errors that say what to do instead."""

import pytest

from headwater.actors.edge.history.objects import CHUNK_BYTES, OBJECT_BYTES_MAX, TenantObjects
from headwater.actors.edge.images.files import PATH, ImageFiles
from headwater.actors.http.errors import ApiError
from headwater.events.errors import LogError
from headwater.events.memory.stores import MemoryTable
from tests.support.worlds.clock import ManualClock

DATA = bytes(range(256)) * (3 * CHUNK_BYTES // 256)


class BrokenTable(MemoryTable):
    """A store that does not answer."""

    async def get(self, key: str) -> None:
        """See `Table.get`."""
        raise LogError("no server")

    async def put(self, key: str, value: bytes, *, ttl_s: int | None = None) -> int:
        """See `Table.put`."""
        raise LogError("no server")


async def test_an_image_is_its_tenants_until_it_expires() -> None:
    """In as many messages as it needs. Its path names its format and cannot be guessed."""
    clock = ManualClock()
    table = MemoryTable(clock)
    files = ImageFiles(TenantObjects(table, 60))
    path = await files.put("one", DATA, "webp")
    assert path.startswith(f"{PATH}img_")
    assert path.endswith(".webp")
    assert await files.put("one", DATA, "webp") != path
    assert await files.get("one", path) == (DATA, b"image/webp")
    for tenant, other in (("two", path), ("", path), ("one", path.replace(".webp", ".png"))):
        with pytest.raises(ApiError, match="no such image") as refused:
            await files.get(tenant, other)
        assert refused.value.status == 404
    await clock.advance(61)
    table.expire()
    with pytest.raises(ApiError, match="expired"):
        await files.get("one", path)


async def test_without_a_store_there_are_no_urls() -> None:
    """The client is told what to ask for."""
    files = ImageFiles(None)
    with pytest.raises(ApiError, match="b64_json") as refused:
        await files.put("", DATA, "png")
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    with pytest.raises(ApiError, match="no such image"):
        await files.get("", f"{PATH}img_{'0' * 32}.png")


async def test_errors_of_the_store_speak_of_images() -> None:
    """A store that fails is a 503, an image that is too large for it a 400."""
    files = ImageFiles(TenantObjects(BrokenTable(ManualClock()), 60))
    for call in (files.put("", b"x", "png"), files.get("", f"{PATH}img_{'0' * 32}.png")):
        with pytest.raises(ApiError, match="store of images") as failed:
            await call
        assert failed.value.status == 503
    with pytest.raises(ApiError, match="b64_json") as large:
        await files.put("", b"x" * (OBJECT_BYTES_MAX + 1), "png")
    assert (large.value.status, large.value.code) == (400, "image_too_large")
