"""Tokens per second and time to first token: the whole of Headwater beside vLLM's AsyncLLM alone, on one GPU.

    python -m headwater.ops.bench.gpu_serving --out results
    python -m headwater.ops.bench.gpu_serving --device cpu --shape tiny --streams 1,8 --tokens 16   (a check)

Two engines with the same arguments: one alone in a process, called as a library; one behind nats-server, router,
edge and engine actor as `headwater up` starts them, asked over HTTP by several client processes, each answer
streamed. Both are up at once, so that measurements alternate within minutes; only one is asked at a time. With
--alone each has the GPU to itself, one after the other.

Rows are those of `gpu_rounds`.
"""

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headwater.ops.bench import gpu_model
from headwater.ops.bench.gpu_rounds import Row, arguments, measure, parsed
from headwater.ops.bench.gpu_serving_systems import Bare, Fleet
from headwater.ops.bench.report import machine
from headwater.ops.tables import table


def show(rows: list[Row]) -> None:
    """Each measurement, then the comparison of medians over the repeats."""
    names = Row.__struct_fields__
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
    parser = arguments(
        __doc__, streams="1,32,256", rounds="8,4,2", prompt_tokens=1000, tokens=128, repeats=3, kv_gb=45.0
    )
    parser.add_argument("--alone", action="store_true", help="one engine at a time on the GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-serving"))
    options = parsed(parser)
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
                systems = [one.ready() for one in started]
                measure(systems, options, options.streams, "serving.json", rows)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
