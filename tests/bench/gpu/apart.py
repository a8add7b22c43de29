"""One prefill and one decode worker compared with two aggregated workers, on the same two GPUs and long prompts.

    python -m tests.bench.gpu.apart --out results
    python -m tests.bench.gpu.apart --engine sglang --out results
    python -m tests.bench.gpu.apart --device cpu --shape tiny --streams 4 --rounds 2 --tokens 16 --prompt-tokens 200

Both fleets are started by `headwater up` with the same engine arguments and run at the same time; they are measured
alternately. KV is transferred between GPUs by NIXL; with vLLM in one piece per block (all layers together), which vLLM 0.24
supports only in its older model runner, so both fleets use that.

Rows are those of `gpu.rounds`; the gap is the delay of decoding requests by others' prompts.
"""

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
from tests.bench.gpu.serving_systems import FleetUnderTest

OPTIONS = '{"nixl": {"enable_cross_layers_blocks": "True"}}'
TOGETHER = ("--workers", "2")
WARM_STREAMS = (4,)
APART = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregate", "always")


def show(rows: list[RoundRow]) -> None:
    """Medians over the repeats."""
    fields = RoundRow.__struct_fields__[4:]
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
    parser = arguments(
        __doc__, streams="4,16,32", rounds="4,3,2", prompt_tokens=8000, tokens=256, repeats=2, kv_gb=40.0
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-apart"))
    options = parsed(parser)
    print("machine:", machine(), flush=True)
    pieces: tuple[str, ...] = ()
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    if options.engine == "vllm" and options.device == "cuda":
        pieces = ("--connector-options", OPTIONS)
        environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as name, ExitStack() as stack:
        folder = Path(name)
        model = gpu_model.make(folder / options.shape, options.shape)
        started = []
        for called, workers in (("2 aggregated", TOGETHER), ("1P1D", (*APART, *pieces))):
            fleet = FleetUnderTest(
                options,
                model,
                folder,
                name=called,
                workers=workers,
                environ=environ if options.device == "cuda" else None,
            )
            stack.callback(fleet.stop)
            started.append(fleet)
        rows: list[RoundRow] = []
        measure([one.ready() for one in started], options, WARM_STREAMS, "apart.json", rows)
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
