"""A peer's replay of the same traces: NVIDIA Dynamo's, in an environment of its own."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headwater.engines.sim import KV_BYTES_PER_TOKEN, TRANSFER_GB_PER_S
from headwater.ops.bench.trace import TRACE_BLOCK
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.report import GOODPUT_ITL_MS, GOODPUT_TTFT_MS
from tests.bench.zoo import peer_replay
from tests.bench.zoo.figures import Figures

_VERSION = "import importlib.metadata as m, dynamo.replay.api; print(m.version('ai-dynamo'))"


class PeerInstall(NamedTuple):
    """An interpreter, and the release of ai-dynamo in its environment."""

    python: str
    version: str


class PeerRun(NamedTuple):
    """A trace file, and the fleet that it is replayed on: `workers`, or two pools instead of them."""

    file: str
    workers: int
    blocks: int
    prefill_workers: int = 0
    decode_workers: int = 0
    block_size: int = TRACE_BLOCK


def find_peer(python: str) -> PeerInstall:
    """The peer in an interpreter's environment. Raises `ConfigError` if there is none."""
    try:
        # Isolated: neither our PYTHONPATH nor the modules of the script's folder are the peer's.
        done = subprocess.run([python, "-I", "-c", _VERSION], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--peer-python {python}: {error.strerror}; give the Python interpreter of an environment with ai-dynamo"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"--peer-python {python}: {_last_line(done.stderr)}; install ai-dynamo (with dynamo.replay) in its environment"
        )
    return PeerInstall(python, done.stdout.split()[-1])


def replay(peer: PeerInstall, runs: Sequence[PeerRun]) -> list[dict[str, Figures]]:
    """The figures of each run, by the name of the peer's setting. Raises `ConfigError` if its replay fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        task = {
            "out": str(out),
            "ttft_ms": GOODPUT_TTFT_MS,
            "itl_ms": GOODPUT_ITL_MS,
            "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
            "transfer_gb_per_s": TRANSFER_GB_PER_S,
            "runs": [run._asdict() for run in runs],
        }
        done = subprocess.run(
            [peer.python, "-I", str(peer_replay.__file__)],
            input=msgspec.json.encode(task),
            capture_output=True,
            check=False,
            env={**os.environ, "DYN_LOG": "error"},
        )
        if done.returncode:
            raise ConfigError(
                f"the replay of ai-dynamo {peer.version} failed ({peer.python}): {_last_line(done.stderr.decode())}"
            )
        found = msgspec.json.decode(out.read_bytes())
    return [{name: parse(summary) for name, summary in one.items()} for one in found]


def parse(summary: dict[str, Any]) -> Figures:
    """The figures of a replay's summary. Raises `ConfigError` if it lacks one, or if requests were lost."""
    try:
        requests, completed = summary["num_requests"], summary["completed_requests"]
        if requests != completed:
            raise ConfigError(f"the peer's replay completed {completed} of {requests} requests")
        within = summary.get("within_limits")
        return Figures(
            summary["prefix_cache_reused_ratio"],
            summary["mean_ttft_ms"],
            summary["median_ttft_ms"],
            summary["p99_ttft_ms"],
            summary["mean_itl_ms"],
            summary["mean_e2e_latency_ms"],
            summary["p99_e2e_latency_ms"],
            None if within is None else within / requests,
        )
    except KeyError as error:
        raise ConfigError(f"the peer's replay reports no {error}: this release is not supported") from error


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
