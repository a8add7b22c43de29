"""Systems on the same GPUs measured alternately, at several concurrencies: options, measurements and their rows.

Tokens per second are of all answers, over the time from the first request to the last token; TTFT is to the first token
of an answer, as a client sees it, the shortest of all being `ttft_min_ms`; a token's time is the mean of those after the first, of each request; the gap is the
longest time that a request waited for a next token. `gaps_p99_ms` is of all waits of all requests, and `gap_max_ms`
the longest of them, which ended at `gap_max_at_s` (`time.monotonic`).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headwater.ops.bench.report import percentile
from tests.bench.gpu import model
from tests.bench.gpu.engine_arguments import ENGINES, VLLM_DEFAULTS
from tests.bench.gpu.load import Load, LoadResult, TokenGap
from tests.bench.gpu.serving_systems import System

WARM_TOKENS = 8


class RoundRow(msgspec.Struct):
    """One measurement."""

    system: str
    streams: int
    repeat: int
    requests: int
    tokens_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    token_p50_ms: float
    token_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gaps_p99_ms: float
    gap_max_ms: float
    gap_max_at_s: float
    ttft_min_ms: float = 0.0


def arguments(
    about: str | None,
    *,
    streams: str,
    rounds: str,
    prompt_tokens: int,
    tokens: int,
    repeats: int,
    kv_gb: float,
) -> argparse.ArgumentParser:
    """A command line with the options of every comparison, and these defaults. Parse it with `parsed`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ENGINES), default="vllm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(model.SHAPES), default="qwen3-8b")
    parser.add_argument("--streams", default=streams, help="concurrent requests, several with commas")
    parser.add_argument(
        "--rounds",
        default=rounds,
        help="requests of each stream in a measurement, likewise; the last one counts for all that are missing",
    )
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--kv-gb", type=float, default=kv_gb, help="KV cache of each engine")
    parser.add_argument(
        "--engine-defaults",
        choices=tuple(VLLM_DEFAULTS),
        default="api",
        help="the tokens and requests of a step that vLLM chooses on an H200: as an API server, as a library; or few",
    )
    parser.add_argument(
        "--weights",
        choices=("dummy", "scaled"),
        default="dummy",
        help="the engine's dummy weights, or those with which answers depend on the whole prompt (`gpu.weights`)",
    )
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options; `streams` and `rounds` are lists of the same length, and the folder `out` is there.

    The defaults of `--rounds` match those of `--streams`: with fewer or more of these, they are cut or repeated.
    """
    options = parser.parse_args()
    if options.engine != "vllm" and options.engine_defaults != parser.get_default("engine_defaults"):
        parser.error("--engine-defaults are vLLM's: omit it with another --engine")
    options.streams = [int(number) for number in options.streams.split(",")]
    options.rounds = [int(number) for number in options.rounds.split(",")]
    missing = len(options.streams) - len(options.rounds)
    options.rounds = (options.rounds + options.rounds[-1:] * missing)[: len(options.streams)]
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    return options


def measure(
    systems: list[System], options: argparse.Namespace, warm: Sequence[int], file: str, rows: list[RoundRow]
) -> None:
    """Warm up all with `warm` streams each, then measure every concurrency alternately; adds to `rows` and the file."""
    seed = int(time.time())
    for system in systems:
        print(f"{system.name}: up in {system.up_s:.0f} s", file=sys.stderr, flush=True)
        for streams in warm:
            seed += 1
            system.run_load(Load(streams, 1, options.prompt_tokens, min(WARM_TOKENS, options.tokens), seed))
    for streams, rounds in zip(options.streams, options.rounds):
        for repeat in range(options.repeats):
            # The GPU may be warmer for the second one: alternate the order.
            for system in systems if repeat % 2 == 0 else systems[::-1]:
                seed += 1
                result = system.run_load(Load(streams, rounds, options.prompt_tokens, options.tokens, seed))
                rows.append(row(system.name, streams, repeat, result))
                print(rows[-1], file=sys.stderr, flush=True)
                (options.out / file).write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


def row(system: str, streams: int, repeat: int, result: LoadResult) -> RoundRow:
    """A system's measurement from its results."""
    first = [sample.first_s * 1e3 for sample in result.samples]
    later = [(s.total_s - s.first_s) / max(1, s.tokens - 1) * 1e3 for s in result.samples]
    # Each with its end; a request with a single token has none.
    waits = [sample.gaps() or [TokenGap(0.0, 0.0)] for sample in result.samples]
    gaps = [max(of).took_s * 1e3 for of in waits]
    every = [gap.took_s * 1e3 for of in waits for gap in of]
    longest = max(max(of) for of in waits)
    figures = [percentile(values, share) for values in (first, later, gaps) for share in (0.5, 0.99)]
    figures += [percentile(every, 0.99), longest.took_s * 1e3, longest.until_s, min(first)]
    tokens_s = sum(s.tokens for s in result.samples) / (result.ended_s - result.began_s)
    return RoundRow(system, streams, repeat, len(result.samples), tokens_s, *figures)
