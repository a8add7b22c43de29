"""What a hand-off adds to the time to the first token: one prefill and one decode worker compared with one that does both.

    python -m tests.bench.gpu.handoff.fleet --out results
    python -m tests.bench.gpu.handoff.fleet --device cpu --shape tiny --lengths 100,500     (a check, no figures)

SGLang: its two legs run at the same time, so that its hand-off cannot be timed by calling one engine after the other (for vLLM
see `gpu.handoff.run`). Both fleets are started by `headwater up`: 1P1D on two GPUs, and an aggregated worker on the first of
them. Each prompt is sent to both fleets twice, one request at a time. The first time it is computed; the second time
the prefill worker has it cached, and its KV is handed over again, as SGLang's decode worker keeps none.

`new` and `cached` are the times to the first token; `MiB`, `transfer` and `GiB/s` are SGLang's own figures for the cached
prompts (for a new one its clock includes the computation of later chunks). `equal`: answers to new prompts that are the same
after a hand-off as without one.

Two prompts that differ only far from their end are asked first: if their answers were equal, equal answers would show nothing,
and the benchmark ends with an error. So it does when fewer transfers were counted than prompts were sent.
"""

import argparse
import asyncio
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.monitoring.files import TARGETS
from headwater.ops.terminal import table
from tests.bench.gpu import load as gpu_load
from tests.bench.gpu import model as gpu_model
from tests.bench.gpu.load import SYMBOLS, Sample
from tests.bench.gpu.serving_systems import ONE_WORKER, FleetUnderTest

APART = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregate", "always")
PREFILL_WORKER = "prefill-0"
WARM_TOKENS = 100
CONTROL_TAIL = 400
COUNTED_S = 10.0
"""How long a transfer may take to be counted after its answer has ended."""

FIGURE = re.compile(
    r"^sglang:kv_transfer_(total_mb|latency_ms|speed_gb_s)_(sum|count)(?:\{.*\})? (\S+)$", re.M
)


class EngineFigures(NamedTuple):
    """SGLang's sums over all transfers of a prefill worker, and their number. Its units of 2^20 and 2^30 bytes are called
    MB and GB in its metrics."""

    transfers: float
    mib: float
    latency_ms: float
    gib_s: float


class HandoffAnswer(NamedTuple):
    """An answer: its times, its text, and how many tokens of its prompt were cached."""

    sample: Sample
    text: str
    cached: int


class HandoffRepeat(NamedTuple):
    """One prompt, sent twice to each fleet, and SGLang's figures of the second transfer."""

    new: HandoffAnswer
    cached: HandoffAnswer
    new_together: HandoffAnswer
    cached_together: HandoffAnswer
    transfer: EngineFigures


class FleetHandoffRow(msgspec.Struct):
    """Medians over the repetitions of one prompt length; times in ms."""

    tokens: int
    repeats: int
    new_ms: float
    new_together_ms: float
    cached_ms: float
    cached_together_ms: float
    mib: float
    transfer_ms: float
    gib_s: float
    cached: int
    equal: int


class FleetClient:
    """Sends one request at a time to a fleet, over one connection."""

    def __init__(self, fleet: FleetUnderTest) -> None:
        self._host, self._port, self.up_s, self._model = fleet.address()
        self._data = fleet.data
        self._reader: Any = None
        self._writer: Any = None

    async def __aenter__(self) -> "FleetClient":
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, prompt: str, tokens: int) -> HandoffAnswer:
        """The answer to a prompt, at temperature 0."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample, received = await gpu_load.stream(self._reader, self._writer, msgspec.json.encode(body))
        events = [
            msgspec.json.decode(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")
        ]
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), tokens):
            raise RuntimeError(f"asked for {len(prompt)} and {tokens} tokens, got {usage}")
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        return HandoffAnswer(sample, text, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    def figures(self) -> EngineFigures:
        """SGLang's, from the metrics of the prefill worker."""
        targets = msgspec.json.decode((self._data / TARGETS).read_bytes())
        [target] = [one["targets"][0] for one in targets if one["labels"]["name"] == PREFILL_WORKER]
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as response:
            text = response.read().decode()
        sums: dict[str, float] = {}
        for name, kind, value in FIGURE.findall(text):
            key = "count" if kind == "count" else name
            if kind == "sum" or name == "latency_ms":
                sums[key] = sums.get(key, 0.0) + float(value)
        return EngineFigures(
            sums.get("count", 0.0),
            sums.get("total_mb", 0.0),
            sums.get("latency_ms", 0.0),
            sums.get("speed_gb_s", 0.0),
        )

    async def handed_over(self, prompt: str, tokens: int) -> tuple[HandoffAnswer, EngineFigures]:
        """The answer to a prompt after a hand-off, and the figures of its transfer alone."""
        before = self.figures()
        answer = await self.ask(prompt, tokens)
        deadline = time.monotonic() + COUNTED_S
        while (after := self.figures()).transfers <= before.transfers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang counted no transfer for a prompt of {len(prompt)} tokens")
            await asyncio.sleep(0.05)
        if after.transfers != before.transfers + 1:
            raise RuntimeError(
                f"SGLang counted {after.transfers - before.transfers:.0f} transfers for one prompt"
            )
        return answer, EngineFigures(*(late - early for late, early in zip(after, before)))


async def measure(
    apart: FleetClient, together: FleetClient, options: argparse.Namespace
) -> list[FleetHandoffRow]:
    """All lengths. Raises `RuntimeError` where a figure would mean nothing."""
    draw = random.Random(time.time_ns())

    def prompt(length: int) -> str:
        return "".join(draw.choices(SYMBOLS, k=length))

    began = time.monotonic()
    await apart.handed_over(prompt(WARM_TOKENS), options.tokens)
    print(f"first hand-off: {time.monotonic() - began:.2f} s", flush=True)
    await _control(together, prompt, options)
    rows = []
    for length in options.lengths:
        # The first of a length may compile.
        await _repeat(apart, together, prompt(length), options.tokens)
        repeats = [
            await _repeat(apart, together, prompt(length), options.tokens) for _ in range(options.repeats)
        ]
        rows.append(row(length, repeats))
        print(rows[-1], file=sys.stderr, flush=True)
        (options.out / "handoff-fleet.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    return rows


async def _control(fleet: FleetClient, prompt: Callable[[int], str], options: argparse.Namespace) -> None:
    length = min(2 * CONTROL_TAIL, *options.lengths)
    tail = prompt(min(CONTROL_TAIL, length // 2))
    answers = [(await fleet.ask(prompt(length - len(tail)) + tail, options.tokens)).text for _ in range(2)]
    print(f"control: two prompts with the same last {len(tail)} tokens: {answers}", flush=True)
    if answers[0] == answers[1]:
        raise RuntimeError("answers do not depend on the whole prompt: equal ones would show nothing")


async def _repeat(apart: FleetClient, together: FleetClient, prompt: str, tokens: int) -> HandoffRepeat:
    new, _ = await apart.handed_over(prompt, tokens)
    cached, transfer = await apart.handed_over(prompt, tokens)
    return HandoffRepeat(
        new, cached, await together.ask(prompt, tokens), await together.ask(prompt, tokens), transfer
    )


def row(length: int, repeats: list[HandoffRepeat]) -> FleetHandoffRow:
    """The medians of one prompt length."""

    def first_ms(answers: Iterable[HandoffAnswer]) -> float:
        return statistics.median(answer.sample.first_s for answer in answers) * 1e3

    return FleetHandoffRow(
        tokens=length,
        repeats=len(repeats),
        new_ms=first_ms(one.new for one in repeats),
        new_together_ms=first_ms(one.new_together for one in repeats),
        cached_ms=first_ms(one.cached for one in repeats),
        cached_together_ms=first_ms(one.cached_together for one in repeats),
        mib=statistics.median(one.transfer.mib for one in repeats),
        transfer_ms=statistics.median(one.transfer.latency_ms for one in repeats),
        gib_s=statistics.median(one.transfer.gib_s for one in repeats),
        cached=min(one.cached.cached for one in repeats),
        equal=sum(one.new.text == one.new_together.text for one in repeats),
    )


def show(rows: list[FleetHandoffRow]) -> None:
    """A table for people."""
    heads = (
        "tokens",
        "MiB",
        "new",
        "together",
        "cached",
        "together",
        "transfer",
        "GiB/s",
        "cached tokens",
        "equal",
    )
    lines = [
        [row.tokens, round(row.mib)]
        + [
            round(value, 1)
            for value in (
                row.new_ms,
                row.new_together_ms,
                row.cached_ms,
                row.cached_together_ms,
                row.transfer_ms,
                row.gib_s,
            )
        ]
        + [row.cached, f"{row.equal} of {row.repeats}"]
        for row in rows
    ]
    print(table(heads, lines))


async def run(apart: FleetUnderTest, together: FleetUnderTest, options: argparse.Namespace) -> None:
    """Measure and print, when both fleets serve."""
    async with FleetClient(apart) as first, FleetClient(together) as second:
        print(f"up in {first.up_s:.0f} and {second.up_s:.0f} s", file=sys.stderr, flush=True)
        show(await measure(first, second, options))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(gpu_model.SHAPES), default="qwen3-8b")
    parser.add_argument("--lengths", default="1000,8000,30000", help="comma-separated prompt tokens")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-gb", type=float, default=20.0, help="KV cache of each engine")
    parser.add_argument("--out", type=Path, default=Path("gpu-handoff-fleet"))
    options = parser.parse_args()
    options.lengths = [int(length) for length in options.lengths.split(",")]
    options.engine, options.weights, options.prompt_tokens = "sglang", "scaled", max(options.lengths)
    options.out.mkdir(parents=True, exist_ok=True)
    print("machine:", machine(), flush=True)
    both = {"CUDA_VISIBLE_DEVICES": "0,1"} if options.device == "cuda" else None
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-") as name, ExitStack() as stack:
        folder = Path(name)
        model = gpu_model.make(folder / options.shape, options.shape)
        apart = FleetUnderTest(options, model, folder, name="1P1D", workers=APART, environ=both)
        stack.callback(apart.stop)
        together = FleetUnderTest(options, model, folder, name="aggregated", workers=ONE_WORKER)
        stack.callback(together.stop)
        asyncio.run(run(apart, together, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
