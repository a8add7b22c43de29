"""Images at a URL: of their tenant alone, for a time, and with errors that say what to do instead."""

import asyncio

import pytest

from headwater.actors.edge.apis import images as image_files
from headwater.actors.edge.apis.images import IMAGE_FILES, ImageFiles
from headwater.actors.edge.history import CHUNK_BYTES, OBJECT_BYTES_MAX, TenantObjects
from headwater.actors.http.errors import ApiError
from headwater.events.memory import MemoryTable
from headwater.events.ports import LogError
from tests.support.worlds.clock import ManualClock

DATA = bytes(range(256)) * (3 * CHUNK_BYTES // 256)


class BrokenTable(MemoryTable):
    async def get(self, key: str) -> None:
        raise LogError("no server")

    async def put(self, key: str, value: bytes, *, ttl_s: int | None = None) -> int:
        raise LogError("no server")


async def test_an_image_is_its_tenants_until_it_expires() -> None:
    """In as many messages as it needs. Its path names its format and cannot be guessed."""
    clock = ManualClock()
    table = MemoryTable(clock)
    files = ImageFiles(TenantObjects(table, 60))
    path = await files.put("one", DATA, "webp")
    assert path.startswith(f"{IMAGE_FILES}img_")
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
        await files.get("", f"{IMAGE_FILES}img_{'0' * 32}.png")


async def test_errors_of_the_store_speak_of_images() -> None:
    """A store that fails is a 503, an image that is too large for it a 400."""
    files = ImageFiles(TenantObjects(BrokenTable(ManualClock()), 60))
    for call in (files.put("", b"x", "png"), files.get("", f"{IMAGE_FILES}img_{'0' * 32}.png")):
        with pytest.raises(ApiError, match="store of images") as failed:
            await call
        assert failed.value.status == 503
    with pytest.raises(ApiError, match="b64_json") as large:
        await files.put("", b"x" * (OBJECT_BYTES_MAX + 1), "png")
    assert (large.value.status, large.value.code) == (400, "image_too_large")


class FailingTable(MemoryTable):
    """A store whose first writes fail."""

    def __init__(self, failures: int) -> None:
        super().__init__(ManualClock())
        self.failures = failures

    async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
        self.failures -= 1
        if self.failures >= 0:
            raise LogError("no server")
        return await super().put(key, value, ttl_s=ttl_s)


async def test_a_store_that_fails_for_a_moment_gives_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further attempts for the first image; a store that stays away is not waited for again."""
    monkeypatch.setattr(image_files, "PAUSES_S", (0.0, 0.0))
    files = ImageFiles(TenantObjects(FailingTable(2), 60))
    paths = await files.put_all("", [b"1", b"2"], "png")
    assert [(await files.get("", path))[0] for path in paths if path] == [b"1", b"2"]
    table = FailingTable(10)
    assert await ImageFiles(TenantObjects(table, 60)).put_all("", [b"1", b"2", b"3"], "png") == [None] * 3
    assert 10 - table.failures == 5


async def test_an_image_that_the_store_does_not_take_costs_no_other() -> None:
    """One that is too large for an object."""
    files = ImageFiles(TenantObjects(MemoryTable(ManualClock()), 60))
    large, small = await files.put_all("", [b"x" * (OBJECT_BYTES_MAX + 1), b"y"], "png")
    assert large is None
    assert small is not None


async def test_a_store_without_an_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets its images with the response."""
    monkeypatch.setattr(image_files, "STORE_S_MAX", 0.05)

    class StuckTable(MemoryTable):
        async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
            await asyncio.Event().wait()
            return 0

    files = ImageFiles(TenantObjects(StuckTable(ManualClock()), 60))
    assert await files.put_all("", [b"1", b"2"], "png") == [None, None]
