"""The `Blobs` contract: whole objects by name, verified on read, readable by the stock tools."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamBlobs
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import blob_stream
from headwater.events.jetstream.streams import ensure
from headwater.events.memory import MemoryBlobs
from headwater.events.ports import Blobs, LogRefused
from tests.support.ports.logs import connected
from tests.support.servers.nats import NatsServer

BIG = bytes(range(256)) * (5 * 4096)
"""5 MiB: 40 chunks."""


class BlobsCase(NamedTuple):
    """Blobs under test. `other` are the same ones seen by another process."""

    blobs: Blobs
    other: Blobs


@pytest.fixture
async def case(backend: NatsServer | None, unique: str) -> AsyncIterator[BlobsCase]:
    """An empty bucket."""
    if backend is None:
        blobs = MemoryBlobs()
        yield BlobsCase(blobs, blobs)
        return
    async with connected(backend) as client, connected(backend) as other:
        await ensure(client, blob_stream(unique, 1))
        yield BlobsCase(JetStreamBlobs(client, unique), JetStreamBlobs(other, unique))


@pytest.fixture
async def blobs(client: Client, unique: str) -> JetStreamBlobs:
    """An empty bucket on a server."""
    await ensure(client, blob_stream(unique, 1))
    return JetStreamBlobs(client, unique)


@pytest.mark.parametrize("data", [b"", b"x", BIG[: 128 * 1024], BIG], ids=["empty", "byte", "chunk", "5MiB"])
@pytest.mark.ack_formats
async def test_object_is_read_as_it_was_put(case: BlobsCase, data: bytes) -> None:
    """Every byte, whatever the size."""
    await case.blobs.put("a/b c/ü.bin", data)
    assert await case.other.get("a/b c/ü.bin") == data
    assert await case.other.has("a/b c/ü.bin")


async def test_absent_object_is_none(case: BlobsCase) -> None:
    """Absent is not an error, and removing it is fine."""
    assert await case.blobs.get("nobody") is None
    assert not await case.blobs.has("nobody")
    await case.blobs.delete("nobody")
    assert await case.blobs.names("") == []


async def test_replaced_object_has_its_new_bytes_only(case: BlobsCase) -> None:
    """Shorter, longer or empty: the last put counts."""
    for data in (BIG, b"short", b"", BIG[: 300 * 1024]):
        await case.blobs.put("k", data)
        assert await case.other.get("k") == data
    assert await case.other.names("") == ["k"]


async def test_deleted_object_is_gone_and_can_be_put_again(case: BlobsCase) -> None:
    """Deleting leaves nothing to read or list."""
    await case.blobs.put("k", b"1")
    await case.other.delete("k")
    await case.blobs.delete("k")
    assert await case.blobs.get("k") is None
    assert not await case.other.has("k")
    assert await case.blobs.names("") == []
    await case.blobs.put("k", b"2")
    assert await case.other.get("k") == b"2"


async def test_names_are_sorted_and_by_prefix(case: BlobsCase) -> None:
    """What a store of snapshots asks for."""
    numbers = range(700, 0, -7)
    for number in numbers:
        await case.blobs.put(f"snapshot/p/{number:020d}", b"x")
    await case.blobs.put("artifact/1", b"y")
    await case.blobs.delete(f"snapshot/p/{7:020d}")
    expected = [f"snapshot/p/{number:020d}" for number in sorted(numbers) if number != 7]
    assert await case.other.names("snapshot/p/") == expected
    assert await case.other.names("") == ["artifact/1", *expected]
    assert await case.other.names("none") == []


@pytest.mark.parametrize("data", [b"", b"x", BIG], ids=["empty", "byte", "5MiB"])
@pytest.mark.ack_formats
async def test_object_is_read_to_where_it_is_wanted(case: BlobsCase, data: bytes) -> None:
    """`put` says the digest that `read_into` asks for; nothing around the place is touched."""
    digest = await case.blobs.put("k", data)
    assert digest == hashlib.sha256(data).hexdigest()
    room = bytearray(b"<" + bytes(len(data)) + b">")
    assert await case.other.read_into("k", memoryview(room)[1:-1], digest)
    assert room == b"<" + data + b">"
    assert not await case.other.read_into("nobody", memoryview(room)[1:-1], digest)


@pytest.mark.parametrize("change", [b"", b"w" * 99_999, b"w" * 100_001, b"w" * 99_999 + b"x", BIG])
async def test_object_of_another_size_or_digest_is_refused(case: BlobsCase, change: bytes) -> None:
    """Shorter, longer, or one byte different."""
    digest = await case.blobs.put("k", b"w" * 100_000)
    await case.blobs.put("k", change)
    with pytest.raises(LogRefused, match=r"k.*digest.*delete it"):
        await case.other.read_into("k", memoryview(bytearray(100_000)), digest)


async def test_objects_put_at_once_do_not_mix(case: BlobsCase) -> None:
    """Several writers share a bucket."""
    objects = {f"o{n}": bytes([n]) * (n * 100_000) for n in range(6)}
    await asyncio.gather(*(case.blobs.put(name, data) for name, data in objects.items()))
    assert dict(zip(objects, await asyncio.gather(*map(case.other.get, objects)))) == objects


async def test_space_of_replaced_and_deleted_objects_is_given_back(
    blobs: JetStreamBlobs, client: Client, unique: str
) -> None:
    """A store that is written every minute does not grow."""
    for _ in range(3):
        await blobs.put("k", BIG)
    await blobs.put("gone", BIG)
    await blobs.delete("gone")
    state = (await api(client, f"STREAM.INFO.OBJ_{unique}"))["state"]
    assert len(BIG) <= state["bytes"] < 1.2 * len(BIG)


async def test_deleted_objects_leave_nothing_at_all(
    blobs: JetStreamBlobs, client: Client, unique: str
) -> None:
    """Names that are never used again would else fill the server's subject index."""
    for number in range(5):
        await blobs.put(f"k{number}", b"x")
        await blobs.delete(f"k{number}")
    assert (await api(client, f"STREAM.INFO.OBJ_{unique}"))["state"]["messages"] == 0


async def _chunk_messages(client: Client, bucket: str) -> tuple[str, int]:
    """Subject of the only object's chunks, and the position of the first."""
    body = {"subjects_filter": f"$O.{bucket}.C.>"}
    ((subject, _),) = (await api(client, f"STREAM.INFO.OBJ_{bucket}", body))["state"]["subjects"].items()
    answer = await api(client, f"STREAM.MSG.GET.OBJ_{bucket}", {"seq": 1, "next_by_subj": subject})
    return subject, int(answer["message"]["seq"])


async def test_corrupted_object_is_refused(blobs: JetStreamBlobs, client: Client, unique: str) -> None:
    """Other bytes of the same length under the same entry do not pass."""
    await blobs.put("k", BIG[: 128 * 1024])
    subject, seq = await _chunk_messages(client, unique)
    await api(client, f"STREAM.MSG.DELETE.OBJ_{unique}", {"seq": seq, "no_erase": True})
    await client.request(subject, BIG[1 : 128 * 1024] + b"!", timeout=30)
    with pytest.raises(LogRefused, match="digest"):
        await blobs.get("k")


@pytest.mark.parametrize("all_of_them", [False, True], ids=["one", "all"])
async def test_object_without_its_chunks_is_refused(
    blobs: JetStreamBlobs, client: Client, unique: str, all_of_them: bool
) -> None:
    """A reader is told, and does not wait for what will never come."""
    await blobs.put("k", BIG)
    subject, seq = await _chunk_messages(client, unique)
    if all_of_them:
        await api(client, f"STREAM.PURGE.OBJ_{unique}", {"filter": subject})
    else:
        await api(client, f"STREAM.MSG.DELETE.OBJ_{unique}", {"seq": seq, "no_erase": True})
    async with asyncio.timeout(30):
        with pytest.raises(LogRefused):
            await blobs.get("k")


@pytest.mark.ack_formats
async def test_object_replaced_while_it_is_read_is_old_or_new_or_refused(case: BlobsCase) -> None:
    """Never a mixture, and never a wait without end."""
    contents = [bytes([n]) * len(BIG) for n in range(6)]
    await case.blobs.put("k", contents[0])

    async def replace() -> None:
        for data in contents[1:]:
            await case.blobs.put("k", data)

    async def read(task: "asyncio.Task[None]") -> None:
        while not task.done():
            await asyncio.sleep(0)
            try:
                assert await case.other.get("k") in contents
            except LogRefused:
                continue

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        await read(tasks.create_task(replace()))
    assert await case.other.get("k") == contents[-1]


@pytest.fixture
def old_ack_client(client: Client) -> Any:
    """JetStream as nats-py offers it; its object store cannot read under ack format 2."""
    return client.jetstream()


@pytest.mark.parametrize("data", [b"", b"small", BIG], ids=["empty", "small", "5MiB"])
async def test_stock_client_reads_and_lists_our_objects(
    blobs: JetStreamBlobs, old_ack_client: Any, unique: str, data: bytes
) -> None:
    """The bucket is laid out as ADR-20 says."""
    await blobs.put("artifact/abc", data)
    store = await old_ack_client.object_store(unique)
    found = await store.get("artifact/abc")
    assert (found.data or b"") == data
    info = await store.get_info("artifact/abc")
    assert (info.name, info.size, info.bucket, info.deleted) == ("artifact/abc", len(data), unique, False)
    assert [entry.name for entry in await store.list()] == ["artifact/abc"]


async def test_we_read_objects_of_the_stock_client(
    blobs: JetStreamBlobs, old_ack_client: Any, unique: str
) -> None:
    """And replace and delete them."""
    store = await old_ack_client.object_store(unique)
    await store.put("theirs", BIG)
    assert await blobs.get("theirs") == BIG
    assert await blobs.names("") == ["theirs"]
    await blobs.put("theirs", b"ours")
    assert (await store.get("theirs")).data == b"ours"
    await store.delete("theirs")
    assert await blobs.get("theirs") is None


async def test_names_are_listed_while_objects_are_deleted(blobs: JetStreamBlobs) -> None:
    """The server counts entries as pending that are deleted before it sends them: a listing does not wait for those."""
    stays = [f"stays/{number}" for number in range(5)]
    goes = [f"goes/{number}" for number in range(150)]
    for name in [*goes, *stays]:
        await blobs.put(name, b"x")

    async def delete(names: list[str]) -> None:
        for name in names:
            await blobs.delete(name)

    async def list_names() -> None:
        while not deleting.done():
            assert await blobs.names("stays/") == stays

    deleting = asyncio.gather(*(delete(goes[first::6]) for first in range(6)))
    async with asyncio.timeout(100):
        await asyncio.gather(deleting, *(list_names() for _ in range(8)))
    assert await blobs.names("") == stays
