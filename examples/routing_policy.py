"""A routing policy of your own, compared with the built-in ones on a public trace.

    python examples/routing_policy.py --requests 2000

A policy is a pure function from the candidates that the filters left to one of them. It may use the recorded seed, and no clock and no
other randomness: `headwater replay --verify` recomputes every decision.
"""

import argparse
from pathlib import Path

from headwater.ops.bench.trace import read
from headwater.ops.whatif.report import report_of
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.router.policies import POLICIES, Choice
from headwater.schemas.routing import Candidate

TRACE = Path(__file__).resolve().parent.parent / "examples" / "data" / "conversation_trace.jsonl.gz"

SHARE = 0.5


def sticky_prefix(choice: Choice) -> Candidate:
    """The worker with the longest cached prefix, unless it has most of the queued prefill work; else the least loaded."""
    best = max(choice.candidates, key=lambda candidate: candidate.cached_blocks)
    queued = sum(candidate.prefill_tokens for candidate in choice.candidates)
    if best.cached_blocks and best.prefill_tokens <= SHARE * queued:
        return best
    return POLICIES["least_loaded"](choice)


def main() -> None:
    """Print a row for each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000, help="of the trace's first (default: 2000)")
    arguments = parser.parse_args()

    # Register it under a name. In a fork of Headwater it would be an entry of the table itself.
    POLICIES["sticky_prefix"] = sticky_prefix
    trace = read(TRACE).first(arguments.requests)
    print("policy         reuse  TTFT mean ms  TTFT p99 ms")
    for policy in ("round_robin", "kv", "sticky_prefix"):
        report = report_of(run(trace, Setup(policy=policy, workers=4)))
        print(f"{policy:13}  {report.reuse:.3f}  {report.ttft_ms.mean:12,.1f}  {report.ttft_ms.p99:11,.1f}")


if __name__ == "__main__":
    main()
