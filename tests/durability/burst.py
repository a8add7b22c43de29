"""A burst into a reader that is slower than its writer: once with the whole stream kept, once with a small limit.

    python -m tests.durability.burst --events 500000

Kept whole, everything is delivered in order. Under the limit the server discards what the reader has not read
yet: that has to be declared, with exactly the positions that are gone. The memory of the reading process stays
bounded either way; the writer is another process.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from headwater.events.jetstream import JetStreamLog, connect
from headwater.events.jetstream.cursor import PULL
from headwater.events.jetstream.stream_spec import log_stream
from headwater.events.jetstream.streams import ensure
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from tests.durability.history import LogContent
from tests.durability.workload import NS, POOL
from tests.faults.report import Report, Violation, command
from tests.support.processes import zygote
from tests.support.servers.nats import NatsServer

FILL = "from tests.durability import fill; fill.main()"
WHOLE_BYTES = 1024**3
GROWTH_BYTES_MAX = 64 * 1024**2
END_S = 600.0


class Burst(NamedTuple):
    """What one reader was given, and how the process grew meanwhile."""

    content: LogContent
    slices: int
    largest_slice: int
    growth_bytes: int
    took_s: float
    violations: list[Violation]


async def burst(
    folder: Path, *, events: int, pause_s: float, limit_bytes: int, limited_pause_s: float
) -> tuple[Report, int]:
    """`events` messages into a reader that rests after each slice; then the same with a limit on the stream.

    Also returns how many messages were declared gone under the limit.
    """
    async with AsyncExitStack() as stack:
        server = NatsServer(folder)
        await server.start()
        stack.callback(server.stop)
        whole = await _one(server, "whole", events, WHOLE_BYTES, pause_s)
        limited = await _one(server, "limited", events, limit_bytes, limited_pause_s)
    violations = [*whole.violations, *limited.violations]
    if whole.content.gaps:
        violations.append(Violation("lost", len(whole.content.gaps), "gaps in a stream that was kept whole"))
    lines = [("events", f"{events:,}, one to a message")]
    for name, one in (("whole", whole), (f"limit {limit_bytes / 1024**2:.0f} MiB", limited)):
        gone = sum(last - first + 1 for first, last in one.content.gaps)
        lines += [
            (
                f"{name}: delivered",
                f"{one.content.messages:,} in {one.slices:,} slices of at most {one.largest_slice}",
            ),
            (f"{name}: declared gone", f"{gone:,} in {len(one.content.gaps)} gaps"),
            (f"{name}: memory grew by", f"{one.growth_bytes / 1024**2:.1f} MiB"),
            (f"{name}: duration", f"{one.took_s:.1f} s"),
        ]
    gone = sum(last - first + 1 for first, last in limited.content.gaps)
    return Report("burst into a slow reader", lines, violations), gone


async def _one(server: NatsServer, name: str, events: int, max_bytes: int, pause_s: float) -> Burst:
    ns = f"{NS}-{name}"
    stream, subject = subjects.pool_stream(ns, POOL), subjects.pool_subject(ns, POOL, "load", "w0")
    clock = SystemClock()
    began = time.monotonic()
    client = await connect(server.url, f"reader {name}")
    try:
        wanted = log_stream(
            stream, subjects.pool_filter(ns, POOL), max_age_s=3600, max_bytes=max_bytes, replicas=1
        )
        await ensure(client, wanted)
        log = JetStreamLog(client, stream)
        slices = log.read(0, follow=True)
        assert isinstance(slices, AsyncGenerator)
        content, count, largest = LogContent(), 0, 0
        false: list[str] = []
        # The first slice says that there is nothing yet: what the reader needs anyway is then in place.
        await anext(slices)
        before = peak = _resident_bytes()
        writer = await zygote.start("-c", FILL, server.url, subject, str(events))
        try:
            async with asyncio.timeout(END_S):
                while content.last < events:
                    piece = await anext(slices)
                    content.add_slice(piece)
                    count += 1
                    largest = max(largest, len(piece.records))
                    if piece.gap is not None and (await log.bounds()).first <= piece.gap.last:
                        false.append(f"{piece.gap} although the stream still has some of it")
                    peak = max(peak, _resident_bytes())
                    await clock.sleep(pause_s)
            assert await writer.wait() == 0
        finally:
            if writer.returncode is None:
                writer.kill()
                await writer.wait()
            await slices.aclose()
    finally:
        await client.close()
    violations = content.violations()
    if false:
        violations.append(Violation("unread", len(false), false[0]))
    if largest > 2 * PULL:
        text = f"{name}: a slice of {largest} messages, the cursor's window is {2 * PULL}"
        violations.append(Violation("memory", 1, text))
    if peak - before > GROWTH_BYTES_MAX:
        text = f"{name}: the reader grew by {peak - before:,} bytes, {GROWTH_BYTES_MAX:,} is the most"
        violations.append(Violation("memory", 1, text))
    return Burst(content, count, largest, peak - before, time.monotonic() - began, violations)


def _resident_bytes() -> int:
    """Memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--pause-ms", type=float, default=5.0, help="the reader's rest after each slice")
    parser.add_argument("--limit-mib", type=float, default=2.0)
    parser.add_argument("--limited-pause-ms", type=float, default=50.0)
    given = parser.parse_args()

    async def run(folder: Path) -> Report:
        report, _ = await burst(
            folder,
            events=given.events,
            pause_s=given.pause_ms / 1e3,
            limit_bytes=int(given.limit_mib * 1024**2),
            limited_pause_s=given.limited_pause_ms / 1e3,
        )
        return report

    return command(run)


if __name__ == "__main__":
    sys.exit(main())
