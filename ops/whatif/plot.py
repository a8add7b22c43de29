"""A comparison of runs as one self-contained SVG: times to the first token, and balance over workers."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from headwater.ops.config.errors import ConfigError
from headwater.ops.whatif.report import PolicyResult

COLOURS = ("#1f5fbf", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#008b8b", "#8b4513", "#555555")
WIDTH, MARGIN = 900, 60
CHART_HEIGHT, BARS_HEIGHT = 340, 130
POINTS = 240
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def write(path: Path, results: Sequence[PolicyResult], names: Sequence[str]) -> None:
    """Write the plot to `path`. Raises `ConfigError` where it cannot be written."""
    try:
        path.write_text(drawn(results, names), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def drawn(results: Sequence[PolicyResult], names: Sequence[str]) -> str:
    """The plot as SVG: a line for each run, then bars for each run's workers."""
    legend = 22 * len(results) + 30
    bars_at = legend + CHART_HEIGHT + 70
    height = bars_at + (BARS_HEIGHT + 46) * len(results) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (result, name) in enumerate(zip(results, names, strict=True)):
        report, y = result.report, 22 * number + 22
        text = (
            f"{name}: reuse {report.reuse:.3f}, TTFT mean {report.ttft_ms.mean:,.0f}, p50 {report.ttft_ms.p50:,.0f}, "
            f"p99 {report.ttft_ms.p99:,.0f} ms, ITL {report.itl_ms:.2f} ms, E2E {report.e2e_ms.mean:,.0f} ms"
        )
        parts.append(f'<rect x="{MARGIN}" y="{y - 10}" width="14" height="4" fill="{_colour(number)}"/>')
        parts.append(_text(MARGIN + 22, y, text))
    parts += _distribution([result.ttft_ms for result in results], legend)
    for number, (result, name) in enumerate(zip(results, names, strict=True)):
        parts += _balance(result, name, _colour(number), bars_at + (BARS_HEIGHT + 46) * number)
    return "\n".join([*parts, "</svg>\n"])


def _distribution(waits: Sequence["np.typing.NDArray[np.float64]"], top: int) -> list[str]:
    """Shares of requests over their time to the first token, on a logarithmic scale."""
    filled = [one for one in waits if len(one)]
    low = min([float(one[0]) for one in filled], default=1.0)
    high = max([float(one[-1]) for one in filled], default=10.0)
    first, last = math.log10(max(low, 1e-3)), math.log10(max(high, low * 1.01, 2e-3))
    bottom, right = top + CHART_HEIGHT, WIDTH - MARGIN

    def across(milliseconds: float) -> float:
        place = (math.log10(max(milliseconds, 1e-3)) - first) / (last - first)
        return MARGIN + place * (right - MARGIN)

    def up(share: float) -> float:
        return bottom - share * CHART_HEIGHT

    parts = [_text(MARGIN, top - 8, "share of requests with their first token within … ms")]
    for share in SHARES:
        parts.append(_line(MARGIN, up(share), right, up(share)))
        parts.append(_text(MARGIN - 6, up(share) + 4, f"{share:g}", "end"))
    for power in range(math.floor(first), math.ceil(last) + 1):
        for digit in (1, 2, 5):
            value = digit * 10.0**power
            if first <= math.log10(value) <= last:
                parts.append(_line(across(value), top, across(value), bottom))
                parts.append(_text(across(value), bottom + 18, f"{value:,g}", "middle"))
    for number, one in enumerate(waits):
        if not len(one):
            continue
        # As many points in the last hundredth as in the middle.
        shares = 1 - np.concatenate(
            [np.linspace(1, 0.01, POINTS), np.geomspace(0.01, 1 / (len(one) + 1), POINTS)]
        )
        places = np.minimum((shares * len(one)).astype(int), len(one) - 1)
        points = " ".join(f"{across(float(one[p])):.1f},{up((p + 1) / len(one)):.1f}" for p in places)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" stroke-width="2"/>')
    return parts


def _balance(result: PolicyResult, name: str, colour: str, top: int) -> list[str]:
    """A bar for each worker's requests, and one for the prompt tokens it computed, as shares of the mean."""
    balance = result.report.balance
    workers = list(balance.requests)
    kinds = (("requests", balance.requests, 0.45), ("tokens computed", balance.computed_tokens, 1.0))
    most = max(1.0, balance.requests_ratio, balance.computed_tokens_ratio)
    base = top + 24 + BARS_HEIGHT
    parts = [
        _text(MARGIN, top + 14, f"{name}: each worker's requests (pale) and prompt tokens computed, 1 = mean")
    ]
    slot = (WIDTH - 2 * MARGIN) / max(1, len(workers))
    mean_y = base - BARS_HEIGHT / most
    for place, (kind, values, opacity) in enumerate(kinds):
        mean = sum(values.values()) / max(1, len(values))
        for number, worker in enumerate(workers):
            share = values[worker] / mean if mean else 0.0
            x = MARGIN + slot * (number + 0.12 + 0.38 * place)
            tall = BARS_HEIGHT * share / most
            parts.append(
                f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{slot * 0.36:.1f}" height="{tall:.1f}" fill="{colour}" '
                f'fill-opacity="{opacity}"><title>{escape(worker)}: {values[worker]:,} {kind}</title></rect>'
            )
    parts.append(_line(MARGIN, mean_y, WIDTH - MARGIN, mean_y))
    parts.append(_text(MARGIN - 6, mean_y + 4, "1", "end"))
    if slot > 40:
        parts += [_text(MARGIN + slot * (n + 0.5), base + 15, w, "middle") for n, w in enumerate(workers)]
    return parts


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#cccccc"/>'
