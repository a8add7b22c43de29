"""What a process without requests of its own is started with: our settings and the native arguments, each once."""

from headwater.engines.vllm.config.arguments import VllmSettings
from headwater.engines.vllm.headless import words


def test_ours_come_first_and_theirs_once() -> None:
    """The model is the folder that ours found; what both say is passed once; a transfer configuration is JSON."""
    settings = VllmSettings(
        "/models/a b",
        "a",
        "w",
        block_size=32,
        dtype="float32",
        kv_cache_mib=2,
        native=("--headless", "--model", "a", "--dtype", "float32", "--data-parallel-start-rank", "1"),
    )
    assert words(settings, '{"kv_connector": "NixlConnector"}') == (
        "--model=/models/a b",
        "--enable-prefix-caching",
        "--block-size=32",
        "--kv-cache-memory-bytes=2097152",
        '--kv-transfer-config={"kv_connector": "NixlConnector"}',
        "--headless",
        "--dtype",
        "float32",
        "--data-parallel-start-rank",
        "1",
    )
