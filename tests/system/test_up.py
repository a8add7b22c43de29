"""`headwater up` with the simulated engine, as real processes."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from headwater.ops.start.sockets import free_port
from tests.clients.model import make as make_model
from tests.support.processes.fleet import FleetProcess, fleet, log_lines, shared_fleet, stream_text
from tests.support.servers.hub import hub

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Where does a river begin? " * 20}]}
OTHER = [{"role": "user", "content": "And where does it end?"}]
"""A prompt without a block in common with that of `CHAT`, which one test finds uncached."""


up = shared_fleet("--engine", "sim")
"""Two simulated workers."""


async def test_a_prompt_goes_back_to_the_worker_that_has_its_blocks(tmp_path: Path) -> None:
    """Twice the same prefix: same worker, and the engine itself says that it had the blocks."""
    async with fleet(tmp_path, "--engine", "sim") as up, up.client() as client:
        first = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
        await up.until_indexed(25)
        second = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
        assert first.status_code == second.status_code == 200
        assert first.headers["x-headwater-worker"] == second.headers["x-headwater-worker"]
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400
        code, text = await up.command("explain", second.headers["x-request-id"])
        assert code == 0
        assert f"-> {second.headers['x-headwater-worker']}" in " ".join(text.split())
        code, text = await up.command("whatif", "log", "--json", "--policy", "round_robin")
        assert code == 0
        again = json.loads(text)
        assert again["fidelity"]["whole"] == again["fidelity"]["requests"] >= 1
        assert [run["setup"]["policy"] for run in again["runs"]] == ["kv", "round_robin"]


async def test_a_restarted_router_still_knows_who_has_which_blocks(up: FleetProcess) -> None:
    """The index comes back from snapshot and log: the next request goes where the blocks are."""
    known = await up.blocks()
    async with up.client() as client:
        first = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
        await up.until_indexed(known + 25)
        before = up.kill(" router ")
        await up.until(
            "a new router is ready",
            lambda stats: (
                any(s["name"] == "headwater-router" and s["state"] == "ready" for s in stats)
                and up.pids(" router ") not in ([], [before])
            ),
        )
        second = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
        assert first.headers["x-headwater-worker"] == second.headers["x-headwater-worker"]
        assert int(second.headers["x-headwater-cached-blocks"]) >= 25
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400


async def test_edges_and_workers_say_which_files_of_a_model_they_have(up: FleetProcess) -> None:
    """The digests of tokenizer and template, and the engine with its version: what differs can be seen from outside."""
    stats = await up.until(
        "the edge has the model, and the workers are ready",
        lambda stats: any(s.get("files") for s in stats) and sum("tokenizer" in s for s in stats) == 2,
    )
    (edge,) = [one for one in stats if one["name"] == "headwater-edge"]
    workers = [one for one in stats if one["name"] == "headwater-worker"]
    used = edge["files"]["sim-b16"]
    assert len(used["tokenizer"]) == len(used["chat_template"]) == 64
    for one in workers:
        assert {"tokenizer": one["tokenizer"], "chat_template": one["chat_template"]} == used
        assert (one["engine"], one["model"], one["pool"]) == ("sim", "sim", "sim-b16")
        assert "engine_version" in one
    assert edge["auth"] == "none"


async def test_a_client_that_hangs_up_frees_its_worker(up: FleetProcess) -> None:
    """Streamed or not: the engine stops generating, and nothing counts against the worker any more."""
    async with up.client() as client:
        long = {"model": "sim", "messages": OTHER, "max_tokens": 4000, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json={**long, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        await up.until(
            "no worker runs anything",
            lambda stats: all(s["running"] == 0 for s in stats if s["name"] == "headwater-worker"),
            within_s=15,
        )


async def test_a_seeded_answer_is_the_same_each_time(up: FleetProcess) -> None:
    """What later tests rely on when they compare an answer under failures with one without."""
    async with up.client() as client:
        body = {"model": "sim", "messages": OTHER, "max_tokens": 40, "seed": 7, "ignore_eos": True}
        one = await stream_text(client, body)
        two = await stream_text(client, body)
        assert one[0] == two[0]
        assert one[1] == two[1] == "length"
        assert one[2]["completion_tokens"] == 40


async def test_the_streams_of_a_running_fleet_are_as_wanted(up: FleetProcess) -> None:
    """Nothing is missing or differs, and the pool is found."""
    code, output = await up.command("streams", "--json")
    assert code == 0, output
    document = json.loads(output)
    assert document["whole"]
    assert {one["what"] for one in document["streams"]} == {
        "pool log",
        "request log",
        "leases",
        "model cards",
        "API keys",
        "secrets",
        "stored responses",
        "video jobs",
        "objects",
    }
    assert all(one["differences"] == [] for one in document["streams"])


async def test_text_that_a_process_prints_is_put_into_log_lines(up: FleetProcess) -> None:
    """As native code does, and a process that is asked where its tasks stand."""
    (pid,) = up.pids(" router ")
    os.kill(pid, signal.SIGUSR1)
    async with asyncio.timeout(30):
        while b"Stack for <Task" not in up.log.read_bytes():
            await asyncio.sleep(0.02)
    printed = [line for line in log_lines(up.log) if line["logger"] == "stderr"]
    assert {(line["kind"], line["child"], line["pid"]) for line in printed} == {("router", "router-0", pid)}


async def test_workers_with_roles_each_tell_theirs(tmp_path: Path) -> None:
    """`--prefill-workers` and `--decode-workers` without `--workers`: these and no others; each has its metrics port."""
    port = free_port(0)
    flags = (
        "--engine",
        "sim",
        "--prefill-workers",
        "1",
        "--decode-workers",
        "2",
        "--metrics-port",
        str(port),
    )
    async with fleet(tmp_path, *flags) as up, up.client() as client:
        health = await client.get("/health")
        assert sum(health.json()["workers"].values()) == 3
        for number, (worker, role) in enumerate(
            (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode"))
        ):
            page = (await client.get(f"http://127.0.0.1:{port + number}/metrics")).text
            sample = next(
                line for line in page.splitlines() if line.startswith("process_resident_memory_bytes{")
            )
            for label in (f'worker="{worker}"', f'role="{role}"', 'pool="sim-b16"'):
                assert label in sample


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([("another", "32")], id="both at once"),
        pytest.param([("another", "16"), ("another", "32")], id="one by one", marks=pytest.mark.soak),
    ],
)
async def test_a_data_folder_serves_whatever_is_asked_of_it_now(
    tmp_path: Path, between: list[tuple[str, str]]
) -> None:
    """Another model name, another block size, and what it served at first: each is ready, and the names of before are unknown.

    The log of what it served at first goes on at the next position, and workers start with empty caches.
    """
    positions = []
    for model, block_size in (("sim", "16"), *between, ("sim", "16")):
        flags = ("--engine", "sim", "--served-model-name", model, "--block-size", block_size)
        async with fleet(tmp_path, *flags, ready_s=30) as up, up.client() as client:
            for name in ("sim", "another"):
                body = {"model": name, "prompt": "hello", "max_tokens": 4}
                try:
                    answer = await client.post(
                        "/v1/completions", json=body, timeout=None if name == model else 2
                    )
                except httpx.TimeoutException:
                    # A model of before may be on its way out: then a request waits for a worker of it, and is never answered by another.
                    continue
                assert answer.status_code in ((200,) if name == model else (404, 503)), answer.text
            assert sum((await client.get("/health")).json()["workers"].values()) == 2
            listed = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
            assert listed == [model]
            greeting = await client.get(f"/v1/models/{model}")
            assert greeting.json()["limits"]["block_tokens"] == int(block_size)
            chat = await client.post("/v1/chat/completions", json={**CHAT, "model": model, "max_tokens": 4})
            assert chat.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            positions.append(int(chat.headers["x-headwater-log-position"]))
            code, output = await up.command("log")
            assert code == 0, output
    assert positions[-1] > positions[0]


async def test_a_model_of_a_hub_is_served_by_its_name(tmp_path: Path) -> None:
    """`up` downloads what its engine needs, once; a worker that is started again needs no hub."""
    made = make_model(tmp_path / "published")
    with hub() as server:
        server.publish("acme/small", made)
        environ = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")}
        flags = ("--engine", "sim", "--model", "acme/small", "--workers", "1")
        (tmp_path / "fleet").mkdir()
        async with fleet(tmp_path / "fleet", *flags, environ=environ) as up, up.client() as client:
            server.down = True
            body = {**CHAT, "model": "acme/small", "max_tokens": 4}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            before = up.kill("worker-0")
            await up.until(
                "the worker is back",
                lambda stats: (
                    any(one["name"] == "headwater-worker" and one["state"] == "ready" for one in stats)
                    and up.pids("worker-0") not in ([], [before])
                ),
            )
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert set(server.served.values()) == {1}
