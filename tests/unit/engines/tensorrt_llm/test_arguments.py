"""TensorRT-LLM's arguments: layers, what is rejected before a model is loaded, and how many GPUs they need."""

from pathlib import Path
from typing import Any

import pytest

from headwater.engines.engine import EngineUnavailable
from headwater.engines.tensorrt_llm import TensorRtOptions
from headwater.engines.tensorrt_llm.config import (
    TensorRtSettings,
    arguments,
    attention_ranks,
    check,
    gpus_needed,
)
from tests.support.engines.settings import engine_settings, with_fields

SETTINGS = engine_settings(TensorRtOptions(), "/models/m")
ROLE = with_fields(SETTINGS, role="prefill", max_model_len=4096)
PROCESSORS = {"only": "module:Only"}


def made(settings: TensorRtSettings = SETTINGS, **overrides: Any) -> dict[str, Any]:
    return arguments(with_fields(settings, overrides=overrides))


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    """Our defaults, the file, the overrides, our own settings."""
    path = tmp_path / "engine.yaml"
    path.write_text("max_batch_size: 8\nkv_cache_config: {free_gpu_memory_fraction: 0.5, dtype: fp8}\n")
    settings = with_fields(SETTINGS, file=str(path), max_model_len=1024, block_size=64)
    found = made(settings, kv_cache_config={"free_gpu_memory_fraction": 0.8})
    assert found["backend"] == "pytorch"
    assert (found["model"], found["max_seq_len"], found["max_batch_size"]) == ("/models/m", 1024, 8)
    cache = found["kv_cache_config"]
    assert (cache["free_gpu_memory_fraction"], cache["dtype"], cache["tokens_per_block"]) == (0.8, "fp8", 64)
    assert cache["event_buffer_max_size"] > 0
    kept = made(kv_cache_config={"event_buffer_max_size": 5})
    assert kept["kv_cache_config"]["event_buffer_max_size"] == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_batchsize": 8}, "no argument max_batchsize: did you mean max_batch_size"),
        (
            {"kv_cache_config": {"free_memory_fraction": 1}},
            r"did you mean kv_cache_config.free_gpu_memory_fraction",
        ),
        ({"cache_transceiver_config": {"max_token_in_buffer": 1}}, "max_tokens_in_buffer"),
        ({"zzz": 1}, "no argument zzz: see the documentation"),
        ({"max_seq_len": 5}, "max_seq_len is 5 among TensorRT-LLM's arguments, and 4096 among ours"),
    ],
)
def test_unknown_and_contradicting_arguments_are_errors(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineUnavailable, match=message):
        made(with_fields(SETTINGS, max_model_len=4096), **overrides)


def test_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    for text in ("- 1\n", "a: [\n"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(EngineUnavailable, match=r"bad\.yaml"):
            made(with_fields(SETTINGS, file=str(tmp_path / "bad.yaml")))
    with pytest.raises(EngineUnavailable, match="No such file"):
        made(with_fields(SETTINGS, file=str(tmp_path / "none.yaml")))


GOOD = {"backend": "NIXL", "max_tokens_in_buffer": 4096, "kv_transfer_timeout_ms": 1000}


@pytest.mark.parametrize(
    ("settings", "overrides", "message"),
    [
        (SETTINGS, {"backend": "tensorrt"}, "backend 'tensorrt' is not supported"),
        (SETTINGS, {"max_beam_width": 4}, "beam search"),
        (SETTINGS, {"tensor_parallel_size": 4, "moe_expert_parallel_size": 3}, "3 does not divide .* 4"),
        (
            SETTINGS,
            {"tensor_parallel_size": 4, "moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 1},
            "is not tensor_parallel_size 4",
        ),
        (
            SETTINGS,
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            "need 8 GPUs, and 4 are visible",
        ),
        (
            ROLE,
            {"cache_transceiver_config": {"backend": None}},
            "needs cache_transceiver_config with a backend",
        ),
        (ROLE, {}, "max_tokens_in_buffer is not set"),
        (
            ROLE,
            {"cache_transceiver_config": {**GOOD, "max_tokens_in_buffer": 4095}},
            "max_tokens_in_buffer is 4095",
        ),
        (
            ROLE,
            {"cache_transceiver_config": {**GOOD, "kv_transfer_timeout_ms": None}},
            "kv_transfer_timeout_ms",
        ),
        (with_fields(ROLE, max_model_len=0), {"cache_transceiver_config": GOOD}, "needs max_seq_len"),
        (
            with_fields(SETTINGS, logits_processors=PROCESSORS),
            {"kv_cache_config": {"event_buffer_max_size": 10}},
            "logits processors freeze",
        ),
        (
            SETTINGS,
            {"enable_chunked_prefill": True, "kv_cache_config": {"host_cache_size": 1 << 30}},
            "13318",
        ),
    ],
)
def test_what_would_hang_or_end_the_engine_is_rejected(
    settings: TensorRtSettings, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineUnavailable, match=message):
        check(settings, made(settings, **overrides), gpus=4)


def test_known_faults_can_be_allowed_and_good_arguments_pass() -> None:
    check(ROLE, made(ROLE, cache_transceiver_config=GOOD))
    processors = with_fields(SETTINGS, logits_processors=PROCESSORS)
    check(processors, made(processors))
    assert made(processors)["kv_cache_config"]["event_buffer_max_size"] == 0
    daring = with_fields(processors, allow=("faults",))
    check(daring, made(daring, kv_cache_config={"event_buffer_max_size": 10}))


def test_gpus_and_ranks_follow_from_parallelism() -> None:
    """Experts are spread over the tensor-parallel GPUs, and attention ranks are those."""
    spread = made(tensor_parallel_size=8, moe_expert_parallel_size=8, enable_attention_dp=True)
    check(SETTINGS, spread, gpus=8)
    assert (gpus_needed(spread), attention_ranks(spread)) == (8, 8)
    plain = made(tensor_parallel_size=2, pipeline_parallel_size=3, context_parallel_size=2)
    assert (gpus_needed(plain), attention_ranks(plain)) == (12, 1)
