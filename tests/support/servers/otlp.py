"""Real OpenTelemetry receivers on this machine: one over HTTP within the test, and a collector that gets traces over gRPC and writes them down."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import rotel
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from headwater.ops.start.sockets import free_port

WITHIN_S = 30.0


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
        try:
            async with asyncio.timeout(WITHIN_S):
                while not holds(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = Counter((span.trace_id.hex(), span.name) for span in self.spans)
            raise AssertionError(f"never came true of what was received: {names}") from None


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


class Collector:
    """A collector. Its log has what it was sent, span by span."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    async def until_logged(self, texts: Iterable[str]) -> str:
        """Wait until its log has all of these; returns it."""
        async with asyncio.timeout(WITHIN_S):
            while not all(text in (log := self._log.read_text()) for text in texts):
                await asyncio.sleep(0.05)
        return log


@asynccontextmanager
async def collector(folder: Path, *, quiet: bool = False) -> AsyncIterator[Collector]:
    """A collector that takes OTLP over gRPC; a `quiet` one writes nothing down."""
    grpc, log = free_port(0), folder / "collector.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            Path(rotel.__file__).parent / "rotel-agent",
            "start",
            *(
                "--otlp-grpc-endpoint",
                f"127.0.0.1:{grpc}",
                "--otlp-http-endpoint",
                f"127.0.0.1:{free_port(0)}",
            ),
            *(
                "--exporter",
                "blackhole",
                "--debug-log",
                "none" if quiet else "traces",
                "--debug-log-verbosity",
                "detailed",
            ),
            *("--pid-file", str(folder / "collector.pid"), "--log-file", str(log)),
            env={"PATH": os.environ["PATH"]},
            stdout=output,
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
        yield Collector(f"http://127.0.0.1:{grpc}", log)
    finally:
        process.terminate()
        await process.wait()
