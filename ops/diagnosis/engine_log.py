"""Why an engine did not start, by what it said: the reason of its failure, or its log. Pure.

Engines print hundreds of lines after the cause, and the last one is seldom it. The patterns are words of vLLM, SGLang, TensorRT-LLM, torch,
NCCL and the connectors, as their users report them.
"""

import re
from collections.abc import Sequence
from typing import Final

from headwater.ops.diagnosis.finding import Finding, finding

LINE_CHARACTERS: Final = 240

_PATTERNS: Final[Sequence[tuple[str, str]]] = (
    # Connectors before memory and CUDA: their libraries fail to load with words of both.
    (
        "engine-connector",
        r"No module named '?(?:nixl|kvbm|lmcache|mooncake|dynamo|kv_connectors?)"
        r"|nixl.{0,60}(?:not (?:available|installed)|failed|error)|NIXL_ERR"
        r"|Unsupported connector|kv_connector.{0,80}(?:not|unknown|unsupported)"
        r"|(?:kvbm|lmcache|mooncake).{0,80}(?:failed|error|timed? ?out)|KVTransferConfig"
        r"|cannot hand over",
    ),
    (
        "engine-memory",
        r"out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|No available memory for the cache blocks"
        r"|larger than the (?:available|maximum) (?:KV cache memory|number of tokens)|KV cache is needed"
        r"|Free memory on device .{0,80}less than desired|Not enough memory|Cannot allocate memory|oom-kill|Killed process",
    ),
    (
        "engine-cuda",
        r"CUDA driver version is insufficient|no CUDA-capable device|No CUDA GPUs are available|driver on your system is too old"
        r"|no kernel image is available|libcud(?:a|art|nn)[\w.]*: cannot open|CUDA error|NVIDIA driver|device-side assert|NCCL error"
        r"|Failed to infer device type|Torch not compiled with CUDA",
    ),
    (
        "engine-port",
        r"Address already in use|EADDRINUSE|ZMQError.{0,40}in use|port \d+ is (?:already )?(?:taken|in use)|server socket has failed to listen",
    ),
)


def explain(text: str, about: str) -> list[Finding]:
    """What a log or the reason of a failure says of its cause: the first of each kind."""
    found = []
    for kind, pattern in _PATTERNS:
        match = re.search(pattern, text, re.IGNORECASE)
        if match is not None:
            found.append((match.start(), finding(kind, about, _line_of(text, match.start()))))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _line_of(text: str, position: int) -> str:
    """The line in which a position is, shortened around it."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[start : end if end >= 0 else len(text)].strip()
    if len(line) <= LINE_CHARACTERS:
        return line
    at = max(0, min(position - start - LINE_CHARACTERS // 3, len(line) - LINE_CHARACTERS))
    return f"…{line[at : at + LINE_CHARACTERS]}…"
