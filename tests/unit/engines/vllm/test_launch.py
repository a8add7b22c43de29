"""What a start of vLLM that failed is: one that can never succeed, or one that may the next time."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headwater.engines import process
from headwater.engines.engine import EngineError, EngineUnavailable
from headwater.engines.vllm import VllmOptions, launch
from tests.support.engines.settings import engine_settings

SETTINGS = engine_settings(VllmOptions(), "/models/small")
CORE_FAILED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes vLLM's start fail with an error; `cause` is what its own process wrote down before."""

    def with_error(error: BaseException, cause: str = "") -> None:
        def from_engine_args(*_: Any, **__: Any) -> Any:
            if cause:
                Path(os.environ[process.VARIABLE]).write_text(cause)
            raise error

        contents: dict[str, Any] = {
            "vllm.engine.arg_utils": {"AsyncEngineArgs": lambda **_: None},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
            "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")},
            "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
        }
        for name in ("vllm", "vllm.engine", "vllm.usage", "vllm.v1", "vllm.v1.engine", *contents):
            module = ModuleType(name)
            vars(module).update(contents.get(name, {}))
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(launch, "keyword_arguments", lambda *_, **__: {})

    monkeypatch.setenv(process.VARIABLE, "")
    monkeypatch.setenv(launch.SOCKETS, "")
    return with_error


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ValueError("max_model_len must be positive"), True),
        (FileNotFoundError(2, "No such file or directory", "/models/small/config.json"), True),
        (NotADirectoryError(20, "Not a directory", "/models/small"), True),
        (PermissionError(13, "Permission denied", "/models/small/config.json"), True),
        (OSError(98, "Address already in use"), False),
        (OSError(5, "Input/output error"), False),
        (OSError(12, "Cannot allocate memory"), False),
        (MemoryError(), False),
        (CORE_FAILED, False),
        (RuntimeError("CUDA error: out of memory"), False),
        (TimeoutError("no answer of the engine core"), False),
    ],
)
def test_only_a_start_that_can_never_succeed_is_the_last(
    fails: Any, tmp_path: Path, error: Exception, is_final: bool
) -> None:
    """Wrong arguments and missing files stay wrong and missing; memory, devices and ports may be free later."""
    fails(error)
    with pytest.raises(EngineError, match="/models/small") as raised:
        launch.launch(SETTINGS, tmp_path, lambda _: None)
    assert isinstance(raised.value, EngineUnavailable) == is_final


def test_the_cause_is_told(fails: Any, tmp_path: Path) -> None:
    """What its own process wrote down, and not that the root cause is above."""
    fails(CORE_FAILED, "OutOfMemoryError: CUDA out of memory. Tried to allocate 45.00 GiB")
    with pytest.raises(EngineError, match=r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 45"):
        launch.launch(SETTINGS, tmp_path, lambda _: None)
