"""`headwater bench serve` against a simulated fleet: its figures are those of the server's metrics and of the prompts."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headwater.ops.bench.trace import Trace, TraceRequest, write
from tests.support.processes import zygote
from tests.support.processes.fleet import FleetProcess, shared_fleet

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}

module_loop = pytest.mark.asyncio(loop_scope="module")


up = shared_fleet("--engine", "sim", "--workers", "1")
"""One worker, so that every prompt meets the same cache."""


async def bench(up: FleetProcess, *words: str, url: str = "") -> tuple[int, str]:
    """Exit code and output. The command knows nothing of NATS."""
    process = await zygote.start(
        "bench", "serve", url or up.url, *words, stdout=zygote.PIPE, stderr=zygote.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def measured(up: FleetProcess, folder: Path, *words: str) -> dict[str, Any]:
    code, output = await bench(up, *words, "--json", str(folder / "result.json"))
    assert code == 0, output
    found: dict[str, Any] = json.loads((folder / "result.json").read_bytes())
    return found


@module_loop
async def test_a_sweep_is_measured_and_drawn(up: FleetProcess, tmp_path: Path) -> None:
    """Tokens are as many as wanted, limits are judged, and each request is in the file."""
    file, plot = tmp_path / "result.json", tmp_path / "result.svg"
    words = ("--requests", "12", "--input-tokens", "300", "--output-tokens", "uniform:4,8", "--seed", "5")
    code, output = await bench(
        up,
        *words,
        "--concurrency",
        "1,4",
        "--slo",
        "ttft=60s,itl=1ms",
        "--json",
        str(file),
        "--plot",
        str(plot),
    )
    assert code == 0, output
    assert (
        "most requests within ttft 60000 ms, itl 1 ms with 90% of all within: no point has that share"
        in output
    )
    result = json.loads(file.read_bytes())
    assert [point["concurrency"] for point in result["points"]] == [1, 4]
    for point in result["points"]:
        assert (point["requests"], point["failed"], point["tokens_counted"]) == (12, 0, "server")
        assert point["output_tokens"] == point["asked_output_tokens"]
        assert point["prompt_tokens"] == pytest.approx(point["asked_prompt_tokens"], rel=0.05)
        assert len(point["samples"]) == 12
        # On a busy machine the tokens of an answer may come at once.
        slow = [
            one
            for one in point["samples"]
            if one["last_s"] - one["first_s"] > (one["output_tokens"] - 1) / 1000
        ]
        assert point["goodput"]["missed"]["itl"] == len(slow) > 1
        assert max(_in_flight(point["samples"])) <= point["concurrency"]
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")


def _in_flight(samples: list[dict[str, Any]]) -> list[int]:
    moments = sorted([(one["sent_s"], 1) for one in samples] + [(one["last_s"], -1) for one in samples])
    now, found = 0, []
    for _, change in moments:
        now += change
        found.append(now)
    return found


@module_loop
async def test_prompts_of_a_trace_share_what_its_ids_do(up: FleetProcess, tmp_path: Path) -> None:
    """The server finds cached what the trace says is shared: two blocks of 512 tokens in each of three requests."""
    ids = [(1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 6), (7,)]
    requests = tuple(
        TraceRequest(f"r{n}", n * 200_000_000, len(own) * 512, 4, own) for n, own in enumerate(ids)
    )
    write(tmp_path / "trace.jsonl", Trace("t", requests))
    for api in ("chat", "completions"):
        found = await measured(up, tmp_path, "--workload", str(tmp_path / "trace.jsonl"), "--api", api)
        samples = found["points"][0]["samples"]
        cached = [one["cached_tokens"] for one in sorted(samples, key=lambda one: one["conversation"])]
        assert cached[0] < 100
        assert cached[4] < 100
        assert cached[1:4] == pytest.approx([1_024] * 3, rel=0.08)


@module_loop
async def test_conversations_find_their_turns_cached(up: FleetProcess, tmp_path: Path) -> None:
    """Later turns have the answers before them, which the server generated."""
    found = await measured(
        up,
        tmp_path,
        *("--workload", "conversations", "--requests", "9", "--turns", "3", "--concurrency", "3"),
        *("--input-tokens", "200", "--output-tokens", "20", "--pause-s", "0.05"),
    )
    samples = found["points"][0]["samples"]
    for one in samples:
        assert one["prompt_tokens"] == pytest.approx(
            one["asked_tokens"], rel=0.15, abs=30 * (one["turn"] + 1)
        )
        if one["turn"]:
            before = next(
                other
                for other in samples
                if (other["conversation"], other["turn"]) == (one["conversation"], one["turn"] - 1)
            )
            assert one["cached_tokens"] > before["prompt_tokens"] - 17


@module_loop
async def test_failures_are_told_with_their_cause(up: FleetProcess) -> None:
    code, output = await bench(up, "--requests", "3", "--input-tokens", "200000", "--concurrency", "3")
    assert code == 1
    assert "failed: 3 x HTTP 400: This model's maximum context length is" in output
    for words, text in (
        (("--model", "none"), "HTTP 404"),
        (("--extra-body", '{"stream": false}'), "stream follows from other options"),
        (("--plot", "a.svg"), "--plot draws a sweep"),
        (("--json", "/nonexistent/a"), "its folder does not exist"),
    ):
        code, output = await bench(up, *words)
        assert (code, text in output) == (2, True), output
    code, output = await bench(up, url="http://127.0.0.1:9")
    assert (code, "is out of reach" in output) == (2, True), output


@module_loop
async def test_advice_has_the_step_times_of_the_log(up: FleetProcess, tmp_path: Path) -> None:
    """What the workers measured, not what the GPU's vendor publishes."""
    # One at a time: a worker reports the time of a prompt that no other shared its step with.
    words = (
        "--requests",
        "24",
        "--concurrency",
        "1",
        "--input-tokens",
        "uniform:100,900",
        "--output-tokens",
        "8",
    )
    await measured(up, tmp_path, *words)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    code, output = await up.command(
        "advise", "log", "--model", str(tmp_path), "--gpus", "1xH100", "--roles", "aggregated", "--json"
    )
    assert code == 0, output
    found = json.loads(output)
    assert found["step_times"].startswith("measured, from the log of its workers")
    assert found["requests"] >= 24
    assert found["command"] == f"headwater up --model {tmp_path} --workers 1"
    assert found["layouts"][0]["ttft_ms"]["p50"] > 10
