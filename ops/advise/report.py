"""The advice: a table of layouts, the recommendation, and how sure it is."""

from typing import Final

import msgspec

from headwater.ops.process.text_table import table
from headwater.ops.whatif.report import Spread

SHOWN: Final = 12
"""Layouts in the table."""

TIE: Final = 0.005
"""Goodput that differs by less is equal."""

SATURATED: Final = 0.5
"""Below this share of requests within the limits, all layouts are overloaded."""


class LayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `goodput`: the share of requests within all limits; times in milliseconds."""

    layout: str
    flags: str
    gpus: int
    kv_tokens: int
    goodput: float
    ttft_ms: Spread
    itl_ms: float
    e2e_ms: float
    reuse: float
    refused: int


class Check(msgspec.Struct, frozen=True):
    """The goodput, and the mean end-to-end milliseconds (0: not known), of the best layouts in their order under another condition."""

    condition: str
    goodput: list[float]
    e2e_ms: list[float]

    @property
    def winner(self) -> int:
        """Which of them is best here: the first, unless another is better by more than `TIE`, or as good and faster by as much."""
        first = self.goodput[0]
        top = max(self.goodput)
        if top - first > TIE:
            return self.goodput.index(top)
        near = [at for at, value in enumerate(self.goodput) if abs(value - first) <= TIE]
        quickest = min(near, key=lambda at: self.e2e_ms[at])
        return quickest if self.e2e_ms[quickest] < self.e2e_ms[0] * (1 - TIE) else 0


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """The advice. `layouts` are sorted, the recommended one first; `step_times` says where those are from."""

    model: str
    gpus: str
    trace: str
    requests: int
    requests_per_s: float
    speed: float
    slo_ms: dict[str, float]
    weights_gb: float
    kv_bytes_per_token: float
    step_times: str
    layouts: list[LayoutReport]
    refused: dict[str, str]
    idle_gpus: int
    checks: list[Check]
    command: str


def as_text(advised: Advised) -> str:
    """Return everything for people."""
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in advised.slo_ms.items())
    lines = [
        f"{advised.model} on {advised.gpus}: weights {advised.weights_gb:,.1f} GB, KV {advised.kv_bytes_per_token / 1024:,.0f} KiB per token",
        f"{advised.trace}: {advised.requests:,} requests, {advised.requests_per_s:.2f}/s; good: {limits}",
        f"step times: {advised.step_times}",
        "",
        table(
            ("layout", "good", "TTFT p50 / p99 ms", "ITL ms", "E2E ms", "reuse", "KV tokens per worker"),
            [
                (
                    one.layout,
                    f"{one.goodput:.1%}",
                    f"{one.ttft_ms.p50:,.0f} / {one.ttft_ms.p99:,.0f}",
                    f"{one.itl_ms:.1f}",
                    f"{one.e2e_ms:,.0f}",
                    f"{one.reuse:.1%}",
                    f"{one.kv_tokens:,}",
                )
                for one in advised.layouts[:SHOWN]
            ],
        ),
    ]
    if len(advised.layouts) > SHOWN:
        lines.append(f"and {len(advised.layouts) - SHOWN} worse ones")
    lines += [f"not possible: {name}: {reason}" for name, reason in advised.refused.items()]
    lines += [
        "",
        f"recommended: {advised.layouts[0].layout}",
        f"    {advised.command}",
        "",
        *sureness(advised),
    ]
    return "\n".join(lines)


def sureness(advised: Advised) -> list[str]:
    """Return how sure the recommendation is, and what that does not cover."""
    lines = []
    best = advised.layouts[0]
    if advised.checks:
        won = sum(check.winner == 0 for check in advised.checks)
        share = won / len(advised.checks)
        word = "sure" if share == 1 else "likely" if share >= 0.75 else "not sure"
        lines.append(
            f"{word}: of {len(advised.checks)} other conditions, it is best or equal in {won} (goodput of {', '.join(one.layout for one in advised.layouts[:3])}):"
        )
        lines += [
            f"  {check.condition}: {', '.join(f'{value:.1%}' for value in check.goodput)}"
            + ("" if check.winner == 0 else f"  <- {advised.layouts[check.winner].layout}")
            for check in advised.checks
        ]
        second = advised.layouts[1]
        if abs(best.goodput - second.goodput) <= TIE:
            lines.append(
                f"{second.layout} is as good to half a percent ({best.goodput:.1%} and {second.goodput:.1%}); mean end-to-end times are "
                f"{best.e2e_ms:,.0f} and {second.e2e_ms:,.0f} ms"
            )
    else:
        lines.append("it is the only layout that is possible")
    if best.goodput < SATURATED:
        lines.append(
            "every layout is overloaded: what is best then says little. More GPUs are needed, or looser limits"
        )
    elif all(one.goodput > 1 - TIE for one in advised.layouts[:2]):
        lines.append(
            "the load is light for several layouts: --speed 2 shows which has room for twice as much"
        )
    if advised.step_times.startswith("assumed"):
        lines.append(
            "step times were not measured: run the recommendation under load, and `headwater advise log` on its log, which measures them"
        )
    if advised.speed > 1:
        lines.append(
            f"the load is {advised.speed:g} times the recorded one: the same requests, closer together"
        )
    if advised.idle_gpus:
        lines.append(f"{advised.idle_gpus} GPUs are left idle")
    lines.append(
        "not in the simulation: pipeline parallelism, attention of a long prompt's later chunks to its earlier ones, preemption's cost "
        "beyond recomputing, HTTP, several hosts"
    )
    return lines
