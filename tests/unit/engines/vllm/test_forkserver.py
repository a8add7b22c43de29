"""What a host of several vLLM engines sets before it imports them."""

import importlib
import logging
import os

import pytest

from headwater.engines import logs
from headwater.engines.vllm.preload import ENVIRONMENT, OFFLINE, preload


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


@pytest.mark.parametrize(("given", "expected"), [("", logging.DEBUG), ("info", logging.INFO)])
def test_vllms_log_has_the_level_of_its_own_variable(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: int
) -> None:
    """Without it, that of this process."""

    def stop_before_importing(name: str) -> None:
        raise InterruptedError(name)

    environ = {"VLLM_LOGGING_LEVEL": given} if given else {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(logs, "_level", "debug")
    monkeypatch.setattr(importlib, "import_module", stop_before_importing)
    logger = logging.getLogger("vllm")
    before = logger.level
    try:
        with pytest.raises(InterruptedError):
            preload()
        assert logger.level == expected
    finally:
        logger.setLevel(before)
