"""`headwater doctor` about real fleets: a healthy one, one whose engines are misconfigured, and one whose processes and logs are."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from headwater import __version__
from headwater.events.jetstream import JetStreamLog, JetStreamTable, connect
from headwater.events.jetstream.api import api
from headwater.events.ports import Entry, Stored
from headwater.schemas import subjects
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import Event, KvGap, WorkerJoined, WorkerLeft
from headwater.schemas.tables import Lease, ModelCard
from tests.support.engines import ailing
from tests.support.processes.commands import ended, kill_all, launched, spawn
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.nats import running
from tests.system.doctor.staged import STAGED, Diagnosis, diagnosis, diagnosis_once

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ENGINE = Path(ailing.__file__)
PROMPT = "{number} Where does a river begin, and where does it end? "


async def _ask(up: FleetProcess, model: str, count: int, first: int = 0) -> None:
    async with up.client() as client:
        for number in range(first, first + count):
            body = {"model": model, "max_tokens": 4, "prompt": PROMPT.format(number=number) * 3}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


async def test_a_healthy_fleet_has_no_finding(tmp_path: Path) -> None:
    """After some requests, too; asked at another fleet's server, it says where its own is."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "2") as up:
        await up.until_whole()
        await _ask(up, "sim", 6)
        await asyncio.sleep(3.5)
        data = ("--data-dir", str(tmp_path / "data"))
        found = await diagnosis("--nats", up.nats, *data)
        assert found.document["findings"] == []
        assert found.code == 0
        assert found.skipped == {"engine-memory", "engine-cuda", "engine-connector", "engine-port"}
        end = await ended("doctor", "--nats", up.nats, *data)
        assert end.code == 0
        assert "1 edge, 1 router, 2 workers" in end.output
        assert "0 findings; " in end.output
        async with running(tmp_path / "other") as other:
            found = await diagnosis("--nats-port", str(other.port), *data)
            assert found.code == 1
            assert found.ids == STAGED["two fleets"] | {"stream-missing"}
            assert up.nats.rpartition(":")[2] in str(found.document["findings"])
        # Nobody answers on its port: the remedy names the fleet's.
        found = await diagnosis("--nats-port", "9", *data)
        assert (found.code, found.ids) == (2, {"nats-unreachable"})
        assert up.nats in found.document["findings"][0]["remedy"]


@asynccontextmanager
async def _processes(up: FleetProcess, *lines: tuple[str, ...]) -> AsyncIterator[None]:
    """Further processes of a fleet, until the block ends."""
    async with AsyncExitStack() as stack:
        for line in lines:
            process = await spawn(*line, "--nats", up.nats)
            stack.push_async_callback(kill_all, process)
        yield


async def _until(wanted: frozenset[str], up: FleetProcess, data: Path) -> Diagnosis:
    """The diagnosis once it has all of these."""
    return await diagnosis_once(lambda found: wanted <= found.ids, "--nats", up.nats, "--data-dir", str(data))


async def test_engines_that_are_misconfigured(tmp_path: Path) -> None:
    """One publishes nothing, and listens everywhere; one has hashes and a template of its own; one is old and has a role without a partner."""
    template = tmp_path / "other.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}|{% endfor %}")
    old = tmp_path / "vllm.py"
    shutil.copy(ENGINE, old)
    common = ("--served-model-name", "m")
    silent = '{"silent": true, "everywhere": true}'
    flags = ("--engine", str(ENGINE), "--engine-options", silent, "--workers", "1", "--policy", "round_robin")
    odd = ("engine", str(ENGINE), *common, "--name", "odd", "--engine-options", '{"hashes": true}')
    old_flags = ("--name", "old", "--role", "prefill")
    old_options = '{"version": "0.8.0", "pairs_with": "vllm 0.8.0"}'
    async with (
        fleet(tmp_path, *flags, *common) as up,
        _processes(
            up,
            (*odd, "--chat-template", str(template)),
            ("engine", str(old), *common, *old_flags, "--engine-options", old_options),
            ("edge", "--name", "locked", "--auth", "keys", "--port", "0"),
        ),
    ):
        await up.until(
            "three workers are ready",
            lambda stats: (
                sum(s.get("state") == "ready" for s in stats if s["name"] == "headwater-worker") == 3
            ),
        )
        await _ask(up, "m", 12)
        found = await _until(STAGED["engines"], up, tmp_path / "data")
        assert found.code == 1
        assert set(found.of("kv-silent")) == {"worker-0"}
        assert set(found.of("hashes-differ")) == {"odd"}
        assert set(found.of("engine-socket-open")) == {"worker-0"}
        assert "CVE-2026-22778" in found.of("engine-vulnerable")["worker old"]
        assert "vllm 0.8.0" in found.of("handoff-impossible")["old"]
        assert "locked" in next(iter(found.of("no-api-key").values()))
        # The card is that of the worker that started last.
        assert set(found.of("template-differs")) in ({"worker odd"}, {"worker worker-0", "worker old"})


async def test_an_engine_that_does_not_start_names_the_cause(tmp_path: Path) -> None:
    """As the doctor would from its log."""
    options = '{"fails": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB."}'
    async with running(tmp_path) as server:
        line = ("engine", str(ENGINE), "--engine-options", options, "--nats", server.url)
        end = await ended(*line, within_s=60)
    assert end.code
    (said,) = [line for line in end.output.splitlines() if "fault_found" in line]
    assert "engine-memory" in said
    assert "--gpu-memory-utilization" in said


class Pretender:
    """Writes to a fleet's tables and logs what processes that went wrong write."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._leases = JetStreamTable(client, subjects.lease_bucket("default"))
        self._cards = JetStreamTable(client, subjects.card_bucket("default"))
        self._log = JetStreamLog(client, subjects.pool_stream("default", "sim-b16"))

    async def lease(self, kind: Any, name: str, **fields: Any) -> None:
        """A lease that stays."""
        lease = Lease(kind=kind, name=name, **{"host": "elsewhere", **fields})
        await self._leases.put(subjects.lease_key(kind, name), msgspec.json.encode(lease))

    async def card(self, like: str, **changes: Any) -> None:
        """A card like that of a pool."""
        entry = await self._cards.get(subjects.card_key(like))
        assert entry is not None
        assert entry.value is not None
        card = msgspec.structs.replace(msgspec.json.decode(entry.value, type=ModelCard), **changes)
        await self._cards.put(subjects.card_key(card.pool), msgspec.json.encode(card))

    async def append(self, kind: Any, writer: str, epoch: int, *events: Event, ahead_s: float = 0.0) -> None:
        """One message of an incarnation, written by a clock that is ahead."""
        subject = subjects.pool_subject("default", "sim-b16", kind, writer)
        newest = await self._log.newest(subject)
        batch: Batch[Any] = Batch(
            SCHEMA_VERSION,
            writer,
            epoch,
            1 if newest.epoch != epoch else newest.seq + 1,
            time.time_ns() + round(ahead_s * 1e9),
            events,
            previous=newest.digest,
        )
        assert isinstance(await self._log.append(Entry(subject, seal(batch))), Stored)

    async def answer(self, kind: str, name: str, version: str, data: dict[str, Any]) -> None:
        """Answer for statistics as a process of another version."""
        reply = msgspec.json.encode({"version": version, "endpoints": [{"data": data}]})

        async def respond(message: Msg) -> None:
            await message.respond(reply)

        await self._client.subscribe(subjects.service("STATS", f"headwater-{kind}", name), cb=respond)


def _joined(worker: str, epoch: int) -> WorkerJoined:
    return WorkerJoined(
        worker, epoch, "sim", "sim", "both", 16, 100, 8, capabilities=("generate", "kv_events")
    )


async def test_processes_and_logs_that_went_wrong(tmp_path: Path) -> None:
    """A machine with another clock, an old router that lags and differs, a worker that restarts, pools without the one or the other."""
    ports = ("--port", "0", "--nats-port", "0", "--console-port", "0", "--data-dir", str(tmp_path / "data"))
    # Its log will not be what routers wrote: nothing of it is verified.
    async with launched(tmp_path, "--engine", "sim", "--workers", "1", *ports) as up:
        await up.until_whole(1)
        client = await connect(up.nats, "pretender")
        false = Pretender(client)
        for epoch in (1, 2, 3):
            await false.append("fleet", "far", epoch, _joined("far", epoch), ahead_s=30.0)
        await false.append("kv", "far", 3, KvGap(4), ahead_s=30.0)
        await false.append("fleet", "lost", 1, _joined("lost", 1), WorkerLeft("lost", 1, "its lease expired"))
        await false.lease("worker", "far", pool="sim-b16")
        await false.lease("router", "old", pool="sim-b16")
        lag = {"lag_messages": 5000, "lag_s": 61.0, "diverged": {"router-0": 7}}
        await false.answer("router", "old", "0.0.9", lag)
        await false.lease("worker", "twin", pool="sim-b16")
        await false.answer(
            "worker", "twin", __version__, {"model": "sim", "pool": "sim-b16", "tokenizer": "1" * 64}
        )
        await false.lease("worker", "wide", pool="sim-b32")
        await false.card("sim-b16", pool="sim-b32", block_size=32, tokenizer="0" * 64)
        await false.card("sim-b16", pool="other-b16", name="other")
        stream = subjects.pool_stream("default", "sim-b16")
        info = await api(client, f"STREAM.INFO.{stream}")
        full = {"discard": "new", "max_bytes": int(info["state"]["bytes"]) + 1}
        await api(client, f"STREAM.UPDATE.{stream}", info["config"] | full)
        await _ask(up, "sim", 3)
        # Without `up`, which would start another one.
        os.kill(up.process.pid, signal.SIGSTOP)
        up.kill(" edge ")
        found = await _until(STAGED["processes and logs"], up, tmp_path / "data")
        os.kill(up.process.pid, signal.SIGCONT)
        assert found.of("clock-off") == {"elsewhere": "its clock is 30.0 s ahead of the NATS server's"}
        assert set(found.of("process-silent")) == {"worker far", "worker wide"}
        assert found.of("versions-differ")["router old"].startswith("has 0.0.9")
        assert "5000 messages" in found.of("router-behind")["router old"]
        assert "router-0" in found.of("routers-differ")["router old"]
        assert found.of("worker-restarts") == {"far": "joined sim-b16 3 times in 15 minutes"}
        assert set(found.of("kv-lost")) == {"far"}
        assert "lost is gone" in found.of("pool-history")["lost"]
        assert set(found.of("tokenizer-differs")) == {"worker twin"}
        assert set(found.of("no-router")) == {"sim-b32"}
        assert set(found.of("no-worker")) == {"other-b16"}
        assert "32" in found.of("block-size-differs")["sim"]
        assert found.of("model-file-missing") == {"sim": "the tokenizer of pool sim-b32 is not stored"}
        await api(client, f"STREAM.UPDATE.{stream}", info["config"])
        await client.close()
