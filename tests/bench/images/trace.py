"""A trace of requests with images, for `headwater whatif`: words that no other request has, one of a few popular images, a question.

python -m tests.bench.images.trace images.jsonl --requests 2000 --images 200 --rate 12
"""

import argparse
import random
from pathlib import Path

import msgspec

TRACE_BLOCK = 512
"""Tokens per id, in Mooncake's format."""

IMAGE_TOKENS = 1_225
"""Of an image of 1,008 x 1,008 pixels, by the simulated engine's rule."""

WORDS = (64, 192)
QUESTION = 64


def lines(requests: int, images: int, rate: float, output: int, seed: int) -> list[bytes]:
    """The trace's lines. Arrivals are random, `rate` per second; the n-th image is asked for 1/n times as often as the first."""
    draw = random.Random(seed)
    shares = [1 / number for number in range(1, images + 1)]
    found, at_s, block = [], 0.0, 0
    for _ in range(requests):
        at_s += draw.expovariate(rate)
        [image] = draw.choices(range(images), shares)
        words = draw.randint(*WORDS)
        tokens = words + IMAGE_TOKENS + QUESTION
        blocks = -(-tokens // TRACE_BLOCK)
        line = {
            "timestamp": round(at_s * 1000, 3),
            "input_length": tokens,
            "output_length": output,
            "hash_ids": list(range(block, block + blocks)),
            "images": [{"id": f"image-{image}", "start": words, "tokens": IMAGE_TOKENS}],
        }
        block += blocks
        found.append(msgspec.json.encode(line))
    return found


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--images", type=int, default=200, help="different ones")
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = lines(given.requests, given.images, given.rate, given.output, given.seed)
    given.file.write_bytes(b"\n".join(found) + b"\n")


if __name__ == "__main__":
    main()
