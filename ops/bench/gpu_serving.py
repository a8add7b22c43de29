"""Tokens per second and time to first token: the whole of Headwater beside vLLM's AsyncLLM alone, on one GPU.

    python -m headwater.ops.bench.gpu_serving --out results
    python -m headwater.ops.bench.gpu_serving --device cpu --shape tiny --streams 1,8 --tokens 16   (a check)

Two engines with the same arguments: one alone in a process, called as a library; one behind nats-server, router,
edge and engine actor as `headwater up` starts them, asked over HTTP by several client processes, each answer
streamed. Both are up at once, so that measurements alternate within minutes; only one is asked at a time. With
--alone each has the GPU to itself, one after the other.

Tokens per second are of all answers, over the time from the first request to the last token; TTFT is what a
client sees.
"""

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from headwater.ops.bench import gpu_model
from headwater.ops.bench.gpu_load import Load, Result
from headwater.ops.bench.gpu_serving_systems import Bare, Fleet, System
from headwater.ops.bench.report import machine, percentile
from headwater.ops.tables import table

WARM_TOKENS = 8


class Row(msgspec.Struct):
    """One measurement."""

    system: str
    streams: int
    repeat: int
    requests: int
    tokens_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    token_ms: float


def measure(systems: list[System], options: argparse.Namespace, rows: list[Row]) -> None:
    """Warm all, then every concurrency, the systems in turns."""
    seed = int(time.time())
    for system in systems:
        print(f"{system.name}: up in {system.up_s:.0f} s", file=sys.stderr, flush=True)
        for streams in options.streams:
            seed += 1
            system.ask(Load(streams, 1, options.prompt_tokens, min(WARM_TOKENS, options.tokens), seed))
    for streams, rounds in zip(options.streams, options.rounds):
        for repeat in range(options.repeats):
            # Whoever is asked second may find the GPU warmer: take turns.
            for system in systems if repeat % 2 == 0 else systems[::-1]:
                seed += 1
                result = system.ask(Load(streams, rounds, options.prompt_tokens, options.tokens, seed))
                rows.append(_row(system.name, streams, repeat, result))
                print(rows[-1], file=sys.stderr, flush=True)
                (options.out / "serving.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


def _row(system: str, streams: int, repeat: int, result: Result) -> Row:
    first = [sample.first_s * 1e3 for sample in result.samples]
    later = [(s.total_s - s.first_s) / max(1, s.tokens - 1) * 1e3 for s in result.samples]
    return Row(
        system=system,
        streams=streams,
        repeat=repeat,
        requests=len(result.samples),
        tokens_s=sum(s.tokens for s in result.samples) / (result.ended_s - result.began_s),
        ttft_p50_ms=percentile(first, 0.5),
        ttft_p99_ms=percentile(first, 0.99),
        token_ms=percentile(later, 0.5),
    )


def show(rows: list[Row]) -> None:
    """Each measurement, then the comparison of medians over the repeats."""
    names = ("system", "streams", "repeat", "requests", "tokens_s", "ttft_p50_ms", "ttft_p99_ms", "token_ms")
    print(table(names, [[_short(getattr(row, name)) for name in names] for row in rows]))
    compared = []
    for streams in dict.fromkeys(row.streams for row in rows):
        of = {
            name: [row for row in rows if row.streams == streams and row.system == name]
            for name in ("bare", "headwater")
        }
        if not all(of.values()):
            continue
        speed, first, last = (
            {name: statistics.median(getattr(row, field) for row in of[name]) for name in of}
            for field in ("tokens_s", "ttft_p50_ms", "ttft_p99_ms")
        )
        compared.append(
            [streams, _short(speed["headwater"] / speed["bare"])]
            + [_short(one["headwater"] - one["bare"]) for one in (first, last)]
        )
    print(table(("streams", "tokens/s of bare", "TTFT p50 + ms", "TTFT p99 + ms"), compared))


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(gpu_model.SHAPES), default="qwen3-8b")
    parser.add_argument("--streams", default="1,32,256", help="concurrent requests, several with commas")
    parser.add_argument(
        "--rounds", default="8,4,2", help="requests of each stream in a measurement, likewise"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gb", type=float, default=45.0, help="KV cache of each engine")
    parser.add_argument("--alone", action="store_true", help="one engine at a time on the GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-serving"))
    options = parser.parse_args()
    options.streams = [int(number) for number in options.streams.split(",")]
    options.rounds = [int(number) for number in options.rounds.split(",")]
    if len(options.rounds) != len(options.streams):
        parser.error("--rounds and --streams: as many of the one as of the other")
    options.out.mkdir(parents=True, exist_ok=True)
    print("machine:", machine(), flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as name:
        folder = Path(name)
        model = gpu_model.make(folder / options.shape, options.shape)
        groups: list[list[type[Bare] | type[Fleet]]] = [[Bare], [Fleet]] if options.alone else [[Bare, Fleet]]
        for group in groups:
            with ExitStack() as stack:
                started = []
                for start in group:
                    started.append(start(options, model, folder))
                    stack.callback(started[-1].stop)
                measure([one.ready() for one in started], options, rows)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
