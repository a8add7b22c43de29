"""`headwater doctor` about real NATS servers without a fleet: odd settings, altered streams, none at all."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamBlobs, connect
from headwater.events.jetstream.api import SECOND_NS, api, publish
from headwater.events.jetstream.stream_spec import namespace_streams
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool
from headwater.ops.diagnosis import KINDS
from headwater.ops.nats.config import new_seed
from headwater.ops.start.sockets import free_port
from headwater.schemas import subjects
from tests.support.processes.commands import ended
from tests.support.processes.fleet import fleet
from tests.support.servers.disk import disk
from tests.support.servers.nats import NatsServer, running
from tests.support.servers.nats_cluster import NatsCluster
from tests.system.doctor.staged import STAGED, diagnosis, diagnosis_once

pytestmark = [pytest.mark.processes]

ENGINE_LOG = """
INFO 11-26 10:00:00 [core.py:70] Initializing a V1 LLM engine
ModuleNotFoundError: No module named 'nixl'
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.
RuntimeError: The NVIDIA driver on your system is too old (found version 12020).
zmq.error.ZMQError: Address already in use (addr='tcp://*:5557')
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_each_kind_of_finding_is_staged() -> None:
    """A new one needs a test that stages it."""
    staged = frozenset().union(*STAGED.values())
    assert staged == set(KINDS)


async def test_a_server_with_odd_settings(tmp_path: Path) -> None:
    """Small messages, open to everyone, rarely synced, and its store reserved to the last byte; a start says the first two."""
    monitor, port = free_port(0), free_port(0)
    reserved = sum(max(0, spec.max_bytes) for spec in namespace_streams("default", 1))
    settings: dict[str, Any] = {
        "listen": f"0.0.0.0:{port}",
        "http": f"127.0.0.1:{monitor}",
        "max_payload": 1 << 20,
        "jetstream": {"store_dir": str(tmp_path / "js"), "max_file_store": 1 << 50, "sync_interval": "10m"},
        "accounts": {
            "A": {"jetstream": {"max_file": reserved + 1}, "users": [{"user": "u", "password": "p"}]}
        },
        "no_auth_user": "u",
    }
    server = NatsServer(tmp_path, settings=settings, port=port)
    await server.start()
    try:
        client = await connect(server.url, "test")
        await ensure_namespace(client, "default")
        await client.close()
        found = await diagnosis("--nats", server.url, "--monitor", f"http://127.0.0.1:{monitor}")
        assert found.code == 1
        assert found.ids == STAGED["a server with odd settings"] | {"nothing-runs"}
        assert "1048576" in found.of("payload-small")[server.url]
        assert "600 s" in found.of("sync-rare")[server.url]
        end = await ended("top", "--once", "--nats", server.url)
        said = [line for line in end.output.splitlines() if "fault_found" in line]
        assert {
            name for name in KINDS if any(f'"{name}"' in line or f"={name}" in line for line in said)
        } == {"payload-small", "nats-open"}
    finally:
        server.stop()


async def _update(client: Client, stream: str, **change: Any) -> None:
    config = (await api(client, f"STREAM.INFO.{stream}"))["config"]
    await api(client, f"STREAM.UPDATE.{stream}", config | change)


async def test_streams_that_are_missing_altered_or_cut(tmp_path: Path) -> None:
    """And the doctor makes none."""
    async with running(tmp_path) as server:
        client = await connect(server.url, "test")
        flags = ("--nats", server.url, "--data-dir", str(tmp_path / "none"))
        found = await diagnosis(*flags)
        assert (found.code, found.ids) == (1, {"stream-missing"})
        assert "nothing-runs" in found.skipped
        assert set(found.of("stream-missing")) == {one.name for one in namespace_streams("default", 1)}
        assert (await api(client, "STREAM.NAMES"))["streams"] in (None, [])
        await ensure_namespace(client, "default")
        await ensure_pool(client, "default", "p")
        await _update(client, "HW_default_POOL_p", max_age=3600 * SECOND_NS, allow_atomic=False)
        for _ in range(10):
            await publish(client, "hw.default.pool.p.kv.w", b"x", {}, 5.0)
        await JetStreamBlobs(client, subjects.blob_bucket("default")).put(
            subjects.snapshot_name("p", 4), b"x"
        )
        await api(client, "STREAM.PURGE.HW_default_POOL_p", {"seq": 6})
        found = await diagnosis(*flags)
        assert found.code == 1
        assert found.ids == STAGED["streams"] - {"stream-missing"}
        assert "max_age 60 m -> 24 h (safe)" in found.of("stream-differs")["HW_default_POOL_p"]
        await client.close()


async def test_a_server_without_jetstream(tmp_path: Path) -> None:
    """One finding, and what was not looked for."""
    server = NatsServer(tmp_path, settings={"jetstream": False})
    await server.start()
    try:
        found = await diagnosis("--nats", server.url, "--data-dir", str(tmp_path / "none"))
        assert (found.code, found.ids) == (1, set(STAGED["no JetStream"]))
        assert {"stream-missing", "nothing-runs", "kv-silent"} <= found.skipped
        end = await ended(
            "up", "--engine", "sim", "--nats", server.url, "--data-dir", str(tmp_path / "up"), "--port", "0"
        )
        assert end.code
        assert "jetstream-off" in end.output
    finally:
        server.stop()


@asynccontextmanager
async def _older(server: NatsServer, version: str) -> AsyncIterator[str]:
    """URL of a server that says that it is older: what is between rewrites its greeting."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, outside = await asyncio.open_connection("127.0.0.1", server.port)
        greeting = msgspec.json.decode((await inside.readline()).removeprefix(b"INFO "))
        writer.write(b"INFO " + msgspec.json.encode({**greeting, "version": version}) + b"\r\n")
        await asyncio.gather(pump(reader, outside), pump(inside, writer), return_exceptions=True)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


async def test_an_old_server(tmp_path: Path) -> None:
    """With the faults that its release is known for; a command that connects logs it, too."""
    async with running(tmp_path) as server, _older(server, "2.10.21") as url:
        found = await diagnosis("--nats", url, "--data-dir", str(tmp_path / "none"))
        assert found.code == 1
        assert found.ids == STAGED["an old server"] | {"stream-missing"}
        assert "2.10.21" in found.of("nats-old")[url]
        assert "whole stream" in found.of("nats-faulty")[url]
        end = await ended("top", "--once", "--nats", url)
        assert "fault_found" in end.output
        assert "nats-old" in end.output


async def test_no_server(tmp_path: Path) -> None:
    """Who has the port instead, and what the log of an engine that did not start says."""
    log = tmp_path / "engine.log"
    log.write_text(ENGINE_LOG)
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as edge:
        port, http = other.getsockname()[1], edge.getsockname()[1]
        flags = ("--nats-port", str(port), "--port", str(http), "--data-dir", str(tmp_path / "none"))
        found = await diagnosis(*flags, "--engine-log", str(log))
        assert (found.code, found.ids) == (2, set(STAGED["out of reach"]))
        taken = found.of("port-taken")
        assert set(taken) == {f"--nats-port {port}", f"--port {http}"}
        assert all(f"process {os.getpid()} " in text for text in taken.values())
        assert {"jetstream-off", "stream-missing", "nothing-runs", "kv-silent", "sync-rare"} <= found.skipped
    end = await ended("doctor", "--nats", "nats://127.0.0.1:9", "--engine-log", str(tmp_path / "no.log"))
    assert end.code == 2
    assert "no.log" in end.told()


async def test_a_server_that_denies_us(tmp_path: Path) -> None:
    """Code 2; and the key that we came with is everyone's."""
    key = tmp_path / "mine.nk"
    key.write_text(new_seed())
    key.chmod(0o644)
    settings = {"authorization": {"users": [{"user": "u", "password": "p"}]}}
    async with running(tmp_path, **settings) as server:
        flags = ("--nats", server.url, "--nats-nkey-file", str(key), "--data-dir", str(tmp_path))
        found = await diagnosis(*flags)
        assert (found.code, found.ids) == (2, set(STAGED["denied"]))
        assert set(found.of("key-file-readable")) == {str(key)}
        key.chmod(0o600)
        assert (await diagnosis(*flags)).ids == {"nats-denied"}


@pytest.mark.soak
async def test_a_cluster_that_lost_a_server(tmp_path: Path) -> None:
    """Its replicas are behind; a stream that was there alone does not answer."""
    made = NatsCluster(tmp_path)
    odd = made.servers[2]
    odd.settings = {**(odd.settings or {}), "max_payload": 1 << 20}
    async with made as cluster:
        client = await connect(cluster.servers[0].url, "test")
        await cluster.until_ready(client)
        await ensure_namespace(client, "three", replicas=3)
        await ensure_namespace(client, "one")
        alone = namespace_streams("one", 1)[0].name
        lost = await cluster.leader(client, alone)
        url = next(server.url for server in cluster.servers if server is not lost)
        common = ("--nats", url, "--data-dir", str(tmp_path / "none"))
        three = (*common, "--namespace", "three", "--replicas", "3")
        # Followers of a new stream are current within moments.
        found = await diagnosis_once(lambda found: "stream-behind" not in found.ids, *three)
        # Whichever server is asked.
        assert found.ids == {"nothing-runs", "payload-small"}
        assert set(found.of("payload-small")) == {odd.url}
        lost.kill()
        found = await diagnosis_once(lambda found: "stream-behind" in found.ids, *three)
        assert "2 of 3 replicas" in next(iter(found.of("stream-behind").values()))
        found = await diagnosis(*common, "--namespace", "one")
        assert found.code == 1
        assert alone in found.of("stream-silent")
        await client.close()


async def test_a_full_disk(tmp_path: Path) -> None:
    """A fleet whose disk filled: the disk, the store that stopped, and who cannot append."""
    with disk(tmp_path / "disk") as full:
        async with fleet(full.folder, "--engine", "sim", "--workers", "1") as up:
            folder, staged = str(full.folder / "data"), STAGED["a full disk"]
            flags = ("--nats", up.nats, "--data-dir", folder)
            full.fill()
            found = await diagnosis_once(lambda found: staged <= found.ids, *flags)
            assert found.code == 1
            assert f"{folder}" in found.of("disk-full")
            full.free()
            await diagnosis_once(lambda found: not staged & found.ids, *flags)
