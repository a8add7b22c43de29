"""The router's estimates of TTFT, ITL and E2E on a live fleet, next to what clients waited for.

Starts `headwater up` with `--fleet`, sends requests at two rates in turn, and lets `headwater whatif log` compare the decisions
with the request log and `headwater replay --verify` recompute them. Prompts, and limits of answers, have log-uniform lengths;
half of the prompts begin with one of six shared prefixes, half of their length.
"""

import argparse
import asyncio
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.terminal import table
from tests.bench.gpu import model as models
from tests.bench.live.up import FleetProcess

PREFIXES: Final = 6
TOKENS: Final = range(8, 240)
"""Ids of the tokens that prompts are made of. Every model has them."""


class EstimateLoad(NamedTuple):
    """Requests for `seconds`, at `rates` per second in turn, each for `turn_s`."""

    rates: tuple[float, ...]
    turn_s: float
    seconds: float
    prompt: tuple[int, int]
    answer: tuple[int, int]
    ignore_eos: float

    def describe(self) -> str:
        """In a line."""
        rates = " and ".join(f"{rate:g}" for rate in self.rates)
        return (
            f"{rates} requests/s in turn, {self.turn_s:g} s each, for {self.seconds:g} s; prompts of {self.prompt[0]} to {self.prompt[1]} tokens, "
            f"max_tokens {self.answer[0]} to {self.answer[1]}, {self.ignore_eos:.0%} of them reached"
        )


class EstimateRow(NamedTuple):
    """A line of `whatif log`: milliseconds. See `ops.whatif.report.EstimateError`."""

    measure: str
    requests: int
    estimated_mean: float
    was_mean: float
    error: float
    constant_error: float


async def send(url: str, name: str, load: EstimateLoad, seed: int) -> list[int]:
    """Send the requests; returns their HTTP statuses."""
    import httpx

    draw = random.Random(seed)
    prefixes = [_tokens(random.Random(f"prefix {number}"), load.prompt[1]) for number in range(PREFIXES)]

    async def one(body: dict[str, Any]) -> int:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass
            return answer.status_code

    tasks = []
    limits = httpx.Limits(max_connections=1_000)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        began = time.monotonic()
        at = 0.0
        while at < load.seconds:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            body = {
                "model": name,
                "prompt": _prompt(draw, load, prefixes),
                "max_tokens": _log_uniform(draw, load.answer),
                "ignore_eos": draw.random() < load.ignore_eos,
                "stream": True,
            }
            tasks.append(asyncio.create_task(one(body)))
            at += draw.expovariate(load.rates[int(at / load.turn_s) % len(load.rates)])
        return list(await asyncio.gather(*tasks))


def _prompt(draw: random.Random, load: EstimateLoad, prefixes: list[list[int]]) -> list[int]:
    length = _log_uniform(draw, load.prompt)
    shared = draw.choice(prefixes)[: length // 2] if draw.random() < 0.5 else []
    return [*shared, *_tokens(draw, length - len(shared))]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(TOKENS, k=count)


def _log_uniform(draw: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    drawn: float = low * (high / low) ** draw.random()
    return round(drawn)


def compare(nats_url: str) -> list[EstimateRow]:
    """What `whatif log` finds in the fleet's log. Raises RuntimeError."""
    words = ["whatif", "log", "--json", "--nats", nats_url]
    data = msgspec.json.decode(_run(words))
    found = data["fidelity"]["estimates"] if "fidelity" in data else data["estimates"]
    return [EstimateRow(**one) for one in found]


def _run(words: list[str]) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "headwater.ops.cli", *words], capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"headwater {' '.join(words)}: {done.stderr.decode()[-2000:]}")
    return done.stdout


def bench(options: Any) -> int:
    """Start the fleet, send the load and print the table."""
    load = EstimateLoad(
        tuple(float(rate) for rate in options.rates.split(",")),
        options.turn_s,
        options.seconds,
        options.prompt,
        options.answer,
        options.ignore_eos,
    )
    print(f"estimates: up {options.fleet}; {load.describe()}; machine {machine()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-estimates-") as temporary:
        folder = Path(temporary)
        words = shlex.split(options.fleet)
        if options.shape:
            model = models.make(folder / "model", options.shape)
            words = ["--model", str(model), "--served-model-name", options.name, *words]
        fleet = FleetProcess(words, folder)
        try:
            url = fleet.url()
            statuses = asyncio.run(send(url, options.name, load, options.seed))
            rows = compare(fleet.nats_url)
            verified = _run(["replay", "--verify", "--nats", fleet.nats_url]).decode().strip().splitlines()
        except Exception:
            print(fleet.last_words(), flush=True)
            raise
        finally:
            fleet.stop()
    columns = ("measure", "requests", "mean estimated", "mean was", "mean absolute error", "best constant")
    print(table(columns, [(row[0], row[1], *(f"{ms:,.1f}" for ms in row[2:])) for row in rows]))
    failed = sum(status != 200 for status in statuses)
    print(f"{len(statuses)} requests, {failed} failed; load average {statistics.fmean(os.getloadavg()):.1f}")
    print(verified[-1] if verified else "")
    return 1 if failed else 0


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fleet", default="--engine sim --workers 4", help="words of `headwater up` (default: %(default)s)"
    )
    parser.add_argument(
        "--shape",
        choices=tuple(models.SHAPES),
        help="make a model of this shape without weights, and serve it",
    )
    parser.add_argument("--name", default="sim", help="the model's name in requests (default: %(default)s)")
    parser.add_argument("--rates", default="2,8", help="requests per second, in turn (default: %(default)s)")
    parser.add_argument("--turn-s", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--prompt", type=_bounds, default=(100, 6_000), help="tokens, as in 100-6000")
    parser.add_argument("--answer", type=_bounds, default=(20, 400), help="max_tokens, as in 20-400")
    parser.add_argument(
        "--ignore-eos", type=float, default=0.5, help="share of requests that reach max_tokens"
    )
    parser.add_argument("--seed", type=int, default=1)
    return bench(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
