"""Real OpenTelemetry receivers on this machine: one over HTTP within the test, and a collector that passes on to it what it gets over gRPC."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import rotel
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from headwater.ops.process.sockets import free_port

WITHIN_S = 60.0


class Received:
    """What a receiver was sent so far."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Span] = []
        self._changed = asyncio.Event()

    def take(self, span: Span) -> None:
        """Note a span."""
        self.spans.append(span)
        self._changed.set()

    def of(self, trace: str) -> list[Span]:
        """The spans of a trace."""
        return [span for span in self.spans if span.trace_id.hex() == trace]

    async def until(self, holds: Callable[["Received"], bool]) -> None:
        """Wait until what has arrived satisfies a condition."""
        async with asyncio.timeout(WITHIN_S):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def otlp_receiver(port: int = 0) -> AsyncIterator[Received]:
    """An OTLP receiver over HTTP."""
    port = port or free_port(0)
    received = Received(port)
    async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=port)) as tap:

        async def read() -> None:
            async for span in tap.stream_traces():
                received.take(span)

        reading = asyncio.create_task(read())
        try:
            yield received
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def collector(folder: Path, received: Received) -> AsyncIterator[str]:
    """A collector that passes traces on to a receiver; yields its URL for OTLP over gRPC."""
    grpc, http = free_port(0), free_port(0)
    log = folder / "collector.log"
    process = await asyncio.create_subprocess_exec(
        Path(rotel.__file__).parent / "rotel-agent",
        "start",
        *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
        *("--exporter", "otlp", "--otlp-exporter-protocol", "http"),
        *("--otlp-exporter-traces-endpoint", f"{received.url}/v1/traces"),
        *("--debug-log", "traces", "--debug-log-verbosity", "detailed"),
        *("--pid-file", str(folder / "collector.pid"), "--log-file", str(log)),
        env={"PATH": os.environ["PATH"]},
        stdout=log.open("wb"),
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                assert process.returncode is None, log.read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", grpc)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                break
        yield f"http://127.0.0.1:{grpc}"
    finally:
        process.terminate()
        await process.wait()
