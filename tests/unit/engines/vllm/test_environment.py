"""What vLLM and the libraries below it read only from the environment."""

import os
from collections.abc import Iterator

import pytest

from headwater.engines.sglang import config
from headwater.engines.vllm import VllmOptions
from headwater.engines.vllm.config import VllmSettings, environment
from tests.support.engines.settings import engine_settings, with_fields

KEPT_MAPPINGS = "UCX_CUDA_IPC_CACHE"
"""UCX keeps mappings of another process's GPU memory: those of a dead one keep its memory from being freed."""

SETTINGS = engine_settings(VllmOptions(), "/models/small")


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
        with_fields(SETTINGS, connector="nixl", role="prefill"),
        with_fields(SETTINGS, connector="nixl", role="decode"),
        # Its role may change while it runs.
        with_fields(SETTINGS, connector="nixl"),
        with_fields(SETTINGS, connector="offload,nixl"),
        with_fields(
            SETTINGS,
            native=("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'),
        ),
    ],
)
def test_workers_that_hand_over_keep_no_memory_of_a_dead_one(settings: VllmSettings) -> None:
    environment(settings)
    assert os.environ[KEPT_MAPPINGS] == "n"


@pytest.mark.parametrize("settings", [SETTINGS, with_fields(SETTINGS, connector="offload")])
def test_workers_that_hand_nothing_over_are_left_alone(settings: VllmSettings) -> None:
    environment(settings)
    assert KEPT_MAPPINGS not in os.environ


def test_what_the_operator_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEPT_MAPPINGS, "y")
    environment(with_fields(SETTINGS, connector="nixl"))
    assert os.environ[KEPT_MAPPINGS] == "y"


def test_so_does_sglang() -> None:
    """Its prefill and decode workers use the same library."""
    assert config.environment("127.0.0.1", cpu=False)[KEPT_MAPPINGS] == "n"
