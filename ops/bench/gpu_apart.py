"""One prefill and one decode worker beside two workers that do both, on the same two GPUs and long prompts.

    python -m headwater.ops.bench.gpu_apart --out results
    python -m headwater.ops.bench.gpu_apart --device cpu --shape tiny --streams 4 --rounds 2 --tokens 16 --prompt-tokens 200

Both fleets are started by `headwater up` with the same engine arguments and are up at once; only one is asked at a
time, in turns. KV goes from GPU to GPU by NIXL in one piece per block (all layers together), which vLLM 0.24 does in
its older model runner only, so both fleets use that.

Tokens per second are of all answers; TTFT is to the first token of an answer; the longest gap is, of each request, the
longest it waited for a next token: what others' prompts cost those who decode.
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
from headwater.ops.bench.gpu_serving_systems import Fleet, System
from headwater.ops.bench.report import machine, percentile
from headwater.ops.tables import table

OPTIONS = '{"nixl": {"enable_cross_layers_blocks": "True"}}'
TOGETHER = ("--workers", "2")
APART = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregate", "always")


class Row(msgspec.Struct):
    """One measurement; times in ms."""

    system: str
    streams: int
    repeat: int
    requests: int
    tokens_s: float
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    token_p99: float
    gap_p50: float
    gap_p99: float


def _row(system: str, streams: int, repeat: int, result: Result) -> Row:
    first = [sample.first_s * 1e3 for sample in result.samples]
    later = [(s.total_s - s.first_s) / max(1, s.tokens - 1) * 1e3 for s in result.samples]
    gaps = [sample.gap_s * 1e3 for sample in result.samples]
    return Row(
        system,
        streams,
        repeat,
        len(result.samples),
        sum(s.tokens for s in result.samples) / (result.ended_s - result.began_s),
        *(percentile(values, share) for values in (first, later, gaps) for share in (0.5, 0.99)),
    )


def measure(systems: list[System], options: argparse.Namespace) -> list[Row]:
    """Warm all, then every concurrency, the systems in turns."""
    seed = int(time.time())
    rows: list[Row] = []
    for system in systems:
        print(f"{system.name}: up in {system.up_s:.0f} s", file=sys.stderr, flush=True)
        system.ask(Load(4, 1, options.prompt_tokens, min(8, options.tokens), seed))
    for streams, rounds in zip(options.streams, options.rounds):
        for repeat in range(options.repeats):
            for system in systems if repeat % 2 == 0 else systems[::-1]:
                seed += 1
                result = system.ask(Load(streams, rounds, options.prompt_tokens, options.tokens, seed))
                rows.append(_row(system.name, streams, repeat, result))
                print(rows[-1], file=sys.stderr, flush=True)
                (options.out / "apart.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    return rows


def show(rows: list[Row]) -> None:
    """Medians over the repeats."""
    fields = Row.__struct_fields__[4:]
    keys = dict.fromkeys((row.streams, row.system) for row in rows)
    lines: list[list[Any]] = []
    for streams, system in keys:
        of = [row for row in rows if (row.streams, row.system) == (streams, system)]
        lines.append(
            [streams, system, *(round(statistics.median(getattr(r, f) for r in of), 1) for f in fields)]
        )
    print(table(("streams", "workers", *fields), lines))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(gpu_model.SHAPES), default="qwen3-8b")
    parser.add_argument("--streams", default="4,16,32", help="concurrent requests, several with commas")
    parser.add_argument(
        "--rounds", default="4,3,2", help="requests of each stream in a measurement, likewise"
    )
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-gb", type=float, default=40.0, help="KV cache of each engine")
    parser.add_argument("--out", type=Path, default=Path("gpu-apart"))
    options = parser.parse_args()
    options.streams = [int(number) for number in options.streams.split(",")]
    options.rounds = [int(number) for number in options.rounds.split(",")]
    if len(options.rounds) != len(options.streams):
        parser.error("--rounds and --streams: as many of the one as of the other")
    options.out.mkdir(parents=True, exist_ok=True)
    print("machine:", machine(), flush=True)
    pieces = ("--connector-options", OPTIONS) if options.device == "cuda" else ()
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as name, ExitStack() as stack:
        folder = Path(name)
        model = gpu_model.make(folder / options.shape, options.shape)
        started = []
        for called, workers in (("2 aggregated", TOGETHER), ("1P1D", (*APART, *pieces))):
            fleet = Fleet(
                options,
                model,
                folder,
                name=called,
                workers=workers,
                environ=environ if options.device == "cuda" else None,
            )
            stack.callback(fleet.stop)
            started.append(fleet)
        show(measure([one.ready() for one in started], options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
