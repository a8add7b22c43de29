"""`headwater bench edge --long-prompt`: what very long prompts do to the streams of other clients, and to probes.

Streams run on one worker while another process sends long prompts for the other worker, so that the two share the edge
but no engine. Three phases of the same length: nothing else, prompts of 128 k tokens, bodies of 30 MB, which are refused
once they were read and decoded.
"""

import asyncio
import http.client
import multiprocessing
import multiprocessing.synchronize
import time
from typing import Final, NamedTuple

from headwater.ops.bench.report import Measure, Report, chat_body, percentile
from headwater.ops.launch.up import temporary_fleet

STREAMS: Final = 16
PHASE_S: Final = 8.0
PAUSE_S: Final = 0.1
"""The pause between two long prompts, so that each is seen on its own."""

PROBE_PAUSE_S: Final = 0.01

LONG_CHARACTERS: Final = 130_000
"""The simulated model has a token for each byte."""

HUGE_BYTES: Final = 30 * 1024 * 1024
TEXT: Final = "Every block that is stored becomes an event, and <b>every</b> event is read in order. "

STREAM_WORKER, PROMPT_WORKER = "worker-0", "worker-1"
GOAL_MS: Final = 20.0


class Gaps(NamedTuple):
    """Seconds between tokens of all streams, of probes on the metrics port and of probes on the edge's own port."""

    tokens: list[float]
    probes: list[float]
    own_probes: list[float]


async def bench() -> Report:
    """Largest gaps in each phase."""
    settings = {"fleet.workers": 2, "edge.client.policies": ("direct",)}
    async with temporary_fleet(settings) as fleet:
        host, _, port = fleet.url.removeprefix("http://").rpartition(":")
        probes = fleet.probe_url.removeprefix("http://").rpartition(":")
        ports = int(port), int(probes[2])
        phases = {
            "no long prompts": await _phase(host, ports, b""),
            f"prompts of {LONG_CHARACTERS:,} tokens": await _phase(host, ports, long_prompt(LONG_CHARACTERS)),
            "bodies of 30 MB": await _phase(host, ports, long_prompt(HUGE_BYTES)),
        }
    measures = []
    for number, (name, gaps) in enumerate(phases.items()):
        measures += [
            Measure(f"{name}: token gap, median", percentile(gaps.tokens, 0.5) * 1000, "ms"),
            Measure(f"{name}: token gap, p99.9", percentile(gaps.tokens, 0.999) * 1000, "ms"),
            Measure(f"{name}: token gap, longest", max(gaps.tokens) * 1000, "ms"),
            Measure(f"{name}: /live on the metrics port, longest", max(gaps.probes) * 1000, "ms"),
            Measure(f"{name}: /live on the edge's port, longest", max(gaps.own_probes) * 1000, "ms"),
        ]
        if number == 1:
            quiet = max(phases["no long prompts"].tokens)
            delay_ms = (max(gaps.tokens) - quiet) * 1000
            measures.append(
                Measure(f"{name}: delay of other streams", delay_ms, "ms", f"at most {GOAL_MS:g}")
            )
    return Report(
        "edge --long-prompt",
        {
            "streams": f"{STREAMS} on one sim worker, steps of its default time",
            "long prompts": f"one after the other with pauses of {PAUSE_S:g} s, to another worker, from a process of their own",
            "each phase": f"{PHASE_S:g} s",
            "client, server, router and engines share": "this machine",
        },
        measures,
    )


def long_prompt(size: int) -> bytes:
    """A chat request with this many characters, for one token."""
    text = (TEXT * (size // len(TEXT) + 1))[:size]
    return chat_body(text, 1)


async def _phase(host: str, ports: tuple[int, int], body: bytes) -> Gaps:
    gaps = Gaps([], [], [])
    context = multiprocessing.get_context("spawn")
    ended = context.Event()
    sender = None
    if body:
        sender = context.Process(target=_send_prompts, args=(host, ports[0], body, ended), daemon=True)
        sender.start()
        # It imports before it sends.
        await asyncio.sleep(2.0)
    end_s = time.perf_counter() + PHASE_S
    try:
        await asyncio.gather(
            *(_stream(host, ports[0], number, end_s, gaps.tokens) for number in range(STREAMS)),
            asyncio.to_thread(_probe, host, ports[1], end_s, gaps.probes),
            asyncio.to_thread(_probe, host, ports[0], end_s, gaps.own_probes),
        )
    finally:
        ended.set()
        if sender is not None:
            await asyncio.to_thread(sender.join)
    return gaps


async def _stream(host: str, port: int, number: int, end_s: float, gaps: list[float]) -> None:
    """Read one stream until the end of the phase; then disconnect."""
    reader, writer = await asyncio.open_connection(host, port)
    body = chat_body(f"Stream {number}.", 100_000, stream=True)
    writer.write(_head("POST", "/v1/chat/completions", len(body), STREAM_WORKER) + body)
    try:
        await reader.readuntil(b'"content":"')
        last_s = time.perf_counter()
        while last_s < end_s:
            piece = await reader.read(1 << 16)
            if not piece:
                raise RuntimeError("a stream ended before the measurement")
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s
    finally:
        writer.close()


def _send_prompts(host: str, port: int, body: bytes, ended: multiprocessing.synchronize.Event) -> None:
    """Runs in a process of its own."""
    while not ended.wait(PAUSE_S):
        connection = http.client.HTTPConnection(host, port, timeout=60)
        headers = {"content-type": "application/json", "x-headwater-worker": PROMPT_WORKER}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status not in (200, 400):
            raise RuntimeError(f"{response.status}: {answer[:500]!r}")
        connection.close()


def _probe(host: str, port: int, end_s: float, delays: list[float]) -> None:
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("GET", "/live")
        if connection.getresponse().status != 200:
            raise RuntimeError("the edge is not live")
        connection.close()
        delays.append(time.perf_counter() - began_s)
        time.sleep(PROBE_PAUSE_S)


def _head(method: str, path: str, size: int, worker: str) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\nx-headwater-worker: {worker}\r\ncontent-length: {size}\r\n\r\n"
    return head.encode()
