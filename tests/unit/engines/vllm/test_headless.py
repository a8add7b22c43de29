"""What a process without requests of its own is started with: our settings and the native arguments, each once."""

from headwater.engines.vllm import VllmOptions
from headwater.engines.vllm.config import CPU_KV_CACHE_MIB, MIB
from headwater.engines.vllm.launch import words
from tests.support.engines.settings import engine_settings


def test_ours_come_first_and_theirs_once() -> None:
    """The model is the folder that ours found; what both say is passed once; a transfer configuration is JSON."""
    native = ("--headless", "--model", "a", "--dtype", "float32", "--data-parallel-start-rank", "1")
    options = VllmOptions(native=native)
    settings = engine_settings(options, "/models/a b", block_size=32)
    assert words(settings, '{"kv_connector": "NixlConnector"}') == (
        "--model=/models/a b",
        "--block-size=32",
        '--kv-transfer-config={"kv_connector": "NixlConnector"}',
        "--headless",
        "--dtype",
        "float32",
        "--data-parallel-start-rank",
        "1",
    )


def test_a_rank_has_its_leaders_defaults() -> None:
    """On a CPU these are not vLLM's: a rank that compiled, or had other blocks, did not start."""
    settings = engine_settings(VllmOptions(native=("--headless", "--block-size", "64")), "/m")
    assert words(settings, cpu=True) == (
        "--model=/m",
        "--dtype=float32",
        "--enforce-eager",
        f"--kv-cache-memory-bytes={CPU_KV_CACHE_MIB * MIB}",
        "--headless",
        "--block-size",
        "64",
    )
