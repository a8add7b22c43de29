"""The figures of one replay of one trace, ours or a peer's."""

from typing import Final

import msgspec

from headwater.ops.whatif.report import WhatifReport


class Figures(msgspec.Struct, frozen=True):
    """Share of prompt blocks reused, milliseconds, and share of requests within the limits of `whatif.report`.

    `goodput` is None where a replay reports no figures of single requests.
    """

    reuse: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl: float
    e2e_mean: float
    e2e_p99: float
    goodput: float | None = None


NAMES: Final = Figures.__struct_fields__

HIGHER_IS_BETTER: Final = ("reuse", "goodput")
"""These are shares; the others are times."""


def figures_of(report: WhatifReport) -> Figures:
    """Ours."""
    return Figures(
        report.reuse,
        report.ttft_ms.mean,
        report.ttft_ms.p50,
        report.ttft_ms.p99,
        report.itl_ms,
        report.e2e_ms.mean,
        report.e2e_ms.p99,
        report.goodput,
    )
