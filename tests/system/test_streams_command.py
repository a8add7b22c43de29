"""`headwater streams` as a user runs it: what it prints, what it changes, and its exit code."""

from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamBlobs, JetStreamTable
from headwater.events.jetstream.api import SECOND_NS, api, publish
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool, stream_names
from headwater.ops.operator.streams import duration, size, value
from headwater.schemas import subjects
from tests.support.processes.commands import ended
from tests.support.servers.nats import NatsServer

POOL = "p"
NAMESPACE = {
    "HW_ns_REQ",
    "KV_HW_ns_LEASE",
    "KV_HW_ns_CARD",
    "KV_HW_ns_APIKEY",
    "KV_HW_ns_SECRET",
    "KV_HW_ns_VIDEO",
    "KV_HW_ns_STORED",
    "OBJ_HW_ns_BLOB",
}
"""The streams that a namespace `ns` has without a pool."""


async def run(server: NatsServer, ns: str, *flags: str, command: str = "streams") -> tuple[int, str]:
    """Exit code and output of the command."""
    end = await ended(command, "--nats", server.url, "--namespace", ns, *flags, within_s=60)
    return end.code, end.output


def rows(output: str) -> dict[str, str]:
    """Lines of the table by stream, with single blanks."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return {line.split(" ")[0]: line for line in lines if line.startswith(("HW_", "KV_", "OBJ_"))}


async def update(client: Client, stream: str, **change: Any) -> None:
    """Change a stream behind Headwater's back."""
    config = (await api(client, f"STREAM.INFO.{stream}"))["config"]
    await api(client, f"STREAM.UPDATE.{stream}", config | change)


async def test_missing_streams_are_told_and_not_made(client: Client, server: NatsServer) -> None:
    """Looking changes nothing; a repair makes them, and says so once."""
    code, output = await run(server, "ns")
    assert code == 1
    assert {line.split(" ")[-1] for line in rows(output).values()} == {"missing"}
    assert rows(output).keys() == NAMESPACE
    assert "headwater streams --repair" in output
    assert await stream_names(client, "") == []
    code, output = await run(server, "ns", "--repair")
    assert code == 0
    assert output.startswith("created KV_HW_ns_LEASE\n")
    assert all(line.endswith("as wanted") for line in rows(output).values())
    code, output = await run(server, "ns", "--repair")
    assert code == 0
    assert output.startswith("nothing to repair")


async def test_what_differs_is_told_with_what_it_costs(client: Client, server: NatsServer) -> None:
    """Safe, would lose, cannot, an operator's choice: each in its line, and in JSON; a repair does the first."""
    await ensure_namespace(client, "ns")
    await ensure_pool(client, "ns", POOL)
    await publish(client, "hw.ns.pool.p.kv.w", b"x", {}, 5.0)
    await update(client, "HW_ns_POOL_p", allow_atomic=False, max_age=3600 * SECOND_NS)
    await update(client, "HW_ns_REQ", max_bytes=1 << 32)
    await update(client, "KV_HW_ns_CARD", max_msgs_per_subject=3)
    for _ in range(2):
        await publish(client, "$KV.HW_ns_CARD.p", b"{}", {}, 5.0)
    code, output = await run(server, "ns")
    table = rows(output)
    assert code == 1
    assert table["HW_ns_POOL_p"].startswith("HW_ns_POOL_p pool log p 1 ")
    assert table["HW_ns_POOL_p"].endswith(
        "none, log 1 to 1 differs: max_age 60 m -> 24 h (safe), allow_atomic no -> yes (safe)"
    )
    assert table["HW_ns_REQ"].endswith("as wanted; operator's: max_bytes 4 GiB")
    assert table["KV_HW_ns_CARD"].endswith("differs: max_msgs_per_subject 3 -> 1 (would lose)")
    assert table["KV_HW_ns_LEASE"].endswith("as wanted")

    code, output = await run(server, "ns", "--json")
    document = msgspec.json.decode(output)
    assert (code, document["whole"]) == (1, False)
    (pool,) = [one for one in document["streams"] if one["pool"] == POOL]
    assert [one["field"] for one in pool["differences"]] == ["max_age", "allow_atomic"]
    # The first run has appended an empty message, to know whether the log takes any.
    assert (pool["whole"], pool["first"], pool["last"], pool["snapshot"]) == (False, 1, 2, None)

    code, output = await run(server, "ns", "--repair")
    assert code == 1
    assert "altered HW_ns_POOL_p: allow_atomic no -> yes\n" in output
    assert "altered HW_ns_POOL_p: max_age 60 m -> 24 h\n" in output
    assert "left KV_HW_ns_CARD: max_msgs_per_subject is 3 and should be 1" in output
    assert rows(output)["HW_ns_POOL_p"].endswith("as wanted")

    await api(client, "STREAM.PURGE.KV_HW_ns_CARD", {})
    code, output = await run(server, "ns", "--repair")
    assert code == 0, output


async def test_a_pool_whose_log_was_cut_past_its_snapshot_is_broken(
    client: Client, server: NatsServer
) -> None:
    """Told with cause and mend until a snapshot continues the log; a snapshot ahead of the log is none."""
    await ensure_namespace(client, "ns")
    await ensure_pool(client, "ns", POOL)
    blobs = JetStreamBlobs(client, subjects.blob_bucket("ns"))
    for _ in range(10):
        await publish(client, "hw.ns.pool.p.kv.w", b"x", {}, 5.0)
    await blobs.put(subjects.snapshot_name(POOL, 4), b"x")
    assert (await run(server, "ns"))[0] == 0
    await api(client, "STREAM.PURGE.HW_ns_POOL_p", {"seq": 6})
    code, output = await run(server, "ns")
    assert code == 1
    # Each run appends an empty message behind what it shows.
    assert "4, log 6 to 11 BROKEN" in rows(output)["HW_ns_POOL_p"]
    assert "a new router of pool p starts from nothing: the log starts at 6" in output
    assert "cause: " in output
    assert "fix: " in output
    await blobs.put(subjects.snapshot_name(POOL, 5), b"x")
    code, output = await run(server, "ns")
    assert (code, "5, log 6 to 12 as wanted" in rows(output)["HW_ns_POOL_p"]) == (0, True)
    await blobs.put(subjects.snapshot_name(POOL, 14), b"x")
    code, output = await run(server, "ns")
    assert (code, "it was replaced" in output) == (1, True)


async def test_a_pool_is_known_by_its_card_or_its_log(client: Client, server: NatsServer) -> None:
    """A card without a log is a missing stream; a namespace whose name begins alike is another one."""
    await ensure_namespace(client, "ns")
    await ensure_pool(client, "ns", "with-log")
    await ensure_namespace(client, "ns_POOL_x")
    await ensure_pool(client, "ns_POOL_x", "other")
    await JetStreamTable(client, subjects.card_bucket("ns")).put("with-card", b"{}")
    code, output = await run(server, "ns")
    table = rows(output)
    assert code == 1
    assert table.keys() == NAMESPACE | {"HW_ns_POOL_with-card", "HW_ns_POOL_with-log"}
    assert table["HW_ns_POOL_with-card"].endswith("missing")
    assert table["HW_ns_POOL_with-log"].endswith("as wanted")
    code, output = await run(server, "ns", "--repair")
    assert code == 0
    assert "created HW_ns_POOL_with-card\n" in output


async def test_no_cluster_is_one_line(server: NatsServer) -> None:
    """Exit code 2 and what to do, not a traceback: three replicas on one server are refused by it."""
    code, output = await run(server, "ns", "--replicas", "3", "--repair")
    assert code == 2
    assert "non-clustered" in output
    code, output = await run(server, "ns", "--nats", "", "--replicas", "3", "--engine", "sim", command="up")
    assert code == 2
    assert output.splitlines()[-1].startswith("headwater: --replicas 3 needs a cluster")


@pytest.mark.soak
async def test_no_server_is_one_line(server: NatsServer) -> None:
    """After ten seconds, in which it might have come."""
    server.stop()
    code, output = await run(server, "ns")
    assert code == 2
    assert output.splitlines()[-1].startswith(f"headwater: no NATS server answers at {server.url}")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (duration(0.25), "0.25 s"),
        (duration(90), "90 s"),
        (duration(130), "2.17 m"),
        (duration(86_400), "24 h"),
        (duration(90 * 86_400), "90 d"),
        (size(1023), "1023 B"),
        (size(8 << 30), "8 GiB"),
        (size(1_500_000), "1.43 MiB"),
        (value("max_bytes", -1), "none"),
        (value("max_age", 0), "none"),
        (value("subject_delete_marker_ttl", 0), "0 s"),
        (value("num_replicas", 3), "3"),
        (value("subjects", ["a", "b"]), "a+b"),
        (value("subjects", []), "none"),
        (value("no_ack", True), "yes"),
    ],
)
def test_values_are_shown_with_their_units(shown: str, wanted: str) -> None:
    """Times and sizes of any length."""
    assert shown == wanted
