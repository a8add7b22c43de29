"""A running edge: what an image of 20 MB does to the streams of other clients, by each API that it may come through.

The edge runs in this process, so that a probe on its event loop sees what its thread computes at once; it is a real one, of a fleet
of simulated engines, over HTTP. Its clients are two processes: one reads streams of one worker, the other sends images to the
other worker, one at a time, each of other pixels. The engines share no step, so whatever delays a stream is the edge, or a machine
with too few cores.
"""

import asyncio
import base64
import http.client
import multiprocessing
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec

from headwater.ops.bench.report import Measure, percentile
from headwater.ops.config.processes import EdgeProcess, with_settings
from headwater.ops.config.sections import NatsSettings
from headwater.ops.launch.up import temporary_fleet
from headwater.ops.start.edge import run_edge
from headwater.ops.start.sockets import free_port
from tests.bench.media.event_loop import GAP_MS_TARGET, LoopProbe
from tests.bench.media.picture import large_png

STREAMS: Final = 8
ROUNDS: Final = 8
PAUSE_S: Final = 0.3
"""Between two images."""

QUIET_S: Final = 6.0
"""Without any image: about as long as those of one API are in flight."""

READY_S: Final = 60.0
CLIENTS_S: Final = 300.0
STREAM_WORKER, IMAGE_WORKER = "worker-0", "worker-1"
NO_IMAGE: Final = "no image"


class Span(NamedTuple):
    """What an image came through, or `NO_IMAGE`, from when until when (`time.perf_counter`)."""

    form: str
    begin_s: float
    end_s: float


class TimedValue(NamedTuple):
    """What ended at `at_s` and lasted, or took, so many seconds."""

    at_s: float
    seconds: float


async def measure() -> list[Measure]:
    """The longest gap between tokens, and the most that the edge's thread computed at once, in each phase."""
    async with (
        temporary_fleet({"fleet.workers": 2}) as fleet,
        _edge(fleet.nats) as port,
        LoopProbe() as probe,
    ):
        gaps, spans = await asyncio.to_thread(_clients, port)
    turns = [TimedValue(at, cpu) for at, cpu in zip(probe.at_s, probe.cpu_s, strict=True)]
    late = [TimedValue(at, late) for at, late in zip(probe.at_s, probe.late_s, strict=True)]
    measures: list[Measure] = []
    longest = {form: 1000 * max(within(gaps, spans, form)) for form in (NO_IMAGE, *FORMS)}
    for form in (NO_IMAGE, *FORMS):
        shown = form if form == NO_IMAGE else f"image by {form}"
        found = within(gaps, spans, form)
        measures += [
            Measure(f"edge, {shown}: token gap, p50", 1000 * percentile(found, 0.5), "ms"),
            Measure(f"edge, {shown}: token gap, longest", longest[form], "ms"),
            Measure(f"edge, {shown}: event loop, longest gap", 1000 * max(within(late, spans, form)), "ms"),
            Measure(
                f"edge, {shown}: most CPU of the loop at once", 1000 * max(within(turns, spans, form)), "ms"
            ),
        ]
        if form != NO_IMAGE:
            took_s = [span.end_s - span.begin_s for span in spans if span.form == form]
            delay_ms = longest[form] - longest[NO_IMAGE]
            measures += [
                Measure(f"edge, {shown}: delay of other streams", delay_ms, "ms", f"< {GAP_MS_TARGET}"),
                Measure(f"edge, {shown}: time to the answer, p50", 1000 * percentile(took_s, 0.5), "ms"),
            ]
    return measures


def within(values: Sequence[TimedValue], spans: Sequence[Span], form: str) -> list[float]:
    """The seconds of those that lasted at some moment of a span of this form."""
    own = [span for span in spans if span.form == form]
    return [
        value.seconds
        for value in values
        if any(value.at_s >= span.begin_s and value.at_s - value.seconds <= span.end_s for span in own)
    ]


@asynccontextmanager
async def _edge(nats: NatsSettings) -> AsyncIterator[int]:
    """An edge in this process, on a port."""
    port, stop = free_port(0), asyncio.Event()
    settings = with_settings(
        EdgeProcess(nats=nats),
        {"http.port": port, "metrics.port": 0, "edge.client.policies": ("direct",), "name": "bench"},
    )
    serving = asyncio.create_task(run_edge(settings, stop))
    try:
        async with asyncio.timeout(READY_S):
            while not serving.done() and await asyncio.to_thread(_status, port) != 200:
                await asyncio.sleep(0.05)
        yield port
    finally:
        stop.set()
        await serving


def _status(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _clients(port: int) -> tuple[list[TimedValue], list[Span]]:
    """Gaps between tokens, and when images were in flight, by two processes."""
    context = multiprocessing.get_context("spawn")
    flows, ended, results = context.Event(), context.Event(), context.Queue()
    processes = [
        context.Process(target=_read_streams, args=(port, flows, ended, results), daemon=True),
        context.Process(target=_send_images, args=(port, flows, ended, results), daemon=True),
    ]
    for process in processes:
        process.start()
    found: dict[str, Any] = {}
    until_s = time.perf_counter() + CLIENTS_S
    try:
        while len(found) < len(processes):
            try:
                found.update([results.get(timeout=1.0)])
            except queue.Empty:
                if any(process.exitcode for process in processes) or time.perf_counter() > until_s:
                    raise RuntimeError("a client of the benchmark failed") from None
    finally:
        ended.set()
        for process in processes:
            process.join(10)
    return [TimedValue(*one) for one in found["gaps"]], [Span(*one) for one in found["spans"]]


def _read_streams(port: int, flows: Any, ended: Any, results: Any) -> None:
    """A process: reads all streams until the images were sent."""
    gaps: list[TimedValue] = []

    async def run() -> None:
        begun = 0

        async def one(number: int) -> None:
            nonlocal begun
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            text = f"Stream {number}."
            fields = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
            body = msgspec.json.encode(
                {"model": "sim", "messages": [{"role": "user", "content": text}], **fields}
            )
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}x-headwater-worker: {STREAM_WORKER}\r\n\r\n".encode() + body)
            await reader.readuntil(b'"content":"')
            last_s = time.perf_counter()
            begun += 1
            if begun == STREAMS:
                flows.set()
            while not ended.is_set():
                if not await reader.read(1 << 16):
                    raise RuntimeError("a stream ended before the measurement")
                now_s = time.perf_counter()
                gaps.append(TimedValue(now_s, now_s - last_s))
                last_s = now_s
            writer.close()

        await asyncio.gather(*(one(number) for number in range(STREAMS)))

    asyncio.run(run())
    results.put(("gaps", [tuple(gap) for gap in gaps]))


def _send_images(port: int, flows: Any, ended: Any, results: Any) -> None:
    """A process: nothing for a time, then images by each API."""
    flows.wait(READY_S)
    # One of each, so that all is imported and started.
    for form in FORMS:
        _send(port, form, FORMS[form](large_png(0)))
    began_s = time.perf_counter()
    time.sleep(QUIET_S)
    spans = [Span(NO_IMAGE, began_s, time.perf_counter())]
    for form, body_of in FORMS.items():
        for number in range(1, ROUNDS + 1):
            body = body_of(large_png(number))
            time.sleep(PAUSE_S)
            began_s = time.perf_counter()
            _send(port, form, body)
            spans.append(Span(form, began_s, time.perf_counter()))
    ended.set()
    results.put(("spans", [tuple(span) for span in spans]))


def _send(port: int, form: str, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S)
    headers = {"content-type": "application/json", "x-headwater-worker": IMAGE_WORKER}
    connection.request("POST", PATHS[form], body, headers)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{form}: {response.status}: {answer[:500]!r}")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _chat(data: bytes) -> bytes:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(data)}"}}
    return msgspec.json.encode(
        {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
    )


def _responses(data: bytes) -> bytes:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{_base64(data)}"}
    return msgspec.json.encode(
        {"model": "sim", "max_output_tokens": 1, "input": [{"role": "user", "content": [image]}]}
    )


def _messages(data: bytes) -> bytes:
    source = {"type": "base64", "media_type": "image/png", "data": _base64(data)}
    content = [{"type": "image", "source": source}]
    return msgspec.json.encode(
        {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    )


FORMS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "chat": _chat,
    "Responses": _responses,
    "Anthropic": _messages,
}
PATHS: Final = {"chat": "/v1/chat/completions", "Responses": "/v1/responses", "Anthropic": "/v1/messages"}
