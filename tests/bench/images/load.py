"""Clients in a closed loop that ask about a few images, and what their requests took.

Each request has one of the images and words of its own. With the words after the image, requests with the same image share the KV of it; with
the words before it they share only its embedding. Each run has a cache salt of its own, so it starts with nothing cached.
"""

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

from headwater.ops.terminal import table
from tests.bench.images.pictures import data_url


class ImageLoad(NamedTuple):
    """`clients` send `requests` each, with one of `images` pictures of `side` x `side` pixels, for answers of `tokens` tokens."""

    model: str = "vision"
    clients: int = 16
    requests: int = 8
    images: int = 4
    side: int = 1008
    tokens: int = 32
    words_first: bool = False

    def describe(self) -> str:
        """In a line."""
        where = "before" if self.words_first else "after"
        return (
            f"{self.clients} clients, {self.requests} requests each, one of {self.images} images of {self.side} x {self.side} pixels per "
            f"request, words of its own {where} it, answers of {self.tokens} tokens"
        )


class ImageAnswer(NamedTuple):
    """One request: seconds to its first token, the longest gap after it, tokens of its prompt, and those that the engine found cached."""

    first_s: float
    gap_s: float
    prompt_tokens: int
    cached_tokens: int


class ImageRun(NamedTuple):
    """All requests of a run, in `seconds`. `legs` counts the images by how encode legs ended."""

    name: str
    answers: list[ImageAnswer]
    seconds: float
    legs: Counter[str]


async def run(url: str, load: ImageLoad, name: str, policy: str, number: int) -> ImageRun:
    """All clients at the fleet at `url`, each with its own sequence of images, equal for every run with this number."""
    import httpx

    salt = f"bench {name} {number} {time.time_ns()}"
    urls = [data_url(seed, load.side) for seed in range(load.images)]
    limits = httpx.Limits(max_connections=load.clients + 1)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(place: int) -> list[ImageAnswer]:
            draw = random.Random(f"{number} {place}")
            return [
                await _ask(
                    client, load, policy, salt, draw.choice(urls), f"{number} {place} {turn}: what is it?"
                )
                for turn in range(load.requests)
            ]

        before = await encode_legs(client)
        began = time.perf_counter()
        found = await asyncio.gather(*(one(place) for place in range(load.clients)))
        seconds = time.perf_counter() - began
        legs = await encode_legs(client) - before
    return ImageRun(name, [answer for each in found for answer in each], seconds, legs)


async def encode_legs(client: Any) -> Counter[str]:
    """The edge's count of images that it considered for encode workers, by outcome."""
    page = (await client.get("/metrics")).text
    found = re.findall(r'^headwater_edge_encode_legs_total{outcome="(\w+)"} ([0-9.]+)', page, re.M)
    return Counter({outcome: int(float(count)) for outcome, count in found})


async def _ask(client: Any, load: ImageLoad, policy: str, salt: str, url: str, words: str) -> ImageAnswer:
    image, text = {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}
    body = {
        "model": load.model,
        "messages": [{"role": "user", "content": [text, image] if load.words_first else [image, text]}],
        "max_tokens": load.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    headers = {"x-headwater-policy": policy} if policy else {}
    began = last = time.perf_counter()
    first_s, gap_s, usage = 0.0, 0.0, dict[str, Any]()
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                now = time.perf_counter()
                if first_s:
                    gap_s = max(gap_s, now - last)
                first_s, last = first_s or now - began, now
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ImageAnswer(first_s or time.perf_counter() - began, gap_s, usage["prompt_tokens"], cached)


COLUMNS = (
    "run",
    "requests",
    "KV reuse",
    "encoded apart",
    "had it",
    "left",
    "failed",
    "TTFT mean ms",
    "p50",
    "p99",
    "longest gap p50 ms",
    "p99",
    "requests/s",
)


def show(runs: list[ImageRun]) -> str:
    """A row for each run."""
    rows = []
    for one in runs:
        first = sorted(answer.first_s * 1000 for answer in one.answers)
        gaps = sorted(answer.gap_s * 1000 for answer in one.answers)
        prompt = sum(answer.prompt_tokens for answer in one.answers)
        cached = sum(answer.cached_tokens for answer in one.answers)
        rows.append(
            (
                one.name,
                len(one.answers),
                f"{cached / prompt:.3f}",
                *(one.legs[outcome] for outcome in ("computed", "cached", "local", "failed")),
                f"{statistics.mean(first):,.0f}",
                f"{_quantile(first, 0.5):,.0f}",
                f"{_quantile(first, 0.99):,.0f}",
                f"{_quantile(gaps, 0.5):,.0f}",
                f"{_quantile(gaps, 0.99):,.0f}",
                f"{len(one.answers) / one.seconds:.2f}",
            )
        )
    return table(COLUMNS, rows)


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]
