"""`headwater bench hash`: tokens to sequence hashes."""

import time

import numpy as np

from headwater.ops.bench.report import Measure, Report
from headwater.schemas import hashing

TOKENS = 131_072
REPEATS = 200


def bench() -> Report:
    """Best and median time to hash a prompt of 131,072 tokens at block sizes 16 and 64, on one core."""
    tokens = np.random.default_rng(0).integers(0, 150_000, TOKENS, dtype=np.uint32)
    measures: list[Measure] = []
    for size in (16, 64):
        hashing.sequence_hashes(tokens, size)
        times: list[float] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            hashing.sequence_hashes(tokens, size)
            times.append((time.perf_counter() - began) * 1000)
        target = "at most 0.3" if size == 16 else ""
        measures.append(Measure(f"block size {size}, median", sorted(times)[REPEATS // 2], "ms", target))
        measures.append(Measure(f"block size {size}, best", min(times), "ms"))
    plain = tokens[:16_384].tolist()
    began = time.perf_counter()
    hashing.chain_plain(plain, 16, 0)
    per_prompt = (time.perf_counter() - began) * 1000 * TOKENS / len(plain)
    measures.append(Measure("plain Python, block size 16", per_prompt, "ms"))
    return Report("hash", {"tokens": TOKENS, "repeats": REPEATS}, measures)
