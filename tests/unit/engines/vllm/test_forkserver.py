"""What a host of several vLLM engines sets before it imports them."""

import importlib
import os

import pytest

from headwater.engines.vllm.forkserver import ENVIRONMENT, OFFLINE, preload


@pytest.mark.parametrize("online", [False, True])
def test_a_hub_may_be_asked_only_where_adapters_come_from_one(
    monkeypatch: pytest.MonkeyPatch, online: bool
) -> None:
    """Its library reads these variables when it is imported, which the engines do."""

    def stop_before_importing(name: str) -> None:
        raise InterruptedError(name)

    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(importlib, "import_module", stop_before_importing)
    with pytest.raises(InterruptedError):
        preload(online=online)
    assert ENVIRONMENT.keys() >= OFFLINE
    assert OFFLINE.isdisjoint(environ) if online else environ.keys() >= OFFLINE
