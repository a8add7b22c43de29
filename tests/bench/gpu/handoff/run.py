"""Prefill on one GPU, decode on another: the transfer rate of KV blocks, by settings.

    python -m tests.bench.gpu.handoff.run --settings default,cross-layers --blocks 16,64 --out results
    python -m tests.bench.gpu.handoff.run --device cpu --shape tiny --lengths 100,500     (a check, no figures)

For each setting a vLLM engine per GPU, with NixlConnector between them. Per prompt: prefill on the first (one
token), decode on the second (which reads the blocks), and the whole prompt twice more on the first.

Three checks. `blocks`: of the prompt's whole blocks, how many are the same bytes in both caches, in every layer.
`equal`, per repetition: how many tokens of the decode agree with the first engine's before one differs; then how many of
the first engine's two answers agree, and of the decode engine's two (the second from its own cache). The second number
shows rounding; the third whether the decode started before all bytes had arrived. `control`: the same for a decode with
another prompt's blocks: its tokens must differ. Weights are such that tokens depend on the whole prompt (`gpu.weights`).

`GB/s` is bytes over seconds as measured by NIXL. `TTFT` is the decode engine's time to the first token, `warm` the same on
the first engine with the prompt in its cache: the difference is the cost of the hand-off.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.terminal import table
from tests.bench.gpu import model as gpu_model
from tests.bench.gpu.handoff.pair import TOKENS, HandOff, Pair
from tests.bench.gpu.handoff.settings import chosen
from tests.bench.gpu.process import ChildFailed, ucx_choices

CONTROL_TOKENS = 1000
LENGTH_STEP = 128
"""Prompts are one token longer than a multiple of this. With all whole blocks at hand, the decode engine and the
one that served the prompt before both compute one token, by kernels of the same shapes: equal to the last bit."""


class HandoffRow(msgspec.Struct):
    """Medians over the repetitions of one setting and prompt length; times in ms."""

    setting: str
    tokens: int
    mb: float
    descriptors: int
    transfer_ms: float
    post_ms: float
    gb_s: float
    ttft_ms: float
    warm_ms: float
    prefill_ms: float
    token_ms: float
    blocks: str
    equal: str


class HandoffOutcome(msgspec.Struct):
    """The result of one setting: its rows and further figures."""

    setting: str
    up_s: float
    blocks: int
    first_ms: float
    control: str
    rows: list[HandoffRow]
    ucx: list[str]
    error: str = ""


def measure(pair: Pair, options: argparse.Namespace) -> HandoffOutcome:
    """All lengths with one setting. A failure is a result too: the other settings are still measured."""
    outcome = HandoffOutcome(pair.setting.label, 0.0, 0, 0.0, "", [], [])
    vocabulary = int(gpu_model.SHAPES[options.shape]["vocab_size"])
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(length)]

    try:
        outcome.up_s, outcome.blocks = pair.ready()
        length = min(CONTROL_TOKENS, max(options.lengths))
        # The first includes the handshake, in which UCX opens the other side's memory.
        outcome.first_ms = pair.hand_off(prompt(length)).decode.first_s * 1e3
        outcome.control = _equal(pair.hand_off(prompt(length), prompt(length)))
        step = max(LENGTH_STEP, pair.setting.block_size)
        for length in (-(-length // step) * step + 1 for length in options.lengths):
            runs = [pair.hand_off(prompt(length)) for _ in range(options.repeats)]
            outcome.rows.append(_row(pair.setting.label, length, runs))
    except ChildFailed as error:
        outcome.error = str(error)
    outcome.ucx = ucx_choices(pair.decode.log)
    return outcome


def _row(setting: str, length: int, runs: list[HandOff]) -> HandoffRow:
    moved = [run.decode.transfers[-1] for run in runs if run.decode.transfers]
    if not moved:
        raise ChildFailed("vLLM reported no transfer: did the decode engine read anything?")
    seconds = statistics.median(item.seconds for item in moved)

    def ms(values: Iterator[float]) -> float:
        return statistics.median(values) * 1e3

    return HandoffRow(
        setting=setting,
        tokens=length,
        mb=moved[-1].size / 1e6,
        descriptors=moved[-1].descriptors,
        transfer_ms=seconds * 1e3,
        post_ms=ms(item.post_s for item in moved),
        gb_s=moved[-1].size / seconds / 1e9,
        ttft_ms=ms(run.decode.first_s for run in runs),
        warm_ms=ms(run.whole.first_s for run in runs),
        prefill_ms=ms(run.prefill.total_s for run in runs),
        token_ms=ms((run.decode.total_s - run.decode.first_s) / (TOKENS - 1) for run in runs),
        blocks=f"{sum(run.blocks for run in runs)} of {sum(run.of_blocks for run in runs)}",
        equal=" ".join(_equal(run) for run in runs),
    )


def _equal(run: HandOff) -> str:
    """Tokens that agree before the first that does not: decode and whole / again and whole / repeat and decode."""
    pairs = ((run.decode, run.whole), (run.again, run.whole), (run.repeat, run.decode))
    return "/".join(str(_agree(one.tokens, other.tokens)) for one, other in pairs)


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(other))


def run(options: argparse.Namespace) -> list[HandoffOutcome]:
    """Measure all settings; `--together` of them are started concurrently, since starting takes longest."""
    outcomes: list[HandoffOutcome] = []
    settings = chosen(options.settings, options.blocks)
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as folder:
        model = gpu_model.make(Path(folder, options.shape), options.shape)
        for start in range(0, len(settings), options.together):
            wave = settings[start : start + options.together]
            pairs = [Pair(setting, options, model, 5600 + 10 * (start + i)) for i, setting in enumerate(wave)]
            try:
                for pair in pairs:
                    pair_began = time.perf_counter()
                    outcome = measure(pair, options)
                    outcomes.append(outcome)
                    _progress(outcome, time.perf_counter() - pair_began)
                    (options.out / "handoff.json").write_bytes(
                        msgspec.json.format(msgspec.json.encode(outcomes))
                    )
            finally:
                for pair in pairs:
                    pair.stop()
    return outcomes


def _progress(outcome: HandoffOutcome, seconds: float) -> None:
    speeds = " ".join(f"{row.tokens}: {row.gb_s:.1f} GB/s" for row in outcome.rows)
    print(f"{outcome.setting}: {seconds:.0f} s, {speeds} {outcome.error}", file=sys.stderr, flush=True)


def show(outcomes: list[HandoffOutcome]) -> None:
    """Tables for people."""
    for outcome in outcomes:
        print(
            f"{outcome.setting}: up in {outcome.up_s:.0f} s, {outcome.blocks} blocks, first hand-off "
            f"{outcome.first_ms:.0f} ms, control {outcome.control} {outcome.error}"
        )
        for line in outcome.ucx:
            print("   ", line)
    rows = [
        [row.setting, row.tokens, round(row.mb), row.descriptors]
        + [round(getattr(row, name), 2) for name in ("transfer_ms", "post_ms", "gb_s")]
        + [round(getattr(row, name), 1) for name in ("ttft_ms", "warm_ms", "prefill_ms", "token_ms")]
        + [row.blocks, row.equal]
        for outcome in outcomes
        for row in outcome.rows
    ]
    heads = ("setting", "tokens", "MB", "pieces", "xfer ms", "post ms", "GB/s")
    print(table((*heads, "TTFT ms", "warm ms", "prefill ms", "ms/token", "blocks", "equal"), rows))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(gpu_model.SHAPES), default="qwen3-8b")
    parser.add_argument(
        "--settings", default="default", help="comma-separated names, each as NAME or NAME/BLOCK"
    )
    parser.add_argument("--blocks", default="16", help="comma-separated block sizes")
    parser.add_argument("--lengths", default="1000,8000,16000,30000", help="comma-separated prompt tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--together", type=int, default=1, help="settings to start concurrently")
    parser.add_argument("--kv-gb", type=float, default=9.0, help="KV cache of each engine")
    parser.add_argument("--out", type=Path, default=Path("gpu-handoff"))
    options = parser.parse_args()
    options.lengths = [int(length) for length in options.lengths.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    print("machine:", machine())
    show(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
