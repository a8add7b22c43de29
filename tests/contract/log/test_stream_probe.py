"""Asking a stream whether it takes appends: it is asked by appending, and what is appended says nothing."""

from nats.aio.client import Client

from headwater.events.chain import Chains
from headwater.events.jetstream import JetStreamBlobs, JetStreamLog, JetStreamTable
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import StreamSpec
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool, probe, wanted_streams
from headwater.events.ports import Record
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from headwater.schemas.names import PROBE
from tests.support.ports.guarded import NS, Guarded
from tests.support.ports.logs import batch, records_of, stored

POOL = "p"
STREAMS = 9
"""Of a namespace with one pool."""


async def specs(client: Client, ns: str) -> dict[str, StreamSpec]:
    """The streams of a namespace with one pool, by what they are for."""
    await ensure_namespace(client, ns)
    await ensure_pool(client, ns, POOL)
    return {spec.what: spec for spec in await wanted_streams(client, ns, 1)}


async def records(client: Client, spec: StreamSpec) -> list[Record]:
    """Everything in a log."""
    return await records_of(JetStreamLog(client, spec.name))


async def test_every_stream_that_is_well_takes_a_probe(client: Client, unique: str) -> None:
    """Logs, tables and the object store, as often as they are asked."""
    wanted = await specs(client, unique)
    assert len(wanted) == STREAMS
    for _ in range(3):
        assert [await probe(client, unique, spec, SystemClock()) for spec in wanted.values()] == [
            ""
        ] * STREAMS


async def test_a_probe_of_a_log_is_an_empty_message_of_a_writer_of_its_own(
    client: Client, unique: str
) -> None:
    """In an unbroken chain beside those of the actors; a router's state is the same but for the position."""
    wanted = await specs(client, unique)
    spec = wanted["pool log"]
    log = JetStreamLog(client, spec.name)
    subject = subjects.pool_subject(unique, POOL, "load", "w1")
    before = RouterState()
    await stored(log, subject, batch(1, writer="w1"))
    for record in await records(client, spec):
        before.apply(record)
    for _ in range(3):
        assert await probe(client, unique, spec, SystemClock()) == ""
    await stored(log, subject, batch(2, writer="w1"))
    found = await records(client, spec)
    probes = [record for record in found if record.batch.writer == PROBE]
    assert [record.batch.events for record in probes] == [()] * 3
    assert {record.subject for record in probes} == {subjects.pool_subject(unique, POOL, "load", PROBE)}
    chains = Chains()
    assert [chains.follow(record) for record in probes] == [(True, None)] * 3
    state = RouterState()
    for record in found[:-1]:
        state.apply(record)
    assert (state.position, before.position) == (4, 1)
    state.position = before.position
    assert state.digest() == before.digest()


async def test_a_probe_of_a_table_or_a_store_leaves_nothing(client: Client, unique: str) -> None:
    """No key, no object, and what is there stays."""
    wanted = await specs(client, unique)
    cards = JetStreamTable(client, subjects.card_bucket(unique))
    blobs = JetStreamBlobs(client, subjects.blob_bucket(unique))
    revision = await cards.put("p", b"card")
    await blobs.put("artifact", b"bytes")
    for spec in wanted.values():
        assert await probe(client, unique, spec, SystemClock()) == ""
    assert await cards.get(PROBE) is None
    entry = await cards.get("p")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"card", revision)
    assert await blobs.names("") == ["artifact"]
    assert await blobs.get("artifact") == b"bytes"


async def test_a_stream_that_takes_nothing_is_told(client: Client, unique: str) -> None:
    """With the server's words, where it has any."""
    wanted = await specs(client, unique)
    for what in ("pool log", "request log"):
        spec = wanted[what]
        config = (await api(client, f"STREAM.INFO.{spec.name}"))["config"]
        await api(client, f"STREAM.UPDATE.{spec.name}", config | {"max_bytes": 1, "discard": "new"})
        told = await probe(client, unique, spec, SystemClock())
        assert told.startswith("not persisting: ")
        assert "maximum bytes exceeded" in told
    missing = wanted["pool log"]
    await api(client, f"STREAM.DELETE.{missing.name}")
    assert (await probe(client, unique, missing, SystemClock())).startswith("not persisting: ")


async def test_an_operator_with_least_rights_may_probe(guarded: Guarded) -> None:
    """Every stream, and nothing is denied: a denial would pass for a stream that is well."""
    async with guarded.as_("operator") as operator:
        wanted = await wanted_streams(operator, NS, 1)
        assert len(wanted) == STREAMS
        for spec in wanted:
            before = (await api(operator, f"STREAM.INFO.{spec.name}"))["state"]["last_seq"]
            assert await probe(operator, NS, spec, SystemClock()) == ""
            assert (await api(operator, f"STREAM.INFO.{spec.name}"))["state"]["last_seq"] == before + 1, (
                spec.name
            )
    assert guarded.server.violations() == []
