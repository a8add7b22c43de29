"""Fills a stream with numbered events, one to a message, as fast as the server takes them: a process of its own.

python -m tests.durability.fill URL SUBJECT EVENTS
"""

import asyncio
import sys

from headwater.events.jetstream import connect
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, encode_batch
from tests.durability.history import marked

AHEAD = 2_000
"""Messages between two acknowledgements that are waited for: the server's own queue never overflows."""


async def fill(url: str, subject: str, events: int) -> None:
    """Publish without a fence: the reader is what is looked at."""
    client = await connect(url, "fill")
    try:
        for event in range(1, events + 1):
            data = encode_batch(Batch(SCHEMA_VERSION, "w0", 1, event, 0, (marked(event),)))
            if event % AHEAD and event != events:
                await client.publish(subject, data)
            else:
                await client.request(subject, data, timeout=60)
    finally:
        await client.close()


def main() -> None:
    """Fill as the command line says."""
    asyncio.run(fill(sys.argv[1], sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    main()
