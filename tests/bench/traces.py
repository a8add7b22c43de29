"""What traces cost an edge and a router: `python -m tests.bench.traces [--rounds 3]`.

In each round `headwater bench edge` runs without traces, with 1 % of them sent, and with all, one after the other, so that other load on the
machine affects all alike. The collector, the tracer, the client and everything else share the machine. Prints the median of the ratios of each
round, with the conditions: of rates, which say as much of a machine that has other work as of traces, and of the edge's processor time, which does not.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

from headwater.ops.bench import edge
from headwater.ops.bench.report import Measure, Report, show
from tests.support.servers.otlp import collector

SHARES = {"1 %": 0.01, "100 %": 1.0}
GOALS = {"1 %": (0.97, 1.03), "100 %": (0.90, 1.10)}
"""By share, what rates are to have at least, and times at most."""

RATES = ("requests", "tokens")
TIMES = ("edge CPU per 1,000 requests", "edge CPU per million tokens")


async def rates(url: str, share: float | None) -> dict[str, float]:
    """Requests and tokens per second and the edge's time for them, with a share of the traces sent; None: without a tracer."""
    settings = {} if share is None else {"trace.otlp": url, "trace.sample": share}
    report = await edge.bench(settings=settings)
    return {one.name: one.value for one in report.measures if one.name in RATES + TIMES}


async def measure(rounds: int) -> Report:
    """The ratios to the rates without traces, as medians over the rounds."""
    found: dict[tuple[str, str], list[float]] = {}
    bare: dict[str, list[float]] = {name: [] for name in RATES + TIMES}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        async with collector(Path(folder), quiet=True) as there:
            for _ in range(rounds):
                without = await rates(there.url, None)
                for name in bare:
                    bare[name].append(without[name])
                for label, share in SHARES.items():
                    got = await rates(there.url, share)
                    for name in bare:
                        found.setdefault((label, name), []).append(got[name] / without[name])
                load.append(os.getloadavg()[0])
    measures = [
        Measure(
            f"{name} without traces", statistics.median(bare[name]), f"{name}/s" if name in RATES else "s"
        )
        for name in bare
    ]
    for (label, name), ratios in found.items():
        least, most = GOALS[label]
        goal = f"at least {least:.2f}" if name in RATES else f"at most {most:.2f}"
        measures.append(
            Measure(f"{name} with {label} of the traces", statistics.median(ratios), "times", goal)
        )
    conditions = {
        "rounds": rounds,
        "load average": " ".join(f"{one:.1f}" for one in load),
        "receiver": "rotel, over gRPC, on this machine",
        "unary": f"{edge.REQUESTS} requests of 1 token, {edge.CONNECTIONS} connections",
        "streams": f"{edge.ROUNDS} x {edge.STREAMS} of {edge.STREAM_TOKENS} tokens",
    }
    return Report("traces", conditions, measures)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    show(asyncio.run(measure(parser.parse_args().rounds)), as_json=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
