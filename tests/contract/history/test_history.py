"""Stored responses and conversations over both tables: chains, tenants, large objects, concurrent changes."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, NamedTuple

import pytest

from headwater.actors.edge.history import (
    CHUNK_BYTES,
    OBJECT_BYTES_MAX,
    ConversationHead,
    ConversationStore,
    ResponseStore,
    StoredResponse,
    TenantObjects,
    tenant_token,
)
from headwater.actors.http.errors import ApiError
from headwater.events.jetstream import JetStreamTable
from headwater.events.jetstream.stream_spec import stored_stream
from headwater.events.jetstream.streams import ensure
from headwater.events.memory import MemoryTable
from headwater.events.table import KEY_BYTES, STORED_BYTES_MAX, Table
from headwater.schemas.clock import SystemClock
from tests.support.ports.logs import connected
from tests.support.servers.nats import NatsServer

TTL_S = 3600


class Stores(NamedTuple):
    """The stores of one edge."""

    table: Table
    objects: TenantObjects
    responses: ResponseStore
    conversations: ConversationStore


@pytest.fixture
async def stores(backend: NatsServer | None, unique: str) -> AsyncIterator[Stores]:
    """Empty stores."""
    if backend is None:
        yield _stores(MemoryTable(SystemClock()))
        return
    async with connected(backend) as client:
        await ensure(client, stored_stream(unique, 1, STORED_BYTES_MAX))
        yield _stores(JetStreamTable(client, unique))


def _stores(table: Table) -> Stores:
    numbers = count()
    objects = TenantObjects(table, TTL_S)
    return Stores(
        table, objects, ResponseStore(objects), ConversationStore(objects, lambda: f"seg{next(numbers)}")
    )


def _message(id_: str, text: str = "hello") -> dict[str, Any]:
    return {"id": id_, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _response(number: int, earlier: tuple[str, ...] = ()) -> StoredResponse:
    return StoredResponse(
        id=f"resp_{number}",
        earlier=earlier,
        input=(_message(f"msg_{number}_i0"),),
        resource={"id": f"resp_{number}", "output": [_message(f"msg_{number}_0", "answer")]},
    )


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 20 * CHUNK_BYTES + 7])
async def test_objects_of_any_size_return_as_stored(stores: Stores, size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    await stores.objects.put("t", "response", "a", data)
    found = await stores.objects.get("t", "response", "a")
    assert found is not None
    assert found.data == data
    assert await stores.objects.delete("t", "response", "a")
    assert await stores.objects.get("t", "response", "a") is None
    assert not await stores.objects.delete("t", "response", "a")


async def test_a_replaced_large_object_is_the_new_one(stores: Stores) -> None:
    await stores.objects.put("t", "response", "a", b"a" * (3 * CHUNK_BYTES))
    await stores.objects.put("t", "response", "a", b"b" * (2 * CHUNK_BYTES))
    found = await stores.objects.get("t", "response", "a")
    assert found is not None
    assert found.data == b"b" * (2 * CHUNK_BYTES)


async def test_every_message_expires(stores: Stores) -> None:
    given: list[int] = []
    put = stores.table.put

    async def noted(key: str, value: bytes, *, ttl_s: int = 0) -> int:
        given.append(ttl_s)
        return await put(key, value, ttl_s=ttl_s)

    stores.table.put = noted  # type: ignore[method-assign]
    await stores.objects.put("t", "response", "a", b"a" * (3 * CHUNK_BYTES))
    assert given == [TTL_S] * 3


async def test_an_object_that_lost_a_chunk_is_absent(stores: Stores) -> None:
    """A store at its bound discards the oldest messages, which are chunks."""
    keys: list[str] = []
    put = stores.table.put

    async def noted(key: str, value: bytes, *, ttl_s: int = 0) -> int:
        keys.append(key)
        return await put(key, value, ttl_s=ttl_s)

    stores.table.put = noted  # type: ignore[method-assign]
    await stores.objects.put("t", "response", "a", b"a" * (3 * CHUNK_BYTES))
    assert len(keys) == 3
    await stores.table.delete(keys[1])
    assert await stores.objects.get("t", "response", "a") is None


async def test_too_large_an_object_is_refused(stores: Stores) -> None:
    with pytest.raises(ApiError, match="maximum"):
        await stores.objects.put("t", "response", "a", bytes(OBJECT_BYTES_MAX + 1))


async def test_a_tenant_beyond_its_share_loses_its_own_oldest_objects(stores: Stores) -> None:
    """Whatever another tenant stored before stays, and so does the newest of this one. Chunks go with their heads."""
    share = 8 * CHUNK_BYTES
    edges = [TenantObjects(stores.table, TTL_S, share) for _ in range(2)]
    await edges[0].put("quiet", "response", "first", b"q" * CHUNK_BYTES)
    await edges[0].put("", "response", "anybody", b"a")
    for number in range(24):
        await edges[number % 2].put("loud", "response", str(number), b"x" * (2 * CHUNK_BYTES - 10))
    kept = [number for number in range(24) if await edges[0].get("loud", "response", str(number)) is not None]
    assert kept == list(range(kept[0], 24))
    assert 2 <= len(kept) <= 6
    assert await edges[1].get("quiet", "response", "first") is not None
    assert await edges[1].get("", "response", "anybody") is not None
    sizes = await stores.table.sizes(tenant_token("loud"))
    assert len(sizes) == 2 * len(kept)
    assert sum(one.bytes for one in sizes) <= share + 4 * CHUNK_BYTES


async def test_without_a_share_nothing_is_discarded(stores: Stores) -> None:
    """Neither with the bound switched off nor without authentication, where all clients are one tenant."""
    for tenant, bytes_max in (("t", 0), ("", CHUNK_BYTES)):
        objects = TenantObjects(stores.table, TTL_S, bytes_max)
        for number in range(4):
            await objects.put(tenant, "response", str(number), b"x" * CHUNK_BYTES)
        assert [await objects.get(tenant, "response", str(number)) is not None for number in range(4)] == [
            True
        ] * 4


async def test_a_share_counts_what_keys_cost(stores: Stores) -> None:
    """A million empty responses would fill the server's memory, not its disk."""
    objects = TenantObjects(stores.table, TTL_S, 40 * KEY_BYTES)
    for number in range(60):
        await objects.put("t", "response", str(number), b"")
    assert len(await stores.table.sizes(tenant_token("t"))) <= 40 + 5


async def test_what_expired_is_gone_with_its_chunks(stores: Stores) -> None:
    """On the server too, by itself: nothing of it is counted, read or left."""
    objects = TenantObjects(stores.table, 1)
    await objects.put("t", "response", "a", b"a" * (2 * CHUNK_BYTES))
    await stores.objects.put("t", "response", "b", b"b")
    await stores.conversations.create("t", ConversationHead(id="conv_1", created_s=1))
    assert await objects.get("t", "response", "a") is not None
    async with asyncio.timeout(20):
        while len(await stores.table.sizes(tenant_token("t"))) > 2:
            await asyncio.sleep(0.05)
    assert await objects.get("t", "response", "a") is None
    assert not await objects.delete("t", "response", "a")
    assert await stores.objects.get("t", "response", "b") is not None
    assert (await stores.conversations.get("t", "conv_1")).id == "conv_1"


async def test_another_tenants_ids_name_nothing(stores: Stores) -> None:
    await stores.responses.put("one", _response(1))
    assert await stores.responses.get("two", "resp_1") is None
    assert not await stores.responses.delete("two", "resp_1")
    # Nor can a tenant's name and an id be cut in another place.
    await stores.objects.put("ab", "response", "c", b"x")
    assert await stores.objects.get("a", "response", "bc") is None
    assert await stores.responses.get("one", "resp_1") is not None


async def test_a_chain_is_read_in_order(stores: Stores) -> None:
    ids: tuple[str, ...] = ()
    for number in range(40):
        await stores.responses.put("t", _response(number, ids))
        ids = (*ids, f"resp_{number}")
    chain = await stores.responses.chain("t", "resp_39")
    assert [one.id for one in chain] == list(ids)


async def test_a_chain_with_a_hole_is_not_continued(stores: Stores) -> None:
    await stores.responses.put("t", _response(0))
    await stores.responses.put("t", _response(1, ("resp_0",)))
    await stores.responses.delete("t", "resp_0")
    with pytest.raises(ApiError, match="deleted or expired") as caught:
        await stores.responses.chain("t", "resp_1")
    assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")


async def test_concurrent_additions_to_a_conversation_all_succeed(stores: Stores) -> None:
    await stores.conversations.create("t", ConversationHead(id="conv_1", created_s=1))
    await asyncio.gather(
        *(
            stores.conversations.add("t", "conv_1", [_message(f"msg_{n}"), _message(f"msg_{n}b")])
            for n in range(6)
        )
    )
    head = await stores.conversations.get("t", "conv_1")
    items = await stores.conversations.items("t", head)
    assert head.count == 12
    assert {item["id"] for item in items} == {f"msg_{n}{b}" for n in range(6) for b in ("", "b")}


async def test_a_deleted_item_is_erased(stores: Stores) -> None:
    await stores.conversations.create("t", ConversationHead(id="conv_1", created_s=1))
    await stores.conversations.add("t", "conv_1", [_message("msg_a", "secret"), _message("msg_b")])
    head = await stores.conversations.delete_item("t", "conv_1", "msg_a")
    assert [item["id"] for item in await stores.conversations.items("t", head)] == ["msg_b"]
    segment = await stores.objects.get("t", "segment", head.segments[0].id)
    assert segment is not None
    assert b"secret" not in segment.data
    with pytest.raises(ApiError, match="not found"):
        await stores.conversations.delete_item("t", "conv_1", "msg_a")


async def test_a_deleted_conversation_leaves_no_items(stores: Stores) -> None:
    await stores.conversations.create("t", ConversationHead(id="conv_1", created_s=1))
    await stores.conversations.add("t", "conv_1", [_message("msg_a")])
    head = await stores.conversations.get("t", "conv_1")
    await stores.conversations.delete("t", "conv_1")
    assert await stores.objects.get("t", "segment", head.segments[0].id) is None
    with pytest.raises(ApiError) as caught:
        await stores.conversations.get("t", "conv_1")
    assert caught.value.status == 404
    with pytest.raises(ApiError):
        await stores.conversations.get("other", "conv_1")
