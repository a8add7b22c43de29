"""Are answers after a hand-off the same, and if not: rounding, or a defect?

    python -m tests.bench.gpu.handoff.equality --settings graphs,graphs-invariant --blocks 16 --out results
    python -m tests.bench.gpu.handoff.equality --device cpu --shape tiny --length 100        (a check, no figures)

Each prompt is handed over once, then answered several times by the prefill engine and by the decode engine, each from
its own cache; another prompt of the same length is computed by both, without a hand-off. At temperature 0, two answers differ either because kernels round differently, or because the engines
computed something else. Rounding shows in two ways: answers without a hand-off differ as often, and at the first
different token the two candidates were nearly equally likely. A defect shows as a gap like that between any two
neighbouring candidates; its median is printed with them.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from headwater.ops.bench.report import machine
from headwater.ops.terminal import table
from tests.bench.gpu import model as gpu_model
from tests.bench.gpu.engine import EngineAnswer
from tests.bench.gpu.handoff.pair import Answers, Pair
from tests.bench.gpu.handoff.settings import chosen
from tests.bench.gpu.process import ChildFailed

TIMES = 2
"""Answers of each engine alone."""


class FirstDifference(NamedTuple):
    """Where two answers first differ, and how much likelier (in log probability) each found its own token than the other's."""

    place: int
    gap: float
    other_gap: float


class AnswerComparison(NamedTuple):
    """Pairs of answers that were compared, and the differences among them."""

    what: str
    pairs: int
    differences: list[FirstDifference]

    @property
    def largest_gap(self) -> float:
        """The largest gap at a first difference."""
        return max((max(one.gap, one.other_gap) for one in self.differences), default=0.0)


def first_difference(one: EngineAnswer, other: EngineAnswer) -> FirstDifference | None:
    """None if two answers are equal. A token that the other engine did not list counts as infinitely unlikely."""
    for place, (token, instead) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if token != instead:
            return FirstDifference(
                place, _gap(one.logprobs[place], token, instead), _gap(other.logprobs[place], instead, token)
            )
    return None


def _gap(place: dict[int, float], token: int, other: int) -> float:
    return place[token] - place.get(other, float("-inf"))


def compare(answers: Sequence[Answers]) -> list[AnswerComparison]:
    """Handed over against alone, and each engine against itself."""
    kinds: dict[str, list[tuple[EngineAnswer, EngineAnswer]]] = {
        "handed over, prefill engine alone": [(one.handed, one.whole[0]) for one in answers],
        "handed over, decode engine alone": [(one.handed, one.repeated[0]) for one in answers],
        "prefill engine, decode engine": [(one.whole[0], one.repeated[0]) for one in answers],
        "both engines, another prompt": [one.cold for one in answers],
        "prefill engine, itself": [pair for one in answers for pair in _pairs(one.whole)],
        "decode engine, itself": [pair for one in answers for pair in _pairs(one.repeated)],
    }
    return [
        AnswerComparison(what, len(pairs), [found for pair in pairs if (found := first_difference(*pair))])
        for what, pairs in kinds.items()
    ]


def _pairs(answers: Sequence[EngineAnswer]) -> list[tuple[EngineAnswer, EngineAnswer]]:
    return list(pairwise(answers))


def usual_gap(answers: Sequence[Answers]) -> float:
    """The median gap between the likeliest and the second token, over all places of all answers."""
    gaps = []
    for one in answers:
        for place in one.whole[0].logprobs:
            first, second = sorted(place.values(), reverse=True)[:2]
            gaps.append(first - second)
    return statistics.median(gaps)


def measure(pair: Pair, options: argparse.Namespace) -> list[Answers]:
    """The answers to all prompts. Raises `ChildFailed`."""
    pair.ready()
    draw = random.Random(0)
    vocabulary = int(gpu_model.SHAPES[options.shape]["vocab_size"])

    def prompt() -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(options.length)]

    return [pair.answers(prompt(), prompt(), options.tokens, TIMES) for _ in range(options.prompts)]


def run(options: argparse.Namespace) -> None:
    """All settings, started together and measured one after the other."""
    settings = chosen(options.settings, options.blocks)
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as folder:
        model = gpu_model.make(Path(folder, options.shape), options.shape)
        pairs = [Pair(setting, options, model, 5600 + 10 * number) for number, setting in enumerate(settings)]
        try:
            for pair in pairs:
                try:
                    _show(pair.setting.label, measure(pair, options), options.out)
                except ChildFailed as error:
                    print(f"{pair.setting.label}: {error}", flush=True)
        finally:
            for pair in pairs:
                pair.stop()


def _show(label: str, answers: Sequence[Answers], out: Path) -> None:
    found = compare(answers)
    rows = [
        [
            one.what,
            one.pairs,
            len(one.differences),
            f"{one.largest_gap:.4f}",
            " ".join(f"{at.place}:{at.gap:.4f}/{at.other_gap:.4f}" for at in one.differences[:6]),
        ]
        for one in found
    ]
    one = answers[0]
    cached = f"{one.handed.cached} handed over, {one.whole[0].cached} and {one.repeated[0].cached} alone"
    print(f"{label}: {len(answers)} prompts, usual gap {usual_gap(answers):.3f}, cached tokens: {cached}")
    print(table(("answers", "pairs", "differ", "largest gap", "place:gap/gap"), rows), flush=True)
    (out / f"{label.replace('/', '-')}.json").write_text(json.dumps([one._asdict() for one in found]))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(gpu_model.SHAPES), default="qwen3-8b")
    parser.add_argument(
        "--settings", default="graphs", help="comma-separated names, each as NAME or NAME/BLOCK"
    )
    parser.add_argument("--blocks", default="16", help="comma-separated block sizes")
    parser.add_argument("--length", type=int, default=1025, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--kv-gb", type=float, default=4.0, help="KV cache of each engine")
    parser.add_argument("--out", type=Path, default=Path("gpu-equality"))
    options = parser.parse_args()
    options.lengths = [options.length + options.tokens]
    options.out.mkdir(parents=True, exist_ok=True)
    print("machine:", machine())
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
