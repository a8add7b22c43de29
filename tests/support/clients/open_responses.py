"""The 17 checks of Open Responses' compliance suite, written again from its schema: 10 over HTTP, 7 over WebSocket.

The schema is the one that llm-comply contains. Its requests are those of the suite; a check returns what is wrong.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import httpx
from llm_comply import schema
from websockets.asyncio.client import ClientConnection, connect

IMAGE: Final = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TERMINAL: Final = ("response.completed", "response.incomplete", "response.failed")
_SPEC = schema.SpecLoader(str(schema._BUNDLED_SPEC))

Document = dict[str, Any]
Problems = list[str]


class Endpoint(NamedTuple):
    """The server under test."""

    base_url: str
    key: str
    model: str

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.key}"}

    async def post(self, path: str, body: Document) -> httpx.Response:
        """One request."""
        async with httpx.AsyncClient(timeout=60, headers=self.headers) as client:
            return await client.post(f"{self.base_url}{path}", json=body)

    def socket(self) -> Any:
        """A WebSocket."""
        url = self.base_url.replace("http", "ws", 1) + "/responses"
        return connect(url, additional_headers=self.headers, max_size=None)


Check = Callable[[Endpoint], Awaitable[Problems]]


def invalid(document: Any, name: str) -> Problems:
    """What an object violates of the schema."""
    return list(_SPEC.validate(document, name))


def user(text: str) -> Document:
    """A user's message."""
    return {"type": "message", "role": "user", "content": text}


def incomplete(response: Document | None, *types: str) -> Problems:
    """What a whole response lacks: a valid form, status completed, output of these types."""
    if response is None:
        return ["there is no whole response"]
    found = invalid(response, "ResponseResource")
    if response.get("status") != "completed":
        found.append(f"status is {response.get('status')}")
    if not response.get("output"):
        found.append("there is no output")
    missing = set(types) - {item["type"] for item in response.get("output", ())}
    return found + [f"no item of type {kind}" for kind in sorted(missing)]


def _whole(*types: str, **fields: Any) -> Check:
    async def check(endpoint: Endpoint) -> Problems:
        answer = await endpoint.post("/responses", {"model": endpoint.model, **fields})
        if answer.status_code != 200:
            return [f"HTTP {answer.status_code}: {answer.text[:300]}"]
        return incomplete(answer.json(), *types)

    return check


async def _streaming(endpoint: Endpoint) -> Problems:
    body = {"model": endpoint.model, "input": [user("Count from 1 to 5.")], "stream": True}
    answer = await endpoint.post("/responses", body)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    found = [problem for event in events for problem in _SPEC.validate_sse_event(event["type"], event)]
    final = events[-1].get("response") if events and events[-1]["type"] in TERMINAL else None
    return found + incomplete(final)


async def _compact(endpoint: Endpoint) -> Problems:
    body = {
        "model": endpoint.model,
        "prompt_cache_key": "compact",
        "input": [
            user("We agreed to launch on Tuesday and notify support first."),
            {"type": "message", "role": "assistant", "content": "Understood: Tuesday, support first."},
        ],
    }
    answer = await endpoint.post("/responses/compact", body)
    found = invalid(answer.json(), "CompactResource")
    kinds = [item["type"] for item in answer.json().get("output", ())]
    return found if "compaction" in kinds else [*found, f"no compaction among {kinds}"]


async def _compact_without_model(endpoint: Endpoint) -> Problems:
    answer = await endpoint.post("/responses/compact", {"input": [user("Compact this.")]})
    return [] if answer.status_code in (400, 422) else [f"HTTP {answer.status_code}"]


async def _phase_schema(endpoint: Endpoint) -> Problems:
    """The suite checks its own fixture; here a stored response, whose input has both phases, is read back."""
    history = [
        {"type": "message", "role": "assistant", "phase": phase, "content": "Four."}
        for phase in ("commentary", "final_answer")
    ]
    made = await endpoint.post(
        "/responses", {"model": endpoint.model, "input": [*history, user("Repeat it.")]}
    )
    async with httpx.AsyncClient(headers=endpoint.headers) as client:
        path = f"{endpoint.base_url}/responses/{made.json()['id']}/input_items"
        items = (await client.get(path, params={"order": "asc"})).json()["data"]
    found = [problem for item in items for problem in invalid(item, "ItemField")]
    phases = [item.get("phase") for item in items]
    return found if phases == ["commentary", "final_answer", None] else [*found, f"phases are {phases}"]


class Turn(NamedTuple):
    """The answer to one message: the whole response or an error's code, and violations of the schema."""

    response: Document | None
    error: str | None
    problems: Problems


async def say(socket: ClientConnection, endpoint: Endpoint, **fields: Any) -> Turn:
    """One `response.create`, which is not stored, and its answer."""
    message = {"type": "response.create", "model": endpoint.model, "store": False, **fields}
    await socket.send(json.dumps(message))
    problems: Problems = []
    while True:
        event = json.loads(await socket.recv())
        if event["type"] == "error":
            return Turn(None, event["error"]["code"], problems + invalid(event, "WebSocketErrorEvent"))
        problems += _SPEC.validate_sse_event(event["type"], event)
        if event["type"] in TERMINAL:
            return Turn(event["response"], None, problems)


def _good(turn: Turn) -> Problems:
    return turn.problems + ([f"error {turn.error}"] if turn.error else incomplete(turn.response))


def _not_found(turn: Turn) -> Problems:
    expected = "previous_response_not_found"
    return turn.problems + ([] if turn.error == expected else [f"expected {expected}, got {turn.error}"])


async def _socket_response(endpoint: Endpoint) -> Problems:
    async with endpoint.socket() as socket:
        return _good(await say(socket, endpoint, input=[user("Count from 1 to 3.")], store=True))


async def _socket_sequential(endpoint: Endpoint) -> Problems:
    async with endpoint.socket() as socket:
        return [
            problem
            for word in ("first", "second")
            for problem in _good(await say(socket, endpoint, input=f"Reply with exactly: {word}"))
        ]


async def _socket_continuation(endpoint: Endpoint) -> Problems:
    async with endpoint.socket() as socket:
        first = await say(socket, endpoint, input="Remember the code word: cobalt.")
        previous = (first.response or {}).get("id")
        second = await say(socket, endpoint, previous_response_id=previous, input="What is the code word?")
        return _good(first) + _good(second)


async def _socket_reconnect(endpoint: Endpoint) -> Problems:
    async with endpoint.socket() as socket:
        first = await say(socket, endpoint, input="Remember the code word: copper.")
    previous = (first.response or {}).get("id")
    async with endpoint.socket() as socket:
        lost = await say(socket, endpoint, previous_response_id=previous, input="Continue.")
        again = await say(socket, endpoint, input=[user("Start again.")])
    return _good(first) + _not_found(lost) + _good(again)


async def _socket_unknown(endpoint: Endpoint) -> Problems:
    async with endpoint.socket() as socket:
        return _not_found(await say(socket, endpoint, previous_response_id="resp_missing_12345", input="x"))


async def _socket_eviction(endpoint: Endpoint) -> Problems:
    result = {"type": "function_call_output", "call_id": "call_missing", "output": "Nobody called."}
    async with endpoint.socket() as socket:
        first = await say(socket, endpoint, input="Remember the code word: ember.")
        previous = (first.response or {}).get("id")
        failed = await say(socket, endpoint, previous_response_id=previous, input=[result])
        again = await say(socket, endpoint, previous_response_id=previous, input="Continue.")
    found = _good(first) + failed.problems + _not_found(again)
    return found if failed.error else [*found, "a result without a call was accepted"]


async def _socket_compacted(endpoint: Endpoint) -> Problems:
    history = [
        user("Remember the code word: slate."),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "OK."}]},
    ]
    compacted = await endpoint.post("/responses/compact", {"model": endpoint.model, "input": history})
    async with endpoint.socket() as socket:
        items = [*compacted.json()["output"], user("Continue from here.")]
        return _good(await say(socket, endpoint, input=items, tools=[]))


WEATHER: Final = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city"}},
        "required": ["location"],
    },
}

CHECKS: Final[dict[str, Check]] = {
    "basic-response": _whole(input=[user("Say hello in exactly 3 words.")]),
    "assistant-phase": _whole(
        input=[
            {"type": "message", "role": "assistant", "phase": "commentary", "content": "I should answer."},
            {"type": "message", "role": "assistant", "phase": "final_answer", "content": "Four."},
            user("Repeat only the number."),
        ]
    ),
    "response-output-phase-schema": _phase_schema,
    "streaming-response": _streaming,
    "system-prompt": _whole(
        input=[{"type": "message", "role": "system", "content": "You are a pirate."}, user("Say hello.")]
    ),
    "tool-calling": _whole("function_call", input=[user("What is the weather like?")], tools=[WEATHER]),
    "image-input": _whole(
        input=[
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What do you see in this image?"},
                    {"type": "input_image", "image_url": IMAGE},
                ],
            }
        ]
    ),
    "multi-turn": _whole(
        input=[
            user("My name is Alice."),
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            user("What is my name?"),
        ]
    ),
    "compact-response": _compact,
    "compact-missing-model": _compact_without_model,
    "websocket-response": _socket_response,
    "websocket-sequential-responses": _socket_sequential,
    "websocket-continuation": _socket_continuation,
    "websocket-reconnect-store-false-recovery": _socket_reconnect,
    "websocket-previous-response-not-found": _socket_unknown,
    "websocket-failed-continuation-evicts-cache": _socket_eviction,
    "websocket-compact-new-chain": _socket_compacted,
}
