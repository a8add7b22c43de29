"""Small traces for tests of what-if: conversations that share prefixes, in bursts, from a seed."""

import json
import random
from pathlib import Path

from headwater.ops.bench.trace import TRACE_BLOCK, Trace, TraceRequest


def conversations(seed: int, count: int, *, gap_ms: int = 300) -> Trace:
    """`count` requests of a few conversations, each longer than the one before it in its conversation."""
    drawn = random.Random(seed)
    open_ids: list[list[int]] = [[0] for _ in range(4)]
    names = iter(range(1, 1_000_000))
    at_ms = 0
    requests = []
    for number in range(count):
        at_ms += drawn.choice((0, 0, drawn.randrange(gap_ms)))
        ids = drawn.choice(open_ids)
        ids += [next(names) for _ in range(drawn.randrange(4))]
        if len(ids) > 24:
            del ids[drawn.randrange(1, 6) :]
        # The last block may be partial, and is then nobody's next block.
        partial = drawn.randrange(TRACE_BLOCK)
        whole = (*ids, next(names)) if partial else tuple(ids)
        tokens = len(ids) * TRACE_BLOCK + partial
        requests.append(TraceRequest(f"r{number}", at_ms * 1_000_000, tokens, drawn.randrange(1, 700), whole))
    return Trace(f"seed {seed}", tuple(requests))


def written(trace: Trace, path: Path) -> Path:
    """The trace as a file in Mooncake's format."""
    lines = [
        json.dumps(
            {
                "timestamp": request.arrival_ns // 1_000_000,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.ids,
            }
        )
        for request in trace.requests
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
