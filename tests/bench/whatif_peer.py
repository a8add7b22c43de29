"""Results of a peer's router on the conversation trace, and lower bounds.

NVIDIA Dynamo 1.2.1's own offline replay (mocker engines with their default step-time model, blocks of 512 tokens) of
Mooncake's `conversation_trace.jsonl`, run on a two-core machine on 2026-11-21. `speed` divides arrival times.
"""

from typing import Final, Literal, NamedTuple

SOURCE: Final = "NVIDIA Dynamo 1.2.1's offline replay (mocker engines, their default step times), 2026-11-21"


class PeerFigures(NamedTuple):
    """Share of prompt blocks reused; the rest in milliseconds."""

    reuse: float
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_mean: float
    e2e_mean: float


class PeerRow(NamedTuple):
    """One run of the peer."""

    workers: int
    blocks: int
    speed: float
    policy: Literal["round_robin", "kv"]
    theirs: PeerFigures


ROWS: Final = (
    PeerRow(8, 4_000, 1, "round_robin", PeerFigures(0.101, 317, 179, 686, 2_054, 6.81, 2_645)),
    PeerRow(8, 4_000, 1, "kv", PeerFigures(0.258, 261, 175, 519, 1_678, 6.63, 2_524)),
    PeerRow(8, 4_000, 4, "round_robin", PeerFigures(0.101, 432, 242, 1_067, 2_625, 14.90, 5_524)),
    PeerRow(8, 4_000, 4, "kv", PeerFigures(0.210, 367, 265, 709, 1_780, 12.50, 4_639)),
    PeerRow(8, 2_000, 1, "round_robin", PeerFigures(0.082, 326, 185, 707, 2_081, 7.64, 2_937)),
    PeerRow(8, 2_000, 1, "kv", PeerFigures(0.205, 283, 176, 563, 1_721, 7.31, 2_782)),
    PeerRow(4, 4_000, 2, "round_robin", PeerFigures(0.114, 567, 362, 1_260, 2_716, 14.77, 5_612)),
    PeerRow(4, 4_000, 2, "kv", PeerFigures(0.180, 492, 360, 974, 2_057, 13.36, 5_055)),
)

AGREEMENT: Final = 0.03
"""A comparison is valid only if the round-robin rows agree within this."""

TARGETS: Final = {"reuse": 0.32, "ttft_mean": 0.82, "ttft_p50": 0.65, "ttft_p99": 0.96}
"""Goals for the second row: minimum reuse, and maximum ratios of the others to the peer's."""

TARGETS_ROW: Final = ROWS[1]

WORSE_MAX: Final = 1.02
"""Goal for all figures of all rows: maximum ratio to the peer's (reuse: minimum)."""
