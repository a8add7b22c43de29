"""Large and costly request bodies: refused in time, while streams go on, in bounded memory."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.clients import raw_http
from tests.support.marks import CLIENTS
from tests.support.processes.fleet import FleetProcess, fleet, shared_fleet

pytestmark = [*CLIENTS, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MB = 1_000_000
ANSWER_S = 8.0
"""Also for sending 60 MB on a machine with other work, where four such bodies at once have taken 6.3 s."""

GAP_S = 0.3
LOOP_S = 0.01
TRIES = 3
"""A body that stalls a stream does so each time, other work on the machine does not."""

GROWTH_MAX = 2.0
IN_FLIGHT_BYTES_MAX = 400 * MB
HELD = 14
HOLD_S = 6.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def listed(field: str, item: bytes, size: int = 60 * MB) -> bytes:
    """A body of `size` bytes whose `field` is a list of the same item."""
    count = size // (len(item) + 1)
    return b'{"model":"sim","prompt":"a","max_tokens":1,"' + field.encode() + b'":[' + _repeat(item, count)


def _repeat(item: bytes, count: int) -> bytes:
    return (item + b",") * (count - 1) + item + b"]}"


def _prompt(item: bytes) -> bytes:
    return b'{"model":"sim","max_tokens":1,"prompt":[' + _repeat(item, 60 * MB // (len(item) + 1))


def _messages() -> bytes:
    message = b'{"role":"user","content":""}'
    return b'{"model":"sim","max_tokens":1,"messages":[' + _repeat(message, 60 * MB // len(message))


def _control_tokens() -> bytes:
    said = b'{"role":"user","content":"' + b"<|im_start|>" * 125_000 + b'"}'
    return b'{"model":"sim","max_tokens":1,"messages":[' + said + b"]}"


def _parts() -> bytes:
    part = b'{"type":"text","text":""}'
    inner = (part + b",") * (50 * MB // len(part)) + part
    return b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":[' + inner + b"]}]}"


def _text(piece: bytes) -> bytes:
    return b'{"model":"sim","max_tokens":1,"prompt":"' + piece * (60 * MB // len(piece)) + b'"}'


def _field(name: str, value: bytes) -> bytes:
    return b'{"model":"sim","prompt":"a","max_tokens":1,"' + name.encode() + b'":' + value + b"}"


def _biases() -> bytes:
    return _field("logit_bias", b"{" + b",".join(b'"%d":1' % number for number in range(4_000_000)) + b"}")


def _schema() -> bytes:
    properties = b",".join(b'"p%d":{"type":"string"}' % number for number in range(1_500_000))
    schema = b'{"type":"object","properties":{' + properties + b"}}"
    return _field("structured_outputs", b'{"json":' + schema + b"}")


def _deep(opening: bytes, closing: bytes, levels: int) -> bytes:
    return _field("guided_json", opening * levels + b"1" + closing * levels)


SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompts of one token": (COMPLETIONS, lambda: _prompt(b"[1]")),
    "one long prompt of tokens": (COMPLETIONS, lambda: _prompt(b"1")),
    "empty prompts": (COMPLETIONS, lambda: _prompt(b'""')),
    "one long prompt of text": (COMPLETIONS, lambda: _text(b"river ")),
    "one long prompt of escapes": (COMPLETIONS, lambda: _text(rb"\u00e9")),
    "pairs of escapes": (COMPLETIONS, lambda: _text(rb"\ud83d\ude00")),
    "a text of 10 MB": (COMPLETIONS, lambda: _field("prompt", b'"' + b"river " * 1_650_000 + b'"')),
    "control tokens in a message": (CHAT, _control_tokens),
    "messages": (CHAT, _messages),
    "parts of one message": (CHAT, _parts),
    "stop strings": (COMPLETIONS, lambda: listed("stop", b'"a"')),
    "stop tokens": (COMPLETIONS, lambda: listed("stop_token_ids", b"1")),
    "choices": (COMPLETIONS, lambda: listed("guided_choice", b'"a"', 8 * MB)),
    "biases": (COMPLETIONS, _biases),
    "a schema": (COMPLETIONS, _schema),
    "tools": (CHAT, lambda: _chat(listed("tools", b"{}"))),
    "an unknown field": (COMPLETIONS, lambda: listed("unknown", b"[]")),
    "a removed field": (COMPLETIONS, lambda: listed("extra_body", b'{"rid":1}')),
    "deep lists": (COMPLETIONS, lambda: _deep(b"[", b"]", 20 * MB)),
    "deep objects": (COMPLETIONS, lambda: _deep(b'{"a":', b"}", 9 * MB)),
    "many digits": (COMPLETIONS, lambda: _field("guided_json", b"1" * (50 * MB))),
    "numbers of many digits": (COMPLETIONS, lambda: listed("guided_json", b"1" * 4_000)),
    "a fraction of many digits": (COMPLETIONS, lambda: _field("temperature", b"0." + b"1" * (50 * MB))),
}
"""Path and body; most have about 60 MB, which is within the body limit, some less than is easily seen to be too much."""


SIMILAR = frozenset(
    {
        "one long prompt of tokens",
        "empty prompts",
        "one long prompt of escapes",
        "parts of one message",
        "stop strings",
        "choices",
        "tools",
        "an unknown field",
        "deep lists",
        "numbers of many digits",
    }
)
"""Shapes that are refused where another one is: in the long form only."""


AT_ONCE = frozenset({"prompts of one token", "messages", "stop tokens", "biases"})
"""Shapes that are costly, of which every run sends all at the same time; in the long form each by itself, too."""


HARMLESS = ("a fraction of many digits",)
"""What may be served as well, as long as nobody waits for it."""


def _chat(body: bytes) -> bytes:
    return body.replace(b'"prompt":"a"', b'"messages":[{"role":"user","content":"a"}]', 1)


up = shared_fleet("--engine", "sim", "--workers", "1", "--http-limits", f"body_bytes_max={64 * 1024 * 1024}")
"""One simulated worker behind an edge that takes bodies of 64 MiB: their size alone refuses none of them."""


def edge_bytes(up: FleetProcess) -> int:
    """Resident memory of the edge."""
    [pid] = up.pids(" edge ")
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stream:
    """A running stream's text and its longest gap between tokens, from the first token on.

    What this process was late itself, because of the bodies that it sends or of other work on the machine, is none of
    the gap. Nor is time in which the edge had no processor: a body that stalls it does so by computing.
    """

    def __init__(self, edge: psutil.Process) -> None:
        self._edge = edge
        self._last_cpu_s = 0.0
        self.tokens = 0
        self.gap_s = 0.0
        self.begun = asyncio.Event()
        self._last_s = 0.0
        self._late_s = 0.0

    def note(self, document: dict[str, Any]) -> None:
        """Count a chunk."""
        assert "error" not in document, document
        if self.tokens:
            self.gap_s = max(self.gap_s, self._since_last_s())
        self.tokens += 1
        self._last_s, self._last_cpu_s = time.monotonic(), self._edge_cpu_s()
        self.begun.set()

    def _since_last_s(self) -> float:
        return min(time.monotonic() - self._last_s, self._edge_cpu_s() - self._last_cpu_s)

    def _edge_cpu_s(self) -> float:
        used = self._edge.cpu_times()
        return float(used.user + used.system)

    def take_gap(self) -> float:
        """The longest gap since the last call, that which still lasts included."""
        gap, self.gap_s = max(self.gap_s, self._since_last_s()), 0.0
        late, self._late_s = self._late_s, 0.0
        return gap - late

    async def watch_loop(self) -> None:
        """Note how late this process's event loop runs, until cancelled."""
        while True:
            due = time.monotonic() + LOOP_S
            await asyncio.sleep(LOOP_S)
            self._late_s = max(self._late_s, time.monotonic() - due)


@asynccontextmanager
async def streaming(up: FleetProcess) -> AsyncIterator[Stream]:
    """A stream that runs during the block."""
    [pid] = up.pids(" edge ")
    stream = Stream(psutil.Process(pid))

    async def run() -> None:
        body = {"model": "sim", "prompt": "hello there", "max_tokens": 100_000, "ignore_eos": True}
        async with raw_http.connection(up.url) as client:
            await client.send(raw_http.request(msgspec.json.encode({**body, "stream": True}), COMPLETIONS))
            status, _ = await client.head()
            assert status == 200
            async for chunk in client.chunks():
                for line in chunk.splitlines():
                    if line.startswith(b"data: {"):
                        stream.note(msgspec.json.decode(line[6:]))
        raise AssertionError("the stream ended")

    watching = asyncio.create_task(stream.watch_loop())
    running = asyncio.create_task(run())
    begun = asyncio.create_task(stream.begun.wait())
    try:
        await asyncio.wait({running, begun}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert stream.begun.is_set()
        yield stream
        assert not running.done(), running
    finally:
        for task in (running, begun, watching):
            task.cancel()
        await asyncio.gather(running, begun, watching, return_exceptions=True)


def refused_well(answer: raw_http.Answer, statuses: tuple[int, ...]) -> None:
    """Assert that it is one of these statuses with an OpenAI error object."""
    assert answer.status in statuses, (answer.status, answer.body[:500])
    error = answer.error()
    assert len(error["message"]) <= 2_000
    if answer.status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1


async def small_answer_s(up: FleetProcess) -> float:
    """Seconds until another client has the answer to a small request."""
    body = msgspec.json.encode({"model": "sim", "prompt": "a", "max_tokens": 2})
    began = time.monotonic()
    async with raw_http.connection(up.url, source="127.0.0.2") as other:
        await other.send(raw_http.request(body, COMPLETIONS))
        assert (await other.answer(within_s=20)).status == 200
    return time.monotonic() - began


@pytest.mark.parametrize(
    "names",
    [SHAPES.keys() - SIMILAR - AT_ONCE, pytest.param(SIMILAR | AT_ONCE, marks=pytest.mark.soak)],
    ids=["each", "similar"],
)
async def test_no_body_stalls_a_stream(up: FleetProcess, names: Set[str]) -> None:
    """Each shape is refused in time; a stream beside it keeps its pace, the edge its lease and its size."""
    before = edge_bytes(up)
    faults: list[str] = []
    async with streaming(up) as stream:
        for name in sorted(names):
            path, make = SHAPES[name]
            body = await asyncio.to_thread(make)
            for _ in range(TRIES):
                await asyncio.sleep(0)
                stream.take_gap()
                answer, seconds = await raw_http.post_large(up.url, body, path, 60)
                gap = stream.take_gap()
                if gap <= GAP_S and seconds <= ANSWER_S:
                    break
            del body
            status = answer.status if answer is not None else 0
            if status == 200 and name in HARMLESS:
                pass
            elif status not in (400, 413):
                faults.append(f"{name}: status {status} {answer.body[:200] if answer else ''!r}")
            elif answer is not None:
                refused_well(answer, (400, 413))
            if seconds > ANSWER_S:
                faults.append(f"{name}: answered after {seconds:.1f} s")
            if gap > GAP_S:
                faults.append(f"{name}: the stream had a gap of {gap:.2f} s")
    after = edge_bytes(up)
    if after > GROWTH_MAX * before:
        faults.append(f"the edge grew from {before / MB:.0f} to {after / MB:.0f} MB")
    if b'"lease_lost"' in up.log.read_bytes():
        faults.append("a lease was lost")
    assert not faults, "\n".join(faults)


async def test_costly_bodies_at_once_do_not_stall_a_stream(up: FleetProcess) -> None:
    """Four at a time: each is refused, and the stream beside them keeps its pace."""
    bodies = [(SHAPES[name][0], await asyncio.to_thread(SHAPES[name][1])) for name in sorted(AT_ONCE)]
    async with streaming(up) as stream:
        for _ in range(TRIES):
            stream.take_gap()
            timed = await asyncio.gather(
                *(raw_http.post_large(up.url, body, path, 60) for path, body in bodies)
            )
            gap, slowest_s = stream.take_gap(), max(seconds for _, seconds in timed)
            for answer, _ in timed:
                assert answer is not None
                refused_well(answer, (400, 413, 429, 503))
            if gap < 2 * GAP_S and slowest_s < 2 * ANSWER_S:
                break
    assert slowest_s < 2 * ANSWER_S
    assert gap < 2 * GAP_S
    assert b'"lease_lost"' not in up.log.read_bytes()


async def test_bytes_in_flight_are_bounded_over_all_connections(up: FleetProcess) -> None:
    """Many large bodies that never end do not add up: beyond a bound they are refused, and others are served."""
    body = await asyncio.to_thread(_text, b"river ")
    head = raw_http.request(b"", COMPLETIONS, length=str(len(body)))
    before = edge_bytes(up)
    parts: list[raw_http.Part] = [head, memoryview(body)[:-1]]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(HELD) as threads:
        held = asyncio.gather(
            *(
                loop.run_in_executor(
                    threads, raw_http.exchange, up.url, parts, HOLD_S, f"127.0.0.{10 + number}"
                )
                for number in range(HELD)
            )
        )
        most, served_s = before, 0.0
        while not held.done():
            await asyncio.wait({held}, timeout=0.05)
            most = max(most, edge_bytes(up))
            if not served_s and most > before + 50 * MB:
                served_s = await small_answer_s(up)
        served_s = max(served_s, await small_answer_s(up))
    answers = [timed.answer for timed in held.result() if timed.answer is not None]
    for answer in answers:
        refused_well(answer, (413, 429, 503))
    assert answers
    assert served_s < ANSWER_S
    assert most - before < IN_FLIGHT_BYTES_MAX
    # What was held is given back: a body of the same size is taken again.
    again, _ = await raw_http.post_large(up.url, b'{"model":"sim"' + b" " * MB + b"}", COMPLETIONS, 20)
    assert again is not None
    refused_well(again, (400,))


async def test_the_body_limit_is_the_operators(tmp_path: Path) -> None:
    """413 beyond `body_bytes_max` of `--http-limits`, before the body was sent where its length is told, and while it is sent where not."""
    limit = 100_000
    async with fleet(
        tmp_path, "--engine", "sim", "--workers", "1", "--http-limits", f"body_bytes_max={limit}"
    ) as up:
        text = "a" * (limit - 1_000)
        body = msgspec.json.encode({"model": "sim", "prompt": text, "max_tokens": 2})
        async with raw_http.connection(up.url) as within:
            await within.send(raw_http.request(body))
            assert (await within.answer()).status == 200
        async with raw_http.connection(up.url) as told:
            await told.send(raw_http.request(b"", length=str(limit + 1)))
            answer = await told.answer(within_s=ANSWER_S)
            refused_well(answer, (413,))
            assert str(limit) in answer.error()["message"]
        async with raw_http.connection(up.url) as untold:
            await untold.send(raw_http.request(b"", headers=[("transfer-encoding", "chunked")], length=""))
            chunk = b"%x\r\n" % 10_000 + b" " * 10_000 + b"\r\n"
            sending = asyncio.create_task(untold.send(chunk * 12))
            refused_well(await untold.answer(within_s=ANSWER_S), (413,))
            await sending
