"""A whole fleet as real processes under least permissions: everything works, and nothing was denied."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from headwater.ops.config.sections import NatsSettings
from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted
from headwater.ops.nats.connect import ports_of
from headwater.ops.start.children import child_environment
from headwater.ops.start.sockets import free_port
from headwater.schemas.subjects import InboxKind
from tests.support.processes import zygote
from tests.support.processes.commands import ended
from tests.support.processes.fleet import FleetProcess, fleet, stream_text
from tests.support.servers.nats import NatsServer
from tests.support.servers.otlp import otlp_receiver

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

POOL = "sim-b16"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Where does a river begin? " * 20}]}


@asynccontextmanager
async def server(folder: Path, wanted: Wanted) -> AsyncIterator[NatsServer]:
    """A server from `nats-config`. On leaving: nobody was denied anything."""
    port = free_port(0)
    nats_config.write(wanted._replace(port=port, store=str(folder / "js")), folder)
    made = NatsServer(folder, port=port, config=folder / "nats.conf")
    await made.start()
    try:
        yield made
        assert made.violations() == []
    finally:
        made.stop()


async def test_a_fleet_with_a_key_for_each_kind(tmp_path: Path) -> None:
    """`headwater up` as the operator, its children with their own keys: requests, replay, a restarted router."""
    async with server(tmp_path, Wanted("default")) as nats:
        access = ("--nats-keys-dir", str(tmp_path))
        flags = ("--engine", "sim", "--nats", nats.url)
        async with fleet(tmp_path, *flags, access=access) as up, up.client() as client:
            first = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
            assert first.status_code == 200
            text, finish, _ = await stream_text(client, {**CHAT, "max_tokens": 8, "ignore_eos": True})
            assert text
            assert finish == "length"
            before = up.kill(" router ")
            await asks_again(up, client, " router ", before)
            looks = [("log",), ("streams",), ("snapshots",), ("doctor",)]
            outputs = await succeed(
                up, *looks, ("pools",), ("streams", "--repair"), ("explain", first.headers["x-request-id"])
            )
            await succeed(up, ("ctl", "weights", "sim", "sim=1"), ("log", "--audit"))
            # Fast ingest: nobody else writes these.
            assert re.search(r"BlocksStored +[1-9]", outputs[0]), outputs[0]
            # The same, for who only looks.
            (tmp_path / "operator.nk").rename(tmp_path / "operator.kept")
            await succeed(up, *looks)
            (tmp_path / "operator.kept").rename(tmp_path / "operator.nk")
        logged = up.log.read_text()
        assert "denied" not in logged
        assert "stream_differs" not in logged


async def test_a_process_waits_for_the_operator_that_was_started_with_it(tmp_path: Path) -> None:
    """Whatever starts first: the streams are the operator's to make, and a process that stays is not ended by their absence.

    It asks now and then, and if that takes long, tries to make them itself: the server logs a violation then.
    """
    port = free_port(0)
    nats_config.write(Wanted("default", port=port, store=str(tmp_path / "js")), tmp_path)
    nats = NatsServer(tmp_path, port=port, config=tmp_path / "nats.conf")
    await nats.start()
    try:
        settings = NatsSettings(url=nats.url, keys_dir=str(tmp_path))

        async def opened(kind: InboxKind) -> None:
            async with ports_of(settings, kind, f"{kind}-0", waits=True):
                pass

        waiting = [
            asyncio.create_task(opened(kind)) for kind in ("edge", "router", "worker", "tracer", "admin")
        ]
        done, _ = await asyncio.wait(waiting, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
        assert not done, [task.exception() for task in done]
        async with ports_of(settings, "operator", "operator-0"):
            pass
        await asyncio.gather(*waiting)
    finally:
        nats.stop()


async def test_an_operator_serves_probes_while_it_watches(tmp_path: Path) -> None:
    """Healthy once the streams are there; for one listing a port makes no sense, and is refused."""
    port = free_port(0)
    async with server(tmp_path, Wanted("default")) as nats:
        line = ("pools", "--nats", nats.url, "--nats-keys-dir", str(tmp_path), "--metrics-port", str(port))
        assert "--metrics-port: a port for the time of one listing" in (await ended(*line)).told()
        process = await zygote.start(*line, "--watch", stdout=zygote.PIPE, environ=child_environment())
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                async with asyncio.timeout(30):
                    while not await answers(client, "/health"):
                        await asyncio.sleep(0.05)
                assert (await client.get("/live")).status_code == 200
                assert (await client.get("/health")).json() == {"status": "ok"}
        finally:
            process.terminate()
            assert await process.wait() == 0
            await process.close_outputs()


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    """Is it 200?"""
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


async def test_the_next_life_of_an_edge_reads_what_was_left_open(tmp_path: Path) -> None:
    """Its own requests in the log: it ends those that the killed one had."""
    async with server(tmp_path, Wanted("default")) as nats:
        access = ("--nats-keys-dir", str(tmp_path))
        flags = ("--engine", "sim", "--workers", "1", "--nats", nats.url)
        async with fleet(tmp_path, *flags, access=access) as up, up.client() as client:
            killed: list[int] = []

            def on_text(chunks: int) -> None:
                if chunks >= 5 and not killed:
                    killed.append(up.kill(" edge "))

            with pytest.raises(httpx.TransportError):
                await stream_text(client, {**CHAT, "max_tokens": 2000, "ignore_eos": True}, on_text)
            await asks_again(up, client, " edge ", killed[0])
        logged = up.log.read_text()
        assert "request_left_open" in logged
        assert "denied" not in logged


@pytest.mark.soak
async def test_snapshots_are_kept_named_and_started_from(tmp_path: Path) -> None:
    """A fleet that stops saves one; the operator names it; the next fleet's router goes on from it."""
    async with server(tmp_path, Wanted("default")) as nats:
        access = ("--nats-keys-dir", str(tmp_path))
        flags = ("--engine", "sim", "--workers", "1", "--nats", nats.url, "--cache-dir", "none")
        for life in (1, 2):
            async with fleet(tmp_path, *flags, access=access) as up, up.client() as client:
                answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
                assert answer.status_code == 200
                if life == 2:
                    outputs = await succeed(
                        up,
                        ("snapshots", "--bookmark", "first"),
                        ("snapshots",),
                        ("snapshots", "--drop", "first"),
                    )
                    assert "first" in outputs[1]
            logged = up.log.read_text()
            assert "denied" not in logged
            assert "snapshots_not_pruned" not in logged
            assert bool(re.search(r'"from_snapshot": ?[1-9]', logged)) == (life == 2)


async def test_actors_started_one_by_one_with_a_password_each(tmp_path: Path) -> None:
    """From their environment files, each named, with the pool named: nobody has a right over another."""
    wanted = Wanted(
        "default",
        auth="password",
        actors=("edge:e", "router:r", "shadow:s", "tracer:t", "worker:w"),
        pools=(POOL,),
    )
    async with server(tmp_path, wanted), AsyncExitStack() as stack:
        code, output = await run(tmp_path, "operator", "pools", "--pool", POOL)
        assert code == 0, output
        assert f"HW_default_POOL_{POOL}" in output
        port = free_port(0)
        await stack.enter_async_context(actor(tmp_path, "worker.w", "engine", "--engine", "sim"))
        cache = str(tmp_path / "cache")
        await stack.enter_async_context(actor(tmp_path, "router.r", "router", "--cache-dir", cache))
        await stack.enter_async_context(actor(tmp_path, "shadow.s", "shadow", "--policy", "kv"))
        received = await stack.enter_async_context(otlp_receiver())
        sends = ("--otlp", received.url, "--trace-sample", "1", "--data-dir", str(tmp_path / "tracer"))
        await stack.enter_async_context(actor(tmp_path, "tracer.t", "tracer", *sends))
        await stack.enter_async_context(actor(tmp_path, "edge.e", "edge", "--port", str(port)))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            async with asyncio.timeout(60):
                while not await serves(client):
                    await asyncio.sleep(0.1)
            answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-headwater-worker"] == "w"
            body = {"model": CHAT["model"], "input": "hello", "max_output_tokens": 4}
            stored = (await client.post("/v1/responses", json=body)).json()
            assert stored["store"]
            path = f"/v1/responses/{stored['id']}"
            assert [(await client.request(method, path)).status_code for method in ("GET", "DELETE")] == [
                200
            ] * 2
            assert (await client.get(path)).status_code == 404
            async with asyncio.timeout(60):
                # With decisions, which are in the pool's log. A tracer sends what ends once it has begun.
                while not any(span.name == "decide" for span in received.spans):
                    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for command in (("replay", "--verify"), ("streams",), ("snapshots",)):
            code, output = await run(tmp_path, "observer", *command)
            assert code == 0, output
        async with asyncio.timeout(90):
            output = ""
            while not re.search(r"Shadowed +[1-9]", output):
                code, output = await run(tmp_path, "observer", "log")
                assert code == 0, output


async def test_a_process_without_a_key_ends_with_one_line(tmp_path: Path) -> None:
    """Exit code 2, at once: no traceback and no endless try."""
    commands = ("edge", "router", "engine --engine sim", "log", "pools", "streams", "snapshots")
    async with server(tmp_path, Wanted("default")) as nats, asyncio.timeout(90):
        ends = [await execute([*command.split(), "--nats", nats.url], {}) for command in commands]
    for command, (code, output) in zip(commands, ends, strict=True):
        assert code == 2, (command, output)
        lines = [line for line in output.splitlines() if line.startswith("headwater: ")]
        assert len(lines) == 1
        assert "--nats-nkey-file" in lines[0]
        assert "Traceback" not in output


async def asks_again(up: FleetProcess, client: httpx.AsyncClient, what: str, before: int) -> None:
    """Wait until a killed process is there again and requests are answered."""
    async with asyncio.timeout(90):
        while up.pids(what) in ([], [before]):
            await asyncio.sleep(0.1)
        while not await answered(client):
            await asyncio.sleep(0.1)


async def answered(client: httpx.AsyncClient) -> bool:
    """Is a request answered?"""
    try:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
    except httpx.TransportError:
        return False
    return answer.status_code == 200


async def succeed(up: FleetProcess, *commands: tuple[str, ...]) -> list[str]:
    """Run commands against the fleet's server, each to exit code 0; what they print."""
    outputs = []
    for command in commands:
        code, output = await up.command(*command)
        assert code == 0, f"{command}: {output}"
        outputs.append(output)
    return outputs


async def serves(client: httpx.AsyncClient) -> bool:
    """Does the edge know a worker?"""
    try:
        document = (await client.get("/health")).json()
    except httpx.TransportError:
        return False
    return bool(document.get("status") == "ok" and sum(document.get("workers", {}).values()) >= 1)


def environment(folder: Path, user: str) -> dict[str, str]:
    """What `nats-config` wrote for a user."""
    lines = (folder / f"{user}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


async def execute(arguments: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Run a headwater command to its end."""
    end = await ended(*arguments, environ=environ, within_s=60)
    return end.code, end.output


async def run(folder: Path, user: str, *arguments: str) -> tuple[int, str]:
    """Run a headwater command as a user."""
    return await execute(list(arguments), environment(folder, user))


@asynccontextmanager
async def actor(folder: Path, user: str, *arguments: str) -> AsyncIterator[None]:
    """An actor's process as a user, ended in an orderly way."""
    with (folder / f"{user}.log").open("wb") as log:
        process = await zygote.start(
            *arguments, stdout=log, stderr=log, environ=child_environment() | environment(folder, user)
        )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(40):
            await process.wait()
    # A worker that a signal ended says so: it is to be started again.
    wanted = 143 if arguments[0] == "engine" else 0
    assert process.returncode == wanted, (folder / f"{user}.log").read_text()
    assert "denied" not in (folder / f"{user}.log").read_text()
