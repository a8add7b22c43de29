"""Envoy with the endpoint picker, as the example configures it: requests go where a router decides, whatever dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.actors.router.divergence import VOID_AFTER_S
from tests.gateway.stage import SUBSET_HEADER, Stage, envoy, kill, stage
from tests.support.processes.fleet import stream_text
from tests.support.processes.restarted import until_healthy, until_ready

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

WORKERS = ("worker-0", "w-b")


def chat(prompt: str, **fields: Any) -> dict[str, Any]:
    """A request whose prompt has some blocks."""
    text = f"{prompt} " * 30
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def set_up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Two edges, two workers, two pickers, Envoy."""
    queue = ("--busy", "kv=0.00001", "--queue", "requests=4,tenant_share=0.25")
    async with stage(tmp_path_factory.mktemp("gateway"), *queue) as made:
        yield made


async def ask(
    made: Stage, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> httpx.Response:
    """One request through Envoy."""
    async with made.envoy.client() as client:
        return await client.post(path, json=body, headers=headers)


async def test_requests_go_where_they_were_decided(set_up: Stage) -> None:
    """One decision for each, made for the picker; the edge beside the worker follows it; the same prompt goes to the same worker."""
    before = await set_up.decisions()
    edges = dict(zip(WORKERS, ("edge-0", set_up.edge.name), strict=True))
    for number in range(4):
        answers = [await ask(set_up, chat(f"Where does river {number} begin?")) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        workers = {answer.headers["x-headwater-worker"] for answer in answers}
        assert len(workers) == 1
        assert await set_up.served_by(answers[1].headers["x-request-id"]) == edges[workers.pop()]
        assert int(answers[1].headers["x-headwater-cached-blocks"]) > 0
    assert await set_up.decisions() == before + 8
    code, output = await set_up.up.command("explain", answers[0].headers["x-request-id"])
    assert code == 0, output
    assert "least cost" in output


async def test_streams_of_each_api_pass(set_up: Stage) -> None:
    """The events of chat completions, completions and messages; each decided once."""
    before = await set_up.decisions()
    async with set_up.envoy.client() as client:
        text, finish, _ = await stream_text(client, chat("Stream", max_tokens=16, ignore_eos=True))
        assert (bool(text), finish) == (True, "length")
        body = {"model": "sim", "prompt": "A long text. " * 20, "max_tokens": 4, "stream": True}
        completion = await client.post("/v1/completions", json=body)
        assert completion.text.rstrip().endswith("data: [DONE]")
        message = await client.post("/v1/messages", json=chat("Message", stream=True))
        assert "event: message_stop" in message.text
        assert message.headers["request-id"].removeprefix("req_") in message.headers["x-request-id"]
    assert await set_up.decisions() == before + 3


@pytest.mark.soak
async def test_what_the_picker_does_not_decide_an_edge_answers(set_up: Stage) -> None:
    """Lists of models, and errors in the form of each API; bodies larger than Envoy's pieces arrive whole."""
    async with set_up.envoy.client() as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "sim"
        assert (await client.post("/v1/chat/completions", content=b"{")).json()["error"]["type"]
        unknown = await client.post("/v1/messages", json=chat("x", model="none"))
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        large = await client.post("/v1/chat/completions", json=chat("Large", metadata={"x": "x" * 3_000_000}))
        assert large.status_code == 200, large.text


async def test_a_forged_decision_is_not_followed(set_up: Stage) -> None:
    """Neither through Envoy, where the picker's replaces it, nor at an edge."""
    forged = {"x-headwater-decision": "AAAA" * 40}
    assert (await ask(set_up, chat("Forged"), **forged)).status_code == 200
    before = await set_up.decisions()
    async with set_up.up.client() as client:
        answer = await client.post("/v1/chat/completions", json=chat("Forged"), headers=forged)
    assert answer.status_code == 200
    assert await set_up.decisions() == before + 1
    assert '"pick_rejected"' in set_up.up.log.read_text()


async def test_only_endpoints_of_the_subset_are_picked(set_up: Stage) -> None:
    """Also against the cache; and 503 in the form of the API if none of them is known."""
    for endpoint, worker in zip(set_up.endpoints, WORKERS, strict=True):
        subset = {SUBSET_HEADER: f"{endpoint}, 10.9.9.9:80"}
        answers = [await ask(set_up, chat("Subset"), **subset) for _ in range(2)]
        assert {answer.headers["x-headwater-worker"] for answer in answers} == {worker}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/models"):
        none = await ask(set_up, chat("Subset"), path, **{SUBSET_HEADER: "10.9.9.9:80"})
        assert none.status_code == (529 if path == "/v1/messages" else 503), none.text
        assert "endpoint" in none.json()["error"]["message"]
        assert int(none.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_in_mid_stream_leaves_nothing(set_up: Stage) -> None:
    """At no worker, and in the load that the router counts."""
    body = chat("Leave", max_tokens=4000, ignore_eos=True, stream=True)
    async with set_up.envoy.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
            await set_up.up.until("it runs", lambda s: sum(one.get("running", 0) for one in s) == 1)
        await set_up.idle()
    async with asyncio.timeout(10):
        while await set_up.counted():
            await asyncio.sleep(0.05)


@pytest.mark.soak
async def test_bodies_in_pieces_and_answers_through_the_picker(set_up: Stage) -> None:
    """As implementations of InferencePool configure it: everything full duplex. What arrives is what was sent."""

    def full_duplex(settings: dict[str, Any]) -> None:
        for way in ("request", "response"):
            settings["processing_mode"][f"{way}_body_mode"] = "FULL_DUPLEX_STREAMED"
            settings["processing_mode"][f"{way}_trailer_mode"] = "SEND"

    before = await set_up.decisions()
    async with (
        envoy(set_up.folder, set_up.edge_ports, set_up.ports, full_duplex) as duplex,
        duplex.client() as client,
        set_up.up.client() as direct,
    ):
        large = chat("Large", metadata={"note": "x" * 200_000})
        answers = [await one.post("/v1/chat/completions", json=large) for one in (client, direct)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        tokens = {answer.json()["usage"]["prompt_tokens"] for answer in answers}
        assert len(tokens) == 1
        body = chat("Stream", max_tokens=16, ignore_eos=True)
        ends = [(await stream_text(one, body))[1:] for one in (client, direct)]
        assert ends[0][0] == ends[1][0] == "length"
        assert ends[0][1]["completion_tokens"] == ends[1][1]["completion_tokens"] == 16
        assert (await client.get("/v1/models")).status_code == 200
    assert await set_up.decisions() == before + 4


async def test_a_full_fleet_sheds_and_a_client_that_leaves_leaves_the_queue(set_up: Stage) -> None:
    """429 with the time to wait, for the tenant that has its share of the queue; the one who waits is forgotten."""
    long = chat("Fill", max_tokens=4000, ignore_eos=True, stream=True)
    async with set_up.envoy.client(**{"x-headwater-tenant": "one"}) as client, AsyncExitStack() as stack:
        for number in range(2):
            body = {**long, "messages": [{"role": "user", "content": f"{number} fill " * 40}]}
            response = await stack.enter_async_context(
                client.stream("POST", "/v1/chat/completions", json=body)
            )
            assert response.status_code == 200
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=chat("Wait")))
        await set_up.up.until("one waits", lambda s: any(one.get("waiting_tokens") for one in s))
        shed = await client.post("/v1/messages", json=chat("Shed"))
        assert (shed.status_code, shed.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(shed.headers["retry-after"]) >= 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await set_up.up.until("none waits", lambda s: not any(one.get("waiting_tokens") for one in s))
    await set_up.idle()


@pytest.mark.soak
async def test_pickers_say_how_they_are(set_up: Stage) -> None:
    """In gRPC's health protocol, by the names that the picker protocol has."""
    for port in set_up.ports:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def to_second(made: Stage, prompt: str) -> None:
    """Have the second worker cache a prompt: the router decides for it from now on."""
    answer = await ask(made, chat(prompt), **{SUBSET_HEADER: made.endpoints[1]})
    assert answer.headers["x-headwater-worker"] == "w-b"
    await until_cached(made, prompt)


async def until_cached(made: Stage, prompt: str) -> None:
    async with asyncio.timeout(20):
        while (await ask(made, chat(prompt))).headers["x-headwater-worker"] != "w-b":
            await asyncio.sleep(0.05)


@pytest.mark.soak
async def test_a_decision_whose_request_does_not_arrive_counts_no_more(set_up: Stage) -> None:
    """Its client left while the edge had it unread: the picker withdraws it, long before routers would void it."""
    await to_second(set_up, "Unread")
    os.kill(set_up.edge.pid, signal.SIGSTOP)
    try:
        asked = asyncio.create_task(ask(set_up, chat("Unread")))
        async with asyncio.timeout(10):
            while not await set_up.counted():
                await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        async with asyncio.timeout(VOID_AFTER_S * 0.6):
            while await set_up.counted():
                await asyncio.sleep(0.02)
    finally:
        os.kill(set_up.edge.pid, signal.SIGCONT)
    await set_up.idle()


@pytest.mark.soak
async def test_an_edge_that_died_is_replaced_by_the_next_endpoint(set_up: Stage) -> None:
    """Envoy tries the next of the picker's answer, whose edge asks a router again; the picker says that it was another."""
    await to_second(set_up, "Diverted")
    kill(set_up.edge)
    before = await set_up.decisions()
    answer = await ask(set_up, chat("Diverted"))
    assert answer.status_code == 200, answer.text
    # The picker's, and that of the edge.
    assert await set_up.decisions() == before + 2
    logs = [picker.log.read_text() for picker in set_up.pickers]
    assert any(f'"served": "{set_up.endpoints[0]}"' in log.replace('":"', '": "') for log in logs), logs
    set_up.edge.resume()
    await until_healthy(f"http://{set_up.endpoints[1]}", workers=2)


async def test_pickers_that_die(set_up: Stage) -> None:
    """One of two: nothing happens. Both: open, requests go on and an edge decides; closed, they fail until a picker is back."""

    def closes(settings: dict[str, Any]) -> None:
        settings["failure_mode_allow"] = False

    async with (
        envoy(set_up.folder, set_up.edge_ports, set_up.ports, closes) as closed,
        closed.client() as strict,
    ):
        kill(set_up.pickers[0])
        for _ in range(6):
            answer = await ask(set_up, chat("One died"))
            assert answer.status_code == 200, answer.text
        kill(set_up.pickers[1])
        before = await set_up.decisions()
        for _ in range(4):
            answer = await ask(set_up, chat("Both died"))
            assert answer.status_code == 200, answer.text
        assert await set_up.decisions() == before + 4
        refused = await strict.post("/v1/chat/completions", json=chat("Both died"))
        assert refused.status_code >= 500
        for picker in set_up.pickers:
            picker.resume()
        await until_ready(set_up.up.nats, {"picker": 2})
        async with asyncio.timeout(30):
            while (await strict.post("/v1/chat/completions", json=chat("Back"))).status_code != 200:
                await asyncio.sleep(0.1)
