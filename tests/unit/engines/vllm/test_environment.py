"""What vLLM and the libraries below it read only from the environment."""

import os
from collections.abc import Iterator

import pytest

from headwater.engines.sglang import config
from headwater.engines.vllm.config import VllmSettings, environment

KEPT_MAPPINGS = "UCX_CUDA_IPC_CACHE"
"""UCX keeps mappings of another process's GPU memory: those of a dead one keep its memory from being freed."""

SETTINGS = VllmSettings("/models/small", "small", "w0")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.delenv(KEPT_MAPPINGS, raising=False)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS._replace(connectors=("nixl",), role="prefill"),
        SETTINGS._replace(connectors=("nixl",), role="decode"),
        # Its role may change while it runs.
        SETTINGS._replace(connectors=("nixl",)),
        SETTINGS._replace(connectors=("offload", "nixl")),
        SETTINGS._replace(
            native=("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
        ),
    ],
)
def test_workers_that_hand_over_keep_no_memory_of_a_dead_one(settings: VllmSettings) -> None:
    environment(settings)
    assert os.environ[KEPT_MAPPINGS] == "n"


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS._replace(connectors=("offload",))])
def test_workers_that_hand_nothing_over_are_left_alone(settings: VllmSettings) -> None:
    environment(settings)
    assert KEPT_MAPPINGS not in os.environ


def test_what_the_operator_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEPT_MAPPINGS, "y")
    environment(SETTINGS._replace(connectors=("nixl",)))
    assert os.environ[KEPT_MAPPINGS] == "y"


def test_so_does_sglang() -> None:
    """Its prefill and decode workers use the same library."""
    assert config.environment("127.0.0.1", cpu=False)[KEPT_MAPPINGS] == "n"
