"""What the adapter imports of TensorRT-LLM, in one place."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any, Final

from headwater.engines.engine import EngineUnavailable
from headwater.engines.tensorrt_llm.config.recorded import PYTHONS

NAMES: Final = {
    "LLM": "tensorrt_llm",
    "SamplingParams": "tensorrt_llm",
    "GuidedDecodingParams": "tensorrt_llm.sampling_params",
    "DisaggregatedParams": "tensorrt_llm.disaggregated_params",
    "DisaggScheduleStyle": "tensorrt_llm.disaggregated_params",
    "SchedulingParams": "tensorrt_llm.scheduling_params",
    "LoRARequest": "tensorrt_llm.executor.request",
    "__version__": "tensorrt_llm",
    "from_numpy": "torch",
}


def not_installed(reason: str) -> str:
    """What to do about an import that failed for this reason."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"TensorRT-LLM cannot be imported ({reason}): install headwater's `trtllm` extra on Python {PYTHONS[-1]} "
        f"(it has wheels for {' and '.join(PYTHONS)}; this is {here})"
    )


def load_library() -> Any:
    """The classes by name. Raises `EngineUnavailable`: not installed, or a release without one of them."""
    found: dict[str, Any] = {}
    for name, module in NAMES.items():
        try:
            found[name.strip("_")] = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise EngineUnavailable(not_installed(str(error))) from error
        except AttributeError as error:
            raise EngineUnavailable(f"this release of TensorRT-LLM has no {module}.{name}") from error
    return SimpleNamespace(**found)
