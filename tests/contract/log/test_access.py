"""Connections to a real server with users and least permissions: what each kind may do, and what not."""

import asyncio

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from headwater.actors.runtime.core_nats import NatsBus
from headwater.actors.runtime.ports import Message
from headwater.events.jetstream import JetStreamTable
from headwater.events.jetstream.api import api, publish
from headwater.events.jetstream.cursor import Cursor
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool
from headwater.events.ports import AccessDenied, StreamMissing
from headwater.schemas import subjects
from headwater.schemas.permissions import KINDS, Kind
from tests.support.ports.buses import keep
from tests.support.ports.guarded import NS, POOL, Guarded
from tests.support.ports.waiting import eventually
from tests.support.worlds.clock import running


def event(kind: subjects.PoolKind) -> str:
    """Where events of a kind go."""
    return subjects.pool_subject(NS, POOL, kind, "me")


FORBIDDEN: list[tuple[Kind, str]] = [
    ("worker", event("route")),
    ("worker", subjects.request_subject(NS, "me")),
    ("worker", f"$KV.{subjects.lease_bucket(NS)}.router.me"),
    ("worker", f"$JS.API.STREAM.MSG.GET.{subjects.request_stream(NS)}"),
    ("worker", f"$JS.API.CONSUMER.CREATE.{subjects.pool_stream(NS, POOL)}.c"),
    ("worker", "$JS.API.STREAM.CREATE.mine"),
    ("edge", event("kv")),
    ("edge", event("fleet")),
    ("edge", f"$KV.{subjects.card_bucket(NS)}.{POOL}"),
    ("edge", f"$JS.API.CONSUMER.CREATE.{subjects.pool_stream(NS, POOL)}.c"),
    ("router", subjects.request_subject(NS, "me")),
    ("router", event("kv")),
    ("router", subjects.engine(NS, "w", 1, "generate")),
    ("router", f"$JS.API.CONSUMER.CREATE.{subjects.request_stream(NS)}.c"),
    ("router", f"$JS.API.STREAM.DELETE.{subjects.pool_stream(NS, POOL)}"),
    ("operator", event("route")),
    ("admin", event("fleet")),
    ("admin", subjects.resync(NS, "w")),
    ("admin", subjects.engine(NS, "w", 1, "generate")),
    ("admin", f"$KV.{subjects.lease_bucket(NS)}.worker.w"),
    ("admin", f"$JS.API.STREAM.DELETE.KV_{subjects.lease_bucket(NS)}"),
    ("admin", f"$JS.API.CONSUMER.CREATE.{subjects.pool_stream(NS, POOL)}.c"),
    ("edge", subjects.control(NS, "w")),
    ("router", subjects.control(NS, "w")),
    ("worker", subjects.control(NS, "w")),
    ("observer", subjects.control(NS, "w")),
    ("operator", subjects.engine(NS, "w", 1, "generate")),
    *(("observer", event(kind)) for kind in subjects.POOL_KINDS),
    ("observer", subjects.request_subject(NS, "me")),
    ("observer", f"$KV.{subjects.card_bucket(NS)}.{POOL}"),
    ("observer", subjects.engine(NS, "w", 1, "drain")),
    ("observer", "anything"),
]

LONG_S = 60.0
"""A deadline that is never waited for, on the busiest machine."""


async def test_what_a_kind_must_not_publish_is_refused_at_once_and_by_name(guarded: Guarded) -> None:
    """Nothing is stored, nobody waits for a deadline, and the log says it once for each subject."""
    for kind in KINDS:
        refused = [subject for who, subject in FORBIDDEN if who == kind]
        async with guarded.as_(kind) as client:
            with capture_logs() as logs:
                # Waiting for a single deadline takes as long.
                async with asyncio.timeout(LONG_S):
                    for subject in refused * 2:
                        with pytest.raises(AccessDenied, match="nats-config") as caught:
                            await publish(client, subject, b"{}", {}, LONG_S)
                        assert subject in str(caught.value)
            told = [entry for entry in logs if entry["event"] == "nats_permission_denied"]
            assert sorted(entry["subject"] for entry in told) == sorted(s.lower() for s in refused), kind
            assert all(entry["log_level"] == "error" for entry in told)
    async with guarded.as_("observer") as client:
        for stream in (subjects.pool_stream(NS, POOL), subjects.request_stream(NS)):
            assert (await api(client, f"STREAM.INFO.{stream}"))["state"]["last_seq"] == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_reads_the_inbox_of_another_kind(guarded: Guarded, kind: Kind) -> None:
    """Not by name, not by wildcard; neither prompts nor tokens of others."""
    others = [f"{subjects.inbox_root(NS, other)}.>" for other in KINDS if other != kind]
    prompts = f"hw.{NS}.engine.*.*.generate"
    asked = [*others, "_INBOX.>", ">", f"hw.{NS}.>", *([prompts] if kind != "worker" else [])]
    async with guarded.as_(kind) as spy:
        with capture_logs() as logs:
            for subject in asked:
                await spy.subscribe(subject)
            await eventually(lambda: len(logs) >= len(asked))
    assert {entry["event"] for entry in logs} == {"nats_permission_denied"}
    assert {entry["subject"] for entry in logs} == {subject.lower() for subject in asked}


async def test_answers_reach_the_one_who_asked(guarded: Guarded) -> None:
    """Requests with replies between the kinds, as actors make them: nothing is denied."""
    route, resync = subjects.route_query(NS, POOL), subjects.resync(NS, "w")
    control = subjects.control(NS, "w")
    generate, drain = (subjects.engine(NS, "w", 1, verb) for verb in ("generate", "drain"))

    async with (
        guarded.as_("edge") as edge,
        guarded.as_("router") as router,
        guarded.as_("worker") as worker,
        guarded.as_("operator") as operator,
        guarded.as_("observer") as observer,
        guarded.as_("admin") as admin,
    ):

        async def answer(message: Msg) -> None:
            await message.respond(b"yes")

        await router.subscribe(route, queue="router", cb=answer)
        for subject in (generate, drain, resync, control):
            await worker.subscribe(subject, cb=answer)
        for actor, kind in ((edge, "edge"), (router, "router"), (worker, "worker")):
            await actor.subscribe(f"$SRV.STATS.headwater-{kind}", cb=answer)
            await actor.flush()
        asked = [(edge, route), (edge, generate), (router, resync), (operator, drain), (operator, resync)]
        asked += [(operator, control), (admin, control)]
        asked += [
            (who, f"$SRV.STATS.headwater-{kind}")
            for who in (operator, observer)
            for kind in ("edge", "router", "worker")
        ]
        for client, subject in asked:
            assert (await client.request(subject, b"", timeout=20)).data == b"yes", subject
    assert guarded.server.violations() == []


async def test_a_worker_answers_only_who_asked_it(guarded: Guarded) -> None:
    """An answer that nobody asked it for would be a forged one."""
    async with guarded.as_("worker") as worker:
        with capture_logs() as logs:
            await worker.publish(subjects.inbox(NS, "edge", "e", "bus") + ".id.token", b"forged")
            await eventually(lambda: bool(logs))
    assert [entry["event"] for entry in logs] == ["nats_permission_denied"]


async def test_a_consumer_is_no_way_round_what_one_may_not_publish(guarded: Guarded) -> None:
    """The server delivers a stream's messages wherever a consumer's maker wants; actors do not take them."""
    drain = subjects.engine(NS, "w", 1, "drain")
    stream = f"KV_{subjects.lease_bucket(NS)}"
    got: list[Message] = []
    async with guarded.as_("worker") as worker, guarded.as_("observer") as observer:
        await NatsBus(worker).subscribe(drain, keep(got))
        async with guarded.as_("operator") as operator:
            await publish(operator, f"$KV.{subjects.lease_bucket(NS)}.edge.x", b"", {}, 2.0)
            config = {"name": "c", "deliver_subject": drain, "ack_policy": "none", "deliver_policy": "all"}
            with capture_logs() as logs:
                await api(observer, f"CONSUMER.CREATE.{stream}.c", {"stream_name": stream, "config": config})
                await eventually(lambda: bool(logs))
            assert logs[0]["event"] == "subject_mismatch_dropped"
            await NatsBus(operator).publish(drain, b"real")
            await eventually(lambda: bool(got))
    assert [message.data for message in got] == [b"real"]


async def test_every_reply_subject_of_ours_is_in_the_private_inbox(guarded: Guarded) -> None:
    """Requests, the cursor's pulls and tables' watches all work where only that inbox may be read."""
    async with guarded.as_("router") as client:
        table = JetStreamTable(client, subjects.lease_bucket(NS))
        assert await table.create("router.me", b"1") is not None
        async for entries in table.watch():
            assert [entry.key for entry in entries] == ["router.me"]
            break
        cursor = Cursor(client, subjects.pool_stream(NS, POOL))
        assert await anext(cursor.messages(0)) == []
        await cursor.aclose()
        assert client.new_inbox().startswith(subjects.inbox(NS, "router", "me", "bus") + ".")
    assert guarded.server.violations() == []


async def test_a_missing_stream_is_the_operators_to_make(guarded: Guarded) -> None:
    """An actor finds what exists, and names the command where it does not."""
    async with guarded.as_("worker") as client:
        await ensure_namespace(client, NS)
        await ensure_pool(client, NS, POOL)
        with pytest.raises(StreamMissing, match="headwater pools"):
            await ensure_pool(client, NS, "other")


async def test_a_worker_follows_the_cards_and_writes_those_of_adapters(guarded: Guarded) -> None:
    """So it learns what may be loaded and what was forgotten; API keys it may not follow."""
    async with guarded.as_("worker") as client, guarded.as_("edge") as other:
        cards = JetStreamTable(client, subjects.card_bucket(NS))
        key = subjects.lora_key(POOL, "some/adapter")
        seen: dict[str, bytes | None] = {}

        async def follow(table: JetStreamTable) -> None:
            async for entries in table.watch():
                seen.update((entry.key, entry.value) for entry in entries)

        async with running(follow(cards)):
            assert await cards.create(key, b"card") is not None
            await eventually(lambda: seen.get(key) == b"card")
            read = await JetStreamTable(other, subjects.card_bucket(NS)).get(key)
            assert read is not None
            assert read.value == b"card"
            await cards.delete(key)
            await eventually(lambda: key in seen and seen[key] is None)
        with pytest.raises(AccessDenied):
            async with asyncio.timeout(30):
                await follow(JetStreamTable(client, subjects.api_key_bucket(NS)))
