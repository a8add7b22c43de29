"""`python -m tests.bench parsers`: recorded outputs parsed as they should be, and microseconds per token."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from headwater.actors.edge.parsing.selection import make_parser
from headwater.ops.bench.report import Measure, Report
from tests.bench.parsers.judge import Verdict, judge
from tests.bench.parsers.recorded import RecordedOutput, load, tokens_of

REPEATS: Final = 20

LONG_TOKENS: Final = 10_000

GOAL: Final = "at least 90"


def bench() -> Report:
    """Pass rates by family, and the cost of a token by format. One core."""
    verdicts = [judge(recorded) for recorded in load()]
    measures = _rates(verdicts)
    for tool_format in sorted({one.tool_format for one in load()}):
        chosen = [one for one in load() if one.tool_format == tool_format]
        measures.append(Measure(f"{tool_format}, {len(chosen)} outputs", _cost(chosen), "us/token"))
    measures += _long()
    return Report(
        "parsers", {"outputs": len(verdicts), "source": "canitoolcall 0.1.1", "repeats": REPEATS}, measures
    )


def _rates(verdicts: list[Verdict]) -> list[Measure]:
    families = sorted({one.recorded.fixture.family for one in verdicts})
    groups: list[tuple[str, Callable[[Verdict], bool]]] = [
        *((family, lambda one, family=family: one.recorded.fixture.family == family) for family in families),
        ("all", lambda _one: True),
        ("all that the parsers were written with", lambda one: not one.recorded.held_out),
        ("all that were held out", lambda one: one.recorded.held_out),
    ]
    measures: list[Measure] = []
    for name, belongs in groups:
        chosen = [one for one in verdicts if belongs(one)]
        counts = Counter(one.status for one in chosen)
        measures.append(
            Measure(
                f"{name}: {counts['pass']} of {len(chosen)}",
                100 * counts["pass"] / len(chosen),
                "% passed",
                GOAL,
            )
        )
    differing = sum(bool(one.cut) for one in verdicts)
    measures.append(Measure("results that depend on cuts", differing, "outputs", "0"))
    return measures


def _cost(chosen: list[RecordedOutput]) -> float:
    """Microseconds per token: parsers made, fed token by token and finished, the best of the repeats."""
    fed = [(recorded, tokens_of(recorded.fixture.raw_output)) for recorded in chosen]
    tokens = sum(len(pieces) for _, pieces in fed)
    return _best(lambda: [recorded.parse(pieces) for recorded, pieces in fed]) / tokens


def _long() -> list[Measure]:
    """Long answers, whose last token must cost what the first does."""
    text = ["word "] * LONG_TOKENS
    arguments = ['<tool_call>{"name": "f", "arguments": {"s": "', *text, '"}}</tool_call>']
    measures: list[Measure] = []
    for name, pieces in (("text", text), ("one argument", arguments)):

        def feed(pieces: list[str] = pieces) -> None:
            parser = make_parser("hermes", "think", tools=[], starts_in_reasoning=False)
            for piece in pieces:
                parser.push(piece)
            parser.finish()

        measures.append(
            Measure(f"hermes, {name} of {LONG_TOKENS} tokens", _best(feed) / LONG_TOKENS, "us/token")
        )
    return measures


def _best(action: Callable[[], object]) -> float:
    """Microseconds of processor time of the fastest of the repeats."""
    times: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        action()
        times.append(time.process_time() - began)
    return min(times) * 1e6
