"""Streams on a real server: made, changed behind our back, repaired, and nothing lost on the way."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import connect
from headwater.events.jetstream.api import SECOND_NS, api, publish
from headwater.events.jetstream.stream_spec import (
    StreamSpec,
    blob_stream,
    compare,
    namespace_streams,
    pool_log_stream,
    table_stream,
)
from headwater.events.jetstream.streams import RepairResult, ensure, repair
from headwater.events.ports import LogRefused
from tests.support.ports.available import when_available
from tests.support.servers.nats_cluster import NatsCluster

MESSAGES = 20


def small_log(ns: str, replicas: int = 1) -> StreamSpec:
    """A pool log that reserves little disk, so that many fit on a test's server."""
    return msgspec.structs.replace(pool_log_stream(ns, "p", replicas), max_bytes=1 << 20)


async def info(client: Client, spec: StreamSpec) -> dict[str, Any]:
    """What the server says of the stream."""
    return await api(client, f"STREAM.INFO.{spec.name}")


async def drift(client: Client, spec: StreamSpec, **change: Any) -> None:
    """Change the stream as an operator with a stock tool would."""
    config = (await info(client, spec))["config"] | change
    await api(client, f"STREAM.UPDATE.{spec.name}", config)


async def fill(client: Client, spec: StreamSpec) -> None:
    """Some messages on as many subjects."""
    prefix = spec.subjects[-1].removesuffix(">")
    for number in range(MESSAGES):
        subject = f"{prefix}k{number}"
        await when_available(partial(publish, client, subject, b"x" * 100, {}, 5.0))


async def remove(client: Client, *specs: StreamSpec) -> None:
    """Give the disk back that streams reserve."""
    for spec in specs:
        await api(client, f"STREAM.DELETE.{spec.name}")


async def test_made_streams_are_as_wanted(client: Client, unique: str) -> None:
    """Every stream of a namespace is taken by the server field by field; a second time does nothing."""
    specs = [*namespace_streams(unique, 1), pool_log_stream(unique, "p", 1)]
    for spec in specs:
        assert await repair(client, spec) == RepairResult(spec.name, created=True)
        assert compare(spec, await info(client, spec)) == []
        assert await repair(client, spec) == RepairResult(spec.name)
    await remove(client, *specs)


DRIFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "before batches": ("log", {"allow_atomic": False, "allow_batched": False}),
    "limits": (
        "log",
        {
            "max_age": 60 * SECOND_NS,
            "duplicate_window": SECOND_NS,
            "max_bytes": 100_000,
            "max_msgs": 1000,
            "max_msg_size": 1000,
            "max_consumers": 3,
            "max_msgs_per_subject": 9,
            "discard": "new",
        },
    ),
    "everything a log can": (
        "log",
        {
            "retention": "limits",
            "discard": "new",
            "discard_new_per_subject": True,
            "max_msgs_per_subject": 2,
            "allow_direct": False,
            "allow_atomic": False,
            "no_ack": True,
        },
    ),
    "subjects": ("log", {"subjects": ["other.{}.x"]}),
    "a table without markers": (
        "table",
        {"subject_delete_marker_ttl": 0, "discard": "old", "allow_rollup_hdrs": False},
    ),
    "a table's limits": ("table", {"max_msgs_per_subject": 5, "max_age": 3600 * SECOND_NS, "max_msgs": 50}),
    "objects": ("blobs", {"allow_rollup_hdrs": False, "allow_direct": False, "max_bytes": 100_000}),
    "half of the subjects": ("blobs", {"subjects": ["$O.{}.M.>"]}),
}


@pytest.mark.parametrize("case", DRIFTS)
async def test_drift_is_repaired_and_no_message_lost(client: Client, unique: str, case: str) -> None:
    """After it nothing differs, every message is there, and operators' own fields are untouched."""
    kind, change = DRIFTS[case]
    spec = {"log": small_log(unique), "table": table_stream(unique, 1), "blobs": blob_stream(unique, 1)}[kind]
    await repair(client, spec)
    await fill(client, spec)
    if "subjects" in change:
        change = {**change, "subjects": [subject.format(unique) for subject in change["subjects"]]}
    await drift(client, spec, **change, metadata={"owner": "me"}, description="mine", compression="s2")
    before = (await info(client, spec))["state"]
    assert before["messages"] == MESSAGES
    done = await repair(client, spec)
    assert done.whole, done
    assert done.altered
    after = await info(client, spec)
    assert (after["state"]["messages"], after["state"]["last_seq"]) == (MESSAGES, before["last_seq"])
    assert [one for one in compare(spec, after) if not one.operators] == []
    assert after["config"]["metadata"]["owner"] == "me"
    assert (after["config"]["description"], after["config"]["compression"]) == ("mine", "s2")
    assert await repair(client, spec) == RepairResult(spec.name)
    await remove(client, spec)


async def test_a_log_whose_readers_consume_it_goes_back_to_limits(client: Client, unique: str) -> None:
    """The server takes interest to limits, and keeps what is stored; the other way it deletes everything."""
    spec = small_log(unique)
    await api(client, f"STREAM.CREATE.{spec.name}", spec.config() | {"retention": "interest"})
    consumer = {"name": "c", "durable_name": "c", "ack_policy": "explicit"}
    body = {"stream_name": spec.name, "config": consumer, "action": ""}
    await api(client, f"CONSUMER.CREATE.{spec.name}.c", body)
    await fill(client, spec)
    assert [one.field for one in (await repair(client, spec)).altered] == ["retention"]
    assert (await info(client, spec))["state"]["messages"] == MESSAGES
    await remove(client, spec)


async def test_start_up_adds_capabilities_and_leaves_limits(client: Client, unique: str) -> None:
    """What an operator set to more or less stays over every start; streams of older releases get the flags."""
    spec = small_log(unique)
    await ensure(client, spec)
    await fill(client, spec)
    limits = {
        "max_age": 3600 * SECOND_NS,
        "max_bytes": 1 << 21,
        "discard": "new",
        "duplicate_window": SECOND_NS,
    }
    await drift(client, spec, **limits, allow_atomic=False, allow_batched=False)
    await ensure(client, spec)
    after = await info(client, spec)
    assert after["config"]["allow_atomic"]
    assert after["config"]["allow_batched"]
    assert {field: after["config"][field] for field in limits} == limits
    assert after["state"]["messages"] == MESSAGES
    await repair(client, spec)
    config = (await info(client, spec))["config"]
    assert config["max_age"] == spec.max_age
    assert config["max_bytes"] == 1 << 21
    await remove(client, spec)


async def test_what_would_lose_messages_is_refused(client: Client, unique: str) -> None:
    """A table with a history: shortening it deletes old values, so it is left and told; without any it is done."""
    spec = table_stream(unique, 1)
    await repair(client, spec)
    await drift(client, spec, max_msgs_per_subject=5, allow_direct=False)
    for _ in range(2):
        await fill(client, spec)
    done = await repair(client, spec)
    assert [one.field for one in done.altered] == ["allow_direct"]
    assert [(one.field, one.cost) for one in done.left] == [("max_msgs_per_subject", "would lose")]
    assert f"nats stream edit {spec.name}" in done.refusal
    assert (await info(client, spec))["state"]["messages"] == 2 * MESSAGES
    await api(client, f"STREAM.PURGE.{spec.name}", {})
    assert (await repair(client, spec)).whole


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"storage": "memory"}, {"storage"}),
        ({"retention": "workqueue"}, {"retention"}),
        ({"persist_mode": "async", "allow_atomic": False}, {"persist_mode", "allow_atomic"}),
    ],
)
async def test_what_can_not_be_altered_is_refused_with_the_way_out(
    client: Client, unique: str, change: dict[str, Any], fields: set[str]
) -> None:
    """The server really refuses it, the message says what to do, what can be done is, and nothing is deleted."""
    spec = small_log(unique)
    body = {**spec.config(), "allow_batched": False, **change}
    body = {key: value for key, value in body.items() if value is not False}
    await api(client, f"STREAM.CREATE.{spec.name}", body)
    await fill(client, spec)
    with pytest.raises(LogRefused):
        await drift(client, spec, **{one: "limits" if one == "retention" else "file" for one in change})
    done = await repair(client, spec)
    assert {one.field for one in done.left} == fields
    assert all(one.cost == "cannot" for one in done.left)
    assert f"nats stream backup {spec.name}" in done.refusal
    assert [one.field for one in done.altered] == ["allow_batched"]
    assert (await info(client, spec))["state"]["messages"] == MESSAGES
    # A process starts nevertheless.
    await ensure(client, spec)
    await remove(client, spec)


async def test_purges_denied_on_objects_can_not_be_allowed_again(client: Client, unique: str) -> None:
    """Told with the way out; on a log it is an operator's protection and fine."""
    blobs, log = blob_stream(unique, 1), small_log(unique)
    for spec in (blobs, log):
        await repair(client, spec)
        await drift(client, spec, deny_purge=True, deny_delete=True, allow_rollup_hdrs=False)
        with pytest.raises(LogRefused):
            await drift(client, spec, deny_purge=False)
    assert {one.field for one in (await repair(client, blobs)).left} == {"deny_purge", "allow_rollup_hdrs"}
    assert (await repair(client, log)).whole
    await remove(client, blobs, log)


async def test_a_refusal_of_one_kind_does_not_hinder_the_others(client: Client, unique: str) -> None:
    """Three replicas on a single server: refused and told; the capabilities are there nevertheless."""
    spec = small_log(unique)
    await repair(client, spec)
    await drift(client, spec, allow_atomic=False, max_msgs=100)
    done = await repair(client, msgspec.structs.replace(spec, num_replicas=3))
    assert {one.field for one in done.altered} == {"allow_atomic", "max_msgs"}
    assert [one.field for one in done.left] == ["num_replicas"]
    assert "non-clustered" in done.refusal
    await remove(client, spec)


async def test_several_processes_that_start_at_once(client: Client, unique: str) -> None:
    """All find a whole stream, whoever made it; one that wants another number of replicas too."""
    spec = small_log(unique)
    await asyncio.gather(*(ensure(client, spec) for _ in range(8)))
    other = msgspec.structs.replace(spec, max_bytes=1 << 19)
    await remove(client, spec)
    await asyncio.gather(*(ensure(client, one) for one in (spec, other, spec, other)))
    assert (await info(client, spec))["config"]["allow_batched"]
    await remove(client, spec)


async def test_one_replica_becomes_three(tmp_path: Path) -> None:
    """On a cluster of three: R1 is raised to R3 with every message; R1 asked for later leaves R3."""
    async with NatsCluster(tmp_path) as cluster, asyncio.timeout(60):
        client = await connect(cluster.url, "test")
        try:
            one, three = small_log("c"), small_log("c", 3)
            while True:
                try:
                    await when_available(partial(repair, client, one))
                    break
                except LogRefused:
                    await asyncio.sleep(0.1)
            await fill(client, one)
            done = await when_available(partial(repair, client, three))
            assert [(d.field, d.has, d.wanted) for d in done.altered] == [("num_replicas", 1, 3)]
            while not _current((await info(client, three))["cluster"], 2):
                await asyncio.sleep(0.05)
            assert (await info(client, three))["state"]["messages"] == MESSAGES
            assert compare(three, await info(client, three)) == []
            assert (await repair(client, one)).whole
            assert (await info(client, one))["config"]["num_replicas"] == 3
            for spec in namespace_streams("c", 3):
                await when_available(partial(ensure, client, spec))
                assert (await info(client, spec))["config"]["num_replicas"] == 3
        finally:
            await client.close()


def _current(state: dict[str, Any], followers: int) -> bool:
    replicas = state.get("replicas") or []
    return len(replicas) == followers and all(replica.get("current") for replica in replicas)
