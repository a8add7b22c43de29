"""Simulated clients: they send requests, read the streams to the end or disconnect, and record what they receive."""

import asyncio
import random
from typing import Any, Final, Literal

import msgspec

from headwater.actors.http.asgi import Headers
from headwater.engines.model_files import byte_tokenizer
from headwater.ops.sim.fleet import SCRIPT, SimFleet, routing_headers
from headwater.ops.sim.images import PICTURES, Picture, answer_shift, data_url
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Reset

PREFIXES: Final = 6
PROMPT_TOKENS_MAX: Final = 200
ANSWER_TOKENS: Final = (1, 56)
LONG_ANSWER_TOKENS: Final = (150, 400)
"""The length of a long answer: at 30 ms per token or more it outlasts several renewals of a lease."""

LONG_SHARE: Final = 0.12
HANG_UP_SHARE: Final = 0.1
IMAGE_SHARE: Final = 0.3
IMAGES_MAX: Final = 3
WORDS: Final = ("", "Look at this. ", "What do these pictures show, and which of them is the brightest one? ")
"""Words before the images: with equal words and images, prompts have their first blocks in common."""

PATIENCE_S: Final = 90.0
"""A stream that does not end within this time hangs: it is longer than all deadlines together."""

TEXT: Final = byte_tokenizer().decode(list(SCRIPT))
"""The script as text: one character per token."""

REFUSED: Final = "The request was refused: "
"""Start of the error for a rejection by a limit of the admission queue."""

End = Literal["open", "stop", "error", "refused", "reset", "hung up", "hangs"]


class ClientEvent(msgspec.Struct):
    """One client's request and the response it received."""

    number: int
    edge: str
    at_s: float
    tokens: int
    seed: int
    streamed: bool
    pictures: tuple[Picture, ...] = ()
    text: str = ""
    finishes: int = 0
    errors: int = 0
    dones: int = 0
    status: int = 0
    end: End = "open"
    ended_s: float = 0.0
    reason: str = ""
    """The error message it received."""
    limited: bool = False
    """It was rejected by a configured limit: a bound of the admission queue, or its own deadline."""

    def expected(self) -> str:
        """The whole answer that the simulated engine generates for this seed and these pictures."""
        first = self.seed + answer_shift(self.pictures)
        return "".join(TEXT[(first + number) % len(TEXT)] for number in range(self.tokens))


class Clients:
    """Sends `count` requests between `from_s` and `until_s`, each in a task of its own.

    With `images`, from which they are drawn, some have images.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        fleet: SimFleet,
        draw: random.Random,
        hints: random.Random | None = None,
        images: random.Random | None = None,
    ) -> None:
        self.sent: list[ClientEvent] = []
        self._loop = loop
        self._fleet = fleet
        self._draw = draw
        self._hints = hints
        self._images = images

    async def run(self, count: int, from_s: float, until_s: float) -> None:
        """Send requests at random times; returns once all have ended."""
        times = sorted(self._draw.uniform(from_s, until_s) for _ in range(count))
        tasks = []
        for at in times:
            await asyncio.sleep(max(0.0, at - self._loop.time()))
            tasks.append(self._loop.create_task(self.send(self._draw.choice(self._fleet.edges))))
        await asyncio.gather(*tasks)

    async def send(self, edge: str, *, patient: bool = False) -> ClientEvent:
        """Send one request. A `patient` client does not disconnect."""
        draw = self._draw
        streamed = draw.random() < 0.8
        record = ClientEvent(
            len(self.sent),
            edge,
            self._loop.time(),
            draw.randint(*(LONG_ANSWER_TOKENS if draw.random() < LONG_SHARE else ANSWER_TOKENS)),
            draw.randrange(1 << 20),
            streamed,
        )
        self.sent.append(record)
        prefix = draw.randrange(PREFIXES)
        prompt = [prefix] * (16 * (1 + prefix)) + [draw.randrange(64) for _ in range(draw.randint(1, 80))]
        record.pictures = self._pictures()
        fields = {
            "model": "sim",
            "max_tokens": record.tokens,
            "seed": record.seed,
            "stream": streamed,
            "ignore_eos": True,
        }
        if record.pictures:
            path, fields["messages"] = "/v1/chat/completions", self._conversation(record.pictures)
        else:
            path, fields["prompt"] = "/v1/completions", prompt[:PROMPT_TOKENS_MAX]
        body = msgspec.json.encode(fields)
        hang_up_at = draw.randint(1, 40) if not patient and draw.random() < HANG_UP_SHARE else 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._read(record, path, body, hang_up_at, self._headers(patient))
        except TimeoutError:
            record.end = "hangs"
        except Reset:
            record.end = "reset"
        record.ended_s = self._loop.time()
        return record

    def _pictures(self) -> tuple[Picture, ...]:
        draw = self._images
        if draw is None or draw.random() >= IMAGE_SHARE:
            return ()
        return tuple(draw.choices(PICTURES, k=draw.randint(1, IMAGES_MAX)))

    def _conversation(self, pictures: tuple[Picture, ...]) -> list[dict[str, Any]]:
        assert self._images is not None
        words = {"type": "text", "text": self._images.choice(WORDS)}
        images = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
        return [{"role": "user", "content": [words, *images, {"type": "text", "text": "Well?"}]}]

    def _headers(self, patient: bool) -> Headers:
        return routing_headers(self._hints) if self._hints is not None and not patient else []

    async def _read(
        self, record: ClientEvent, path: str, body: bytes, hang_up_at: int, headers: Headers
    ) -> None:
        server = self._fleet.servers.get(record.edge)
        if server is None:
            raise Reset
        connection = server.connect(path, body, headers)
        parts = 0
        data = b""
        try:
            while (part := await connection.part()) is not None:
                record.status = connection.status
                parts += 1
                if record.streamed and record.status == 200:
                    data += part
                    *events, data = data.split(b"\n\n")
                    for event in events:
                        _take_event(record, event)
                else:
                    data += part
                if parts == hang_up_at:
                    record.end = "hung up"
                    return
        finally:
            connection.hang_up()
        record.status = connection.status
        if record.status != 200:
            record.end = "refused"
            failure = msgspec.json.decode(data)["error"] if data else {}
            record.reason = failure.get("message", "")
            record.limited = record.reason.startswith(REFUSED)
        elif not record.streamed:
            [choice] = msgspec.json.decode(data)["choices"]
            text = choice["message"]["content"] if record.pictures else choice["text"]
            record.text, record.finishes, record.end = text, 1, "stop"
        else:
            record.end = "error" if record.errors else "stop"


def _take_event(record: ClientEvent, event: bytes) -> None:
    if not event.startswith(b"data: "):
        return
    payload = event[6:]
    if payload == b"[DONE]":
        record.dones += 1
        return
    document = msgspec.json.decode(payload)
    if "error" in document:
        record.errors += 1
        record.reason = document["error"]["message"]
        return
    for choice in document["choices"]:
        record.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        record.finishes += 1 if choice.get("finish_reason") else 0
