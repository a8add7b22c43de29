"""Advice: sizes of published models, measured step times, and traces with a known best layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import Trace, TraceRequest, write
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.advise import Check, advise_on_trace, moved
from headwater.ops.whatif.advise_options import TYPES, Advice, Gpus, read_gpus
from headwater.ops.whatif.layouts import (
    Layout,
    ModelSize,
    kv_tokens,
    layouts,
    model_size,
    of_cache,
    scaled,
    step_time,
)

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = LLAMA_8B | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


def size_of(folder: Path, config: dict[str, Any], kv_value_bytes: float = 2) -> ModelSize:
    (folder / "config.json").write_text(json.dumps(config))
    return model_size(str(folder), kv_value_bytes)


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [
        (LLAMA_8B, 8.03, 8.03, 131_072),
        (QWEN3_8B, 8.19, 8.19, 147_456),
        (LLAMA_70B, 70.6, 70.6, 327_680),
        (MIXTRAL_8X7B, 46.7, 12.9, 131_072),
        (QWEN3_30B_A3B, 30.5, 3.3, 98_304),
    ],
    ids=["Llama-3.1-8B", "Qwen3-8B", "Llama-3.1-70B", "Mixtral-8x7B", "Qwen3-30B-A3B"],
)
def test_sizes_are_those_that_are_published(
    tmp_path: Path, config: dict[str, Any], billions: float, active: float, kv_bytes: int
) -> None:
    """Parameters as their makers state them, in billions. They count embeddings among those that work on a token, which is no arithmetic."""
    size = size_of(tmp_path, config)
    assert size.weight_bytes / 2e9 == pytest.approx(billions, rel=0.01)
    embeddings = config["vocab_size"] * config["hidden_size"]
    assert (size.active + embeddings) / 1e9 == pytest.approx(active, rel=0.02)
    assert size.kv_bytes == kv_bytes
    assert size_of(tmp_path, config, 1).kv_bytes == kv_bytes / 2


def test_sizes_of_quantized_models_and_of_latent_attention(tmp_path: Path) -> None:
    four_bits = size_of(tmp_path, LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert four_bits.weight_bytes / 1e9 == pytest.approx(4.0, rel=0.01)
    latent = size_of(tmp_path, LLAMA_8B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert (latent.kv_bytes, latent.kv_heads) == (32 * 576 * 2, 1)
    inner = size_of(tmp_path, {"architectures": ["X"], "text_config": LLAMA_8B})
    assert inner.layers == 32
    # Files are what they are.
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1_000)
    assert size_of(tmp_path, LLAMA_8B).weight_bytes == 1_000


@pytest.mark.parametrize("text", ["", "{}", '{"hidden_size": "x"}', "nonsense"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json"):
        model_size(str(tmp_path), 2)
    with pytest.raises(ConfigError, match="give a model's folder"):
        model_size(str(tmp_path / "none"), 2)


@pytest.mark.parametrize(
    ("gpu", "prompt", "measured_ms"),
    [("H200", 1_000, 28.2), ("H200", 8_000, 220), ("H200", 30_000, 1_145), ("H100", 1_000, 33.3)],
)
def test_the_roofline_of_prompts_is_as_measured(
    tmp_path: Path, gpu: str, prompt: int, measured_ms: float
) -> None:
    """The times to first token of docs/benchmarks/gpu.md: alone, of a model of Qwen3-8B's shape; at 1,000 the mean of two engines."""
    times = step_time(size_of(tmp_path, QWEN3_8B), TYPES[gpu], 1, 1_128)
    assert times.seconds(prompt, 0.0, True) * 1000 == pytest.approx(measured_ms, rel=0.12)


@pytest.mark.parametrize(("gpu", "tokens_per_s", "ttft_ms"), [("H200", 193.7, 26.7), ("H100", 141.1, 33.3)])
def test_the_roofline_of_decoding_is_as_measured(
    tmp_path: Path, gpu: str, tokens_per_s: float, ttft_ms: float
) -> None:
    """128 tokens after a prompt, one request at a time, on the same page."""
    itl_ms = (128_000 / tokens_per_s - ttft_ms) / 127
    times = step_time(size_of(tmp_path, QWEN3_8B), TYPES[gpu], 1, 1_128)
    assert times.seconds(0, 0.003, True) * 1000 == pytest.approx(itl_ms, rel=0.05)


def test_the_kv_cache_is_as_large_as_measured(tmp_path: Path) -> None:
    """SGLang's on an H200 at 0.8 of its memory was 699,072 tokens; here 0.9 less a reserve."""
    found = kv_tokens(size_of(tmp_path, QWEN3_8B), TYPES["H200"], 1)
    assert found == pytest.approx(699_072 + 0.1 * 143_771 * 2**20 / 147_456 - 3e9 / 147_456, rel=0.02)


def test_heads_beyond_those_of_kv_are_copies(tmp_path: Path) -> None:
    """Two GPUs with one KV head hold no more tokens than the room that each has; with two heads twice as many."""
    size, gpu = size_of(tmp_path, LLAMA_8B)._replace(weight_bytes=0.0), TYPES["H100"]
    one, two = (kv_tokens(size._replace(kv_heads=heads), gpu, 2) for heads in (1, 2))
    assert one == kv_tokens(size._replace(kv_heads=1), gpu, 1)
    assert two == pytest.approx(2 * one, abs=2)
    # A token takes as long to read as before, then.
    full = [step_time(size._replace(kv_heads=1), gpu, tp, 1e6).decode_ms[1] for tp in (1, 2)]
    assert full[1] == pytest.approx(full[0], rel=0.01)


def test_layouts_are_those_that_fit(tmp_path: Path) -> None:
    size = size_of(tmp_path, LLAMA_70B)
    found, refused = layouts(size, TYPES["H100"], 4, 30_000)
    assert found == [Layout(4, 1)]
    assert [one.tensor_parallel for one in refused] == [1, 2]
    assert "do not fit" in refused[0].reason
    assert "the longest request has 30,000" in refused[1].reason
    small = size_of(tmp_path, LLAMA_8B)
    found, _ = layouts(small, TYPES["H100"], 4, 10_000)
    assert {str(one) for one in found} == {
        "TP 1: 4 aggregated",
        "TP 1: 1 prefill + 3 decode",
        "TP 1: 2 prefill + 2 decode",
        "TP 1: 3 prefill + 1 decode",
        "TP 2: 2 aggregated",
        "TP 2: 1 prefill + 1 decode",
        "TP 4: 1 aggregated",
    }
    _, refused = layouts(small, TYPES["L4"], 1, 100_000)
    assert "the longest request has 100,000" in refused[0].reason
    _, refused = layouts(small._replace(heads=14), TYPES["H100"], 8, 10)
    assert [(one.tensor_parallel, one.reason) for one in refused] == [
        (4, "14 attention heads cannot be divided"),
        (8, "14 attention heads cannot be divided"),
    ]


def test_measured_times_are_scaled_by_the_roofline(tmp_path: Path) -> None:
    size, gpu = size_of(tmp_path, QWEN3_8B), TYPES["H100"]
    one, two = (step_time(size, gpu, parallel, 1_128) for parallel in (1, 2))
    assert scaled(one, one, two) == two
    slow = StepTime(*(tuple(2 * value for value in part) for part in one[:2]))  # type: ignore[arg-type]
    assert scaled(slow, one, two).seconds(1_000, 0.5, True) == pytest.approx(
        2 * two.seconds(1_000, 0.5, True)
    )
    # Two GPUs need more than half the time of one.
    assert one.seconds(1_000, 0.5, True) / 2 < two.seconds(1_000, 0.5, True) < one.seconds(1_000, 0.5, True)


def test_a_share_of_a_larger_cache_has_more_tokens() -> None:
    """So the same number of tokens takes the same time."""
    times = StepTime((0, 0, 0), (10.0, 20.0, 5.0))
    assert of_cache(times, 2).seconds(0, 0.25, True) == pytest.approx(times.seconds(0, 0.5, True))


def advised(capsys: pytest.CaptureFixture[str], trace: Path, options: Advice) -> dict[str, Any]:
    assert advise_on_trace(str(trace), options._replace(as_json=True)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def made_trace(path: Path, every_s: float, count: int, prompt: int, output: int) -> Path:
    requests = [
        TraceRequest(
            f"r{n}", round(n * every_s * 1e9), prompt, output, tuple(range(n * 999, n * 999 + prompt // 512))
        )
        for n in range(count)
    ]
    write(path, Trace("t", tuple(requests)))
    return path


def test_requests_one_at_a_time_are_best_on_all_gpus_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is gained by more workers than there are requests."""
    size_of(tmp_path, QWEN3_8B)
    trace = made_trace(tmp_path / "t.jsonl", 20.0, 12, 2_048, 200)
    options = Advice(Gpus(4, "H100"), str(tmp_path))
    found = advised(capsys, trace, options)
    assert found["layouts"][0]["layout"] == "TP 4: 1 aggregated"
    assert found["command"].endswith("--workers 1 -- --tensor-parallel-size 4")
    assert {one["goodput"] for one in found["layouts"]} == {1.0}
    assert advise_on_trace(str(trace), options._replace(jobs=2)) == 0
    text = capsys.readouterr().out
    assert "the load is light for several layouts" in text
    assert "step times were not measured" in text
    assert "sure: of 9 other conditions" in text


def test_an_even_pace_of_tokens_needs_prefill_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long prompts beside streams: where a step of both is beyond the limit, only workers that never compute prompts keep it."""
    size_of(tmp_path, QWEN3_8B)
    trace = made_trace(tmp_path / "t.jsonl", 0.3, 60, 8_192, 100)
    options = Advice(Gpus(2, "H100"), str(tmp_path), slo={"itl": 8.6})
    found = advised(capsys, trace, options)
    assert found["layouts"][0]["layout"] == "TP 1: 1 prefill + 1 decode"
    assert found["layouts"][1]["goodput"] < 0.9 * found["layouts"][0]["goodput"]


def test_measured_step_times_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size_of(tmp_path, QWEN3_8B)
    trace = made_trace(tmp_path / "t.jsonl", 20.0, 4, 512, 101)
    step = StepTime((0.0, 0.0, 100.0), (0.0, 0.0, 10.0))
    found = advised(capsys, trace, Advice(Gpus(1, "H100"), str(tmp_path), step_time=step))
    assert found["step_times"] == "measured (--step-time)"
    assert found["layouts"][0]["ttft_ms"]["p50"] == pytest.approx(110)
    assert found["layouts"][0]["itl_ms"] == pytest.approx(10)
    assert found["checks"] == []


def test_what_cannot_be_served_is_told(tmp_path: Path) -> None:
    size_of(tmp_path, LLAMA_70B)
    trace = made_trace(tmp_path / "t.jsonl", 1.0, 2, 512, 5)
    with pytest.raises(ConfigError, match=r"does not fit on 1xH100: TP 1: weights of 141\.1 GB"):
        advise_on_trace(str(trace), Advice(Gpus(1, "H100"), str(tmp_path)))
    with pytest.raises(ConfigError, match="--model"):
        advise_on_trace(str(trace), Advice(Gpus(1, "H100")))
    with pytest.raises(ConfigError, match="--gpus"):
        advise_on_trace(str(trace), Advice(model=str(tmp_path)))
    for text in ("8", "0xH100", "8xH99", "xH100"):
        with pytest.raises(ValueError, match="NUMBERxTYPE"):
            read_gpus(text)


def test_the_best_of_a_check() -> None:
    """A difference within the tie is decided by the time to the end."""
    assert Check("", [0.9, 0.95], [1, 1]).winner == 1
    assert Check("", [0.9, 0.903], [10, 10]).winner == 0
    assert Check("", [0.9, 0.9], [10, 9]).winner == 1
    assert Check("", [0.9, 0.8], [10, 1]).winner == 0


def test_moved_arrivals_are_those_of_the_same_requests(tmp_path: Path) -> None:
    trace = Trace("t", tuple(TraceRequest(f"r{n}", n * 10**9, 5, 5, ()) for n in range(50)))
    other = moved(trace, 1)
    assert {one.name for one in other.requests} == {one.name for one in trace.requests}
    arrivals = [one.arrival_ns for one in other.requests]
    assert arrivals == sorted(arrivals)
    assert moved(trace, 2) != other == moved(trace, 1)
