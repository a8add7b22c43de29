"""Tokens per second and time to first token: Headwater compared with its engine alone, on one GPU.

    python -m tests.bench.gpu.serving --out results
    python -m tests.bench.gpu.serving --engine sglang --out results
    python -m tests.bench.gpu.serving --engine sglang --systems bare,own-server,headwater
    python -m tests.bench.gpu.serving --systems headwater,headwater-engine-context --streams 256
    python -m tests.bench.gpu.serving --device cpu --shape tiny --streams 1,8 --tokens 16   (a check)

Two engines with the same arguments: one alone in a process, called as a library (vLLM's AsyncLLM, SGLang's Engine); one behind nats-server, router,
edge and worker as `headwater up` starts them, with streamed HTTP requests of several client processes. Both run at the same
time, so that measurements alternate within minutes; only one is measured at a time. With --alone each has the GPU to
itself, one after the other. --systems compares others with the first that it names:

    *-engine-context     vLLM with steps as small as its defaults for a library (see `--engine-defaults`)
    own-server           the engine's own OpenAI-compatible HTTP server (`vllm serve`, `sglang.launch_server`), with the fleet's clients
    own-server-observed  the same, publishing KV events and counting metrics as a worker's engine does

Rows are those of `gpu.rounds`.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headwater.ops.bench.report import machine
from headwater.ops.terminal import table
from tests.bench.gpu import model as gpu_model
from tests.bench.gpu.rounds import RoundRow, arguments, measure, parsed
from tests.bench.gpu.serving_systems import Bare, FleetUnderTest, OwnServer

SYSTEMS = (
    "bare",
    "bare-engine-context",
    "own-server",
    "own-server-observed",
    "headwater",
    "headwater-engine-context",
)
COMPARED = ("ttft_min_ms", "ttft_p50_ms", "ttft_p99_ms", "gaps_p99_ms", "gap_max_ms")


def show(rows: list[RoundRow]) -> None:
    """Each measurement, then medians over the repeats: of the first system, and of the others compared with it."""
    names = RoundRow.__struct_fields__
    print(table(names, [[_short(getattr(row, name)) for name in names] for row in rows]))
    lines = []
    for streams in dict.fromkeys(row.streams for row in rows):
        first: dict[str, float] = {}
        for system in dict.fromkeys(row.system for row in rows):
            of = [row for row in rows if (row.streams, row.system) == (streams, system)]
            if not of:
                continue
            here = {
                name: statistics.median(getattr(row, name) for row in of) for name in ("tokens_s", *COMPARED)
            }
            first = first or here
            ratio = here["tokens_s"] / first["tokens_s"]
            longest = max(row.gap_max_ms for row in of)
            figures = [here["tokens_s"], ratio, *(here[name] for name in COMPARED), longest]
            lines.append([streams, system, len(of), *map(_short, figures)])
    print(
        table(("streams", "system", "repeats", "tokens_s", "of the first", *COMPARED, "longest gap"), lines)
    )


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _start(
    options: argparse.Namespace, model: Path, folder: Path, name: str
) -> Bare | OwnServer | FleetUnderTest:
    given = argparse.Namespace(**vars(options))
    if name.endswith("-engine-context"):
        given.engine_defaults = "engine-context"
    if name.startswith("bare"):
        return Bare(given, model, folder, name=name)
    if name.startswith("own-server"):
        return OwnServer(given, model, folder, name=name)
    return FleetUnderTest(given, model, folder, name=name)


def main() -> int:
    """Command line."""
    parser = arguments(
        __doc__, streams="1,32,256", rounds="8,4,2", prompt_tokens=1000, tokens=128, repeats=3, kv_gb=45.0
    )
    parser.add_argument("--systems", default="bare,headwater", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--alone", action="store_true", help="one engine at a time on the GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-serving"))
    parser.add_argument(
        "--keep", action="store_true", help="keep the fleets' data folders, with their logs, in --out"
    )
    options = parsed(parser)
    systems = options.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems: there is no {', '.join(unknown)}")
    if options.engine != "vllm" and any(name.endswith("-engine-context") for name in systems):
        parser.error("--systems: *-engine-context are vLLM's: omit them with another --engine")
    print("machine:", machine(), flush=True)
    rows: list[RoundRow] = []
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as name:
        folder = options.out if options.keep else Path(name)
        model = gpu_model.make(folder / options.shape, options.shape)
        for group in [[one] for one in systems] if options.alone else [systems]:
            with ExitStack() as stack:
                started = []
                for system in group:
                    started.append(_start(options, model, folder, system))
                    stack.callback(started[-1].stop)
                ready = [one.ready() for one in started]
                measure(ready, options, options.streams, "serving.json", rows)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
