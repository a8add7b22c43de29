"""The Responses API of a real fleet with two edges: the official client over HTTP and WebSocket, tenants, conformance."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import pytest_asyncio
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.support.clients import open_responses
from tests.support.processes.commands import ended
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.processes.restarted import kept_edge

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
MESSAGE_BYTES_MAX = 1024 * 1024


class Edges(NamedTuple):
    """Two edges of one fleet, and the API keys of two tenants."""

    up: FleetProcess
    urls: tuple[str, str]
    keys: tuple[str, str]

    def client(self, edge: int = 0, tenant: int = 0) -> openai.AsyncOpenAI:
        """The official client, without retries of its own."""
        return openai.AsyncOpenAI(
            base_url=f"{self.urls[edge]}/v1", api_key=self.keys[tenant], max_retries=0, timeout=60
        )

    def socket(self, edge: int = 0, key: str | None = None) -> Any:
        """A bare WebSocket."""
        headers = {"authorization": f"Bearer {self.keys[0] if key is None else key}"}
        url = self.urls[edge].replace("http://", "ws://") + "/v1/responses"
        return connect(url, additional_headers=headers, max_size=None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edges(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edges]:
    """A fleet with keys."""
    folder = tmp_path_factory.mktemp("responses")
    flags = ("--auth", "keys", "--http-limits", f"message_bytes_max={MESSAGE_BYTES_MAX}")
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(fleet(folder, "--engine", "sim", "--workers", "1", *flags))
        _, url = await stack.enter_async_context(kept_edge(folder, up.nats, "edge-b", *flags))
        keys = [await _key(up, tenant) for tenant in ("acme", "other")]
        made = Edges(up, (up.url, url), (keys[0], keys[1]))
        await _ready(made)
        yield made


async def _key(up: FleetProcess, tenant: str) -> str:
    run = await ended("keys", "create", "--tenant", tenant, "--nats", up.nats, "--json")
    assert run.code == 0, run.output
    return str(json.loads(run.output)["key"])


async def _ready(edges: Edges) -> None:
    """Both edges serve the model, and know both keys."""
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        for url in edges.urls:
            for key in edges.keys:
                headers = {"authorization": f"Bearer {key}"}
                while True:
                    try:
                        found = await client.get(f"{url}/v1/models", headers=headers)
                        if found.status_code == 200 and found.json()["data"]:
                            break
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.05)


async def test_official_client_streams_and_answers_whole(edges: Edges) -> None:
    async with edges.client() as client:
        whole = await client.responses.create(model="sim", input="Hello.")
        assert whole.status == "completed"
        assert whole.output_text
        async with client.responses.stream(model="sim", input="Hello.") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        counted = await client.responses.input_tokens.count(model="sim", input="Hello.")
        assert whole.usage is not None
        assert counted.input_tokens == whole.usage.input_tokens


async def test_a_chain_continues_at_another_edge_at_once(edges: Edges) -> None:
    async with edges.client(0) as first, edges.client(1) as second:
        previous: str | None = None
        tokens = 0
        for number in range(6):
            client = (first, second)[number % 2]
            events = [
                event
                async for event in await client.responses.create(
                    model="sim",
                    input=f"Turn {number}.",
                    previous_response_id=previous,
                    max_output_tokens=16,
                    stream=True,
                )
            ]
            final: Any = events[-1]
            previous = final.response.id
            assert final.response.usage.input_tokens > tokens
            tokens = final.response.usage.input_tokens
        assert previous is not None
        assert (await second.responses.retrieve(previous)).id == previous
        listed = await second.responses.input_items.list(previous)
        assert [item.type for item in listed.data] == ["message"]
        await first.responses.delete(previous)
        with pytest.raises(openai.NotFoundError):
            await second.responses.retrieve(previous)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await second.responses.create(model="sim", input="x", previous_response_id=previous)


async def test_conversations_by_the_official_client(edges: Edges) -> None:
    async with edges.client(0) as first, edges.client(1) as second:
        made = await first.conversations.create(metadata={"topic": "a"})
        await second.responses.create(model="sim", input="Hello.", conversation=made.id, max_output_tokens=16)
        items = [item async for item in first.conversations.items.list(made.id, order="asc", limit=1)]
        assert [getattr(item, "role", "") for item in items] == ["user", "assistant"]
        assert items[0].id is not None
        await second.conversations.items.delete(items[0].id, conversation_id=made.id)
        left = await first.conversations.items.list(made.id)
        assert [item.id for item in left.data] == [items[1].id]
        changed = await first.conversations.update(made.id, metadata={"topic": "b"})
        assert changed.metadata == {"topic": "b"}
        await first.conversations.delete(made.id)


async def test_another_tenant_sees_nothing(edges: Edges) -> None:
    """Its answers are those for an id that nobody has."""
    async with edges.client() as owner:
        response = await owner.responses.create(model="sim", input="Secret.", max_output_tokens=16)
        conversation = await owner.conversations.create(items=[{"role": "user", "content": "Secret."}])
    nobody = "0" * len(response.id)
    bodies = {
        "POST": {"metadata": {}, "items": [{"role": "user", "content": "x"}]},
        "GET": None,
        "DELETE": None,
    }
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {edges.keys[1]}"}) as other:
        for method, path in (
            ("GET", "responses/{}"),
            ("DELETE", "responses/{}"),
            ("POST", "responses/{}/cancel"),
            ("GET", "responses/{}/input_items"),
            ("GET", "conversations/{}"),
            ("POST", "conversations/{}"),
            ("DELETE", "conversations/{}"),
            ("GET", "conversations/{}/items"),
            ("POST", "conversations/{}/items"),
        ):
            known = response.id if path.startswith("responses") else conversation.id
            answers = [
                await other.request(method, f"{edges.urls[0]}/v1/{path.format(id_)}", json=bodies[method])
                for id_ in (known, nobody)
            ]
            assert [one.status_code for one in answers] == [404, 404]
            assert answers[0].text.replace(known, nobody) == answers[1].text
        for field, known in (("previous_response_id", response.id), ("conversation", conversation.id)):
            found = [
                await other.post(
                    f"{edges.urls[0]}/v1/responses", json={"model": "sim", "input": "x", field: id_}
                )
                for id_ in (known, nobody)
            ]
            assert found[0].status_code == found[1].status_code in (400, 404)
            assert found[0].text.replace(known, nobody) == found[1].text
    async with edges.client() as owner:
        assert (await owner.responses.retrieve(response.id)).id == response.id


async def test_official_client_over_a_websocket(edges: Edges) -> None:
    async with edges.client() as client, client.responses.connect() as connection:
        await connection.response.create(model="sim", input="Hello.", max_output_tokens=16)
        kinds = []
        event: Any
        async for event in connection:
            kinds.append(event.type)
            if event.type == "response.incomplete":
                break
        assert kinds[:2] == ["response.created", "response.in_progress"]
        stored = await client.responses.retrieve(event.response.id)
        assert stored.output_text == event.response.output_text


async def test_streams_of_one_connection_run_at_the_same_time(edges: Edges) -> None:
    limits = ResponsesWebSocketLimits(
        max_lanes=8, max_events_per_lane=4_096, max_events=16_384, max_bytes_per_lane=2**24, max_bytes=2**26
    )
    async with (
        edges.client() as client,
        client.responses.connect(websocket_connection_options={"max_size": None}) as connection,
        AsyncResponsesWebSocketSession(connection, limits=limits) as session,
    ):
        lanes = [session.lane(f"lane-{number}") for number in range(4)]
        for lane in lanes:
            create: Any = {
                "type": "response.create",
                "model": "sim",
                "input": "Hello.",
                "max_output_tokens": 64,
            }
            await lane.send(create)
        finals = await asyncio.gather(*(lane.get_final_response() for lane in lanes))
        assert len({final.id for final in finals}) == 4
        fork: Any = {
            "type": "response.create",
            "model": "sim",
            "input": "More.",
            "previous_response_id": finals[0].id,
            "max_output_tokens": 16,
        }
        await lanes[1].send(fork)
        forked = await lanes[1].get_final_response()
        assert forked.previous_response_id == finals[0].id


async def say(socket: Any, **fields: Any) -> dict[str, Any]:
    """Send one `response.create`; returns the event that ends its answer."""
    await socket.send(json.dumps({"type": "response.create", "model": "sim", "input": "Hello.", **fields}))
    return await last_event(socket)


async def last_event(socket: Any) -> dict[str, Any]:
    """The next event that ends an answer; the events before it are checked."""
    number = 0
    while True:
        event: dict[str, Any] = json.loads(await socket.recv())
        if event["type"] == "error":
            return event
        _EVENT.validate_json(json.dumps(event), strict=True)
        assert event["sequence_number"] == number
        number += 1
        if event["type"] in TERMINAL:
            return event


async def test_different_streams_interleave_and_one_stream_is_in_order(edges: Edges) -> None:
    async with edges.socket() as socket:
        for stream_id in ("a", "b", "a"):
            create = {"type": "response.create", "model": "sim", "input": "Hello.", "max_output_tokens": 200}
            await socket.send(json.dumps({**create, "stream_id": stream_id}))
        order: list[tuple[str, str]] = []
        while sum(kind in TERMINAL for kind, _ in order) < 3:
            event = json.loads(await socket.recv())
            order.append((event["type"], event["stream_id"]))
        ends = [index for index, (kind, _) in enumerate(order) if kind in TERMINAL]
        assert order.index(("response.created", "b")) < ends[0]
        begins = [index for index, one in enumerate(order) if one == ("response.created", "a")]
        first_end = next(index for index in ends if order[index][1] == "a")
        assert begins[0] < first_end < begins[1]


async def test_errors_are_events_and_the_connection_goes_on(edges: Edges) -> None:
    async with edges.socket() as socket:
        for message, code in (
            ("no json", None),
            (json.dumps({"type": "response.create", "model": "sim"}), "missing_required_parameter"),
            (json.dumps({"type": "response.create", "model": "none", "input": "x"}), "model_not_found"),
            (json.dumps({"type": "response.create", "model": "sim", "input": "x", "background": True}), None),
            (
                json.dumps({"type": "response.steer", "previous_response_id": "a", "input": "x"}),
                "unsupported_event",
            ),
            (json.dumps({"type": "response.create", "stream_id": "a b"}), "invalid_stream_id"),
        ):
            await socket.send(message)
            event = await last_event(socket)
            assert event["type"] == "error"
            assert 400 <= event["status"] < 500
            assert code is None or event["error"]["code"] == code
        assert (await say(socket, stream_id="a", max_output_tokens=16))["stream_id"] == "a"
        for number in range(1, 33):
            end = await say(socket, stream_id=f"s{number}", max_output_tokens=1)
        assert end["error"]["code"] == "websocket_stream_limit_reached"


async def test_input_alone_is_stored_without_generating(edges: Edges) -> None:
    async with edges.socket() as socket:
        warm = await say(socket, input="Remember this.", generate=False, store=False)
        assert (warm["type"], warm["response"]["output"]) == ("response.completed", [])
        after = await say(socket, previous_response_id=warm["response"]["id"], max_output_tokens=1)
        alone = await say(socket, max_output_tokens=1)
        assert after["response"]["usage"]["input_tokens"] > alone["response"]["usage"]["input_tokens"]


async def test_a_handshake_needs_a_key_and_the_right_path(edges: Edges) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with edges.socket(key="wrong"):
            pass
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["error"]["code"]
    url = edges.urls[0].replace("http://", "ws://")
    headers = {"authorization": f"Bearer {edges.keys[0]}"}
    with pytest.raises(InvalidStatus) as caught:
        async with connect(f"{url}/v1/models/x", additional_headers=headers):
            pass
    assert caught.value.response.status_code == 404


async def test_large_and_binary_messages_end_the_connection(edges: Edges) -> None:
    for message, code in (("x" * (MESSAGE_BYTES_MAX + 1), 1009), (b"{}", 1003)):
        async with edges.socket() as socket:
            await socket.send(message)
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == code


async def test_a_client_that_leaves_frees_its_request(edges: Edges) -> None:
    async with edges.socket() as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "sim", "input": "Hello."}))
        await socket.recv()
    await edges.up.until(
        "no request runs",
        lambda stats: all(s.get("running", 0) == 0 for s in stats if s["name"] == "headwater-worker"),
    )


async def test_a_draining_edge_ends_running_responses_first(edges: Edges, tmp_path: Path) -> None:
    async with kept_edge(tmp_path, edges.up.nats, "edge-c", "--auth", "keys") as (process, url):
        third = edges._replace(urls=(url, url))
        await _ready(third)
        async with third.socket() as socket:
            await socket.send(
                json.dumps(
                    {"type": "response.create", "model": "sim", "input": "Hello.", "max_output_tokens": 300}
                )
            )
            await socket.recv()
            stopping = asyncio.create_task(process.stop())
            end = await last_event_after(socket)
            assert end["type"] in ("response.completed", "response.incomplete")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1012
            assert await stopping == 0


async def last_event_after(socket: Any) -> dict[str, Any]:
    """The end of an answer whose beginning was read."""
    while True:
        event: dict[str, Any] = json.loads(await socket.recv())
        if event["type"] in (*TERMINAL, "error"):
            return event


NEEDS_MORE_THAN_THE_SIMULATED_MODEL = {"tool-calling": "writes tool calls is not known"}
"""Checks that ask the model for something, and what is wrong without it: to call a tool."""


@pytest.mark.parametrize("name", open_responses.CHECKS)
async def test_open_responses(edges: Edges, name: str) -> None:
    endpoint = open_responses.Endpoint(f"{edges.urls[0]}/v1", edges.keys[0], "sim")
    problems = await open_responses.CHECKS[name](endpoint)
    expected = NEEDS_MORE_THAN_THE_SIMULATED_MODEL.get(name)
    if expected is None:
        assert not problems
    else:
        assert len(problems) == 1
        assert expected in problems[0]
