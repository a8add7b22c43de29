"""Does routing count a prompt that was evicted to host memory? One worker with a small cache on its GPU.

    python -m tests.bench.gpu.tiers                (a GPU; vLLM's OffloadingConnector refuses CPUs)
    python -m tests.bench.gpu.tiers --engine sim   (a check of this script: nothing is offloaded)

A prompt is sent, then others until its blocks are evicted from the GPU, then the first again. Printed are the router's
overlap for it each time (`headwater explain`), the engine's cached tokens, and the time to the first token.
"""

import argparse
import random
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from headwater.ops.start.children import headwater_command
from headwater.ops.start.signals import die_with_parent
from headwater.ops.terminal import table
from headwater.schemas.names import host_port
from tests.bench.gpu import model as gpu_model
from tests.bench.gpu.serving_systems import READY, UP_S

SYMBOLS = string.ascii_letters + string.digits
SETTLE_S = 2.0
"""Events of blocks follow the tokens, and those of evictions a later step."""


def _start(
    options: argparse.Namespace, folder: Path, log: Path
) -> tuple[subprocess.Popen[bytes], str, str, str]:
    """The fleet: its process, URL, model and NATS server."""
    up = headwater_command(
        "up", "--engine", options.engine, "--workers", "1", "--port", "0", "--nats-port", "0"
    )
    up += ["--data-dir", str(folder / "data"), "--log-level", "warning"]
    if options.engine == "vllm":
        model = gpu_model.make(folder / "qwen3-8b", "qwen3-8b")
        tier = {"offload": {"cpu_bytes_to_use": int(options.cpu_gb * 1e9)}}
        up += ["--model", str(model), "--connector", "offload"]
        up += ["--connector-options", msgspec.json.encode(tier).decode(), "--", "--load-format", "dummy"]
        up += ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(int(options.kv_gb * 1e9))]
        up += ["--gpu-memory-utilization", "0.5", "--enforce-eager"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            up, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent
        )
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := READY.search(log.read_text(errors="replace")):
            host, port, _, name = found.groups()
            nats = log.read_text(errors="replace").split("NATS ", 1)[1].split(")", 1)[0]
            return process, f"http://{host_port(host, int(port))}", name, nats
        time.sleep(0.2)
    raise RuntimeError(log.read_text(errors="replace")[-3000:])


def _ask(url: str, model: str, prompt: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = msgspec.json.decode(response.read())
    return {**answer, "seconds": time.perf_counter() - began}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--others", type=int, default=6, help="prompts asked in between")
    parser.add_argument("--kv-gb", type=float, default=1.5, help="cache on the GPU")
    parser.add_argument("--cpu-gb", type=float, default=20.0, help="cache in host memory")
    options = parser.parse_args()
    draw = random.Random(7)
    prompts = ["".join(draw.choices(SYMBOLS, k=options.prompt_tokens)) for _ in range(options.others + 1)]
    with tempfile.TemporaryDirectory(prefix="headwater-tiers-") as name:
        folder = Path(name)
        process, url, model, nats = _start(options, folder, folder / "up.log")
        try:
            rows = []
            last = ""
            for what, prompt in (
                ("first", prompts[0]),
                *(("other", one) for one in prompts[1:]),
                ("again", prompts[0]),
            ):
                if what == "again":
                    time.sleep(SETTLE_S)
                answer = _ask(url, model, prompt)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                rows.append(
                    (what, answer["usage"]["prompt_tokens"], cached, round(answer["seconds"] * 1e3, 1))
                )
                last = answer["id"]
            print(table(("request", "prompt tokens", "not computed", "whole answer, ms"), rows))
            explain = headwater_command("explain", last, "--nats", nats)
            print(subprocess.run(explain, capture_output=True, text=True, check=True).stdout)
        finally:
            process.terminate()
            process.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
