"""Fleets that serve images, with and without encode workers, and routing policies, under the same load.

Each `--fleet` is the words of a `headwater up`; fleets run one after the other on this machine. Policies alternate within a fleet.
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from headwater.ops.bench.report import machine
from tests.bench.images import vision_model
from tests.bench.images.load import ImageLoad, ImageRun, run, show
from tests.bench.live.up import FleetProcess, split_words


def start_fleet(words: list[str], model: Path, policies: list[str], folder: Path) -> FleetProcess:
    """`headwater up` with these words and this model without weights, of which clients may choose these policies."""
    allowed = ["--client-policies", ",".join(policies)] if policies else []
    common = ["--engine", "vllm", "--model", str(model), "--served-model-name", "vision"]
    own, native = split_words(words)
    return FleetProcess([*common, *allowed, *own, "--", "--load-format", "dummy", *native], folder)


async def measure(url: str, name: str, load: ImageLoad, policies: list[str], repeats: int) -> list[ImageRun]:
    """All policies in turn, `repeats` times, after one run to warm up; the runs of a policy as one."""
    names = {policy: f"{name} {policy}".strip() for policy in policies or [""]}
    await run(url, load._replace(requests=2), name, policies[0] if policies else "", -1)
    runs: dict[str, ImageRun] = {}
    for number in range(repeats):
        for policy, title in names.items():
            found = await run(url, load, title, policy, number)
            before = runs.get(title)
            if before is not None:
                found = ImageRun(
                    title,
                    before.answers + found.answers,
                    before.seconds + found.seconds,
                    before.legs + found.legs,
                )
            runs[title] = found
    return list(runs.values())


def bench(options: Any) -> int:
    """Run all fleets and print one table."""
    load = ImageLoad(
        "vision",
        options.clients,
        options.requests,
        options.images,
        options.side,
        options.tokens,
        options.words_first,
    )
    policies = [word for word in options.policies.split(",") if word]
    print(f"images: {load.describe()}; {options.repeats} repeats; machine {machine()}", flush=True)
    found: list[ImageRun] = []
    with tempfile.TemporaryDirectory(prefix="bench-images-") as temporary:
        model = options.model or vision_model.make(Path(temporary) / "model", options.shape)
        for number, words in enumerate(options.fleet):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            fleet = start_fleet(shlex.split(words), model, policies, folder)
            try:
                url = fleet.url()
                name = words.partition(" -- ")[0]
                found += asyncio.run(measure(url, name, load, policies, options.repeats))
            except Exception:
                print(fleet.last_words(), flush=True)
                raise
            finally:
                fleet.stop()
            print(show(found), flush=True)
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fleet", action="append", required=True, help='words of `headwater up`: "--workers 2"'
    )
    parser.add_argument("--model", type=Path, help="a model folder (default: --shape without weights)")
    parser.add_argument("--shape", choices=tuple(vision_model.SHAPES), default="qwen2-vl-7b")
    parser.add_argument("--policies", default="", help="comma-separated (default: the router's)")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--side", type=int, default=1008, help="pixels of an image's side")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--words-first", action="store_true", help="words before the image: no KV is shared")
    parser.add_argument("--repeats", type=int, default=3)
    return bench(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
