"""Imports SGLang once for several engines: an engine's processes are forks of the one that imported it.

SGLang's import takes 25 s of processor time, and each engine repeats it in two further processes, which it spawns. Forked
from a process that has imported everything, an engine starts in 2 s. For tests on a CPU only: with CUDA a forked child
cannot use what its parent initialised.
"""

import gc
import importlib
import importlib.util
import logging
import multiprocessing
import os
import pkgutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from headwater.ops.start.signals import die_with_parent

PRELOADS: Final = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.models.registry",
    "sglang.srt.models.llama",
    "sglang.srt.models.llama_reward",
    "sglang.srt.models.qwen2_audio",
    "sglang.srt.models.qwen2_vl",
    "sglang.srt.models.sdar",
    "sglang.srt.models.whisper",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.disaggregation.nixl.conn",
    "xgrammar",
)

ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs more than it saves here
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # two ranks, if there are two
}

MODELS: Final = frozenset(
    {"llama", "llama_embedding", "llama_reward", "qwen2_audio", "qwen2_vl", "sdar", "whisper"}
)
"""Modules of models that tests load; the others take four seconds."""


def preload() -> None:
    """Import everything that an engine needs, and make SGLang's own processes forks."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_models())
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    for name in PRELOADS:
        importlib.import_module(name)
    _import_image_processors()
    _fork_instead_of_spawn()
    os.register_at_fork(after_in_child=_in_child)
    gc.collect()
    gc.freeze()


def _import_image_processors() -> None:
    """An engine that takes images looks through those of all models, in two of its processes."""
    from sglang.srt.managers.multimodal_processor import import_processors
    from transformers.models.auto.video_processing_auto import video_processor_class_from_name

    import_processors("sglang.srt.multimodal.processors")
    video_processor_class_from_name("Qwen2VLVideoProcessor")


def _other_models() -> Iterator[str]:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    for module in pkgutil.iter_modules([str(Path(found.origin).parent / "srt" / "models")]):
        if module.name not in MODELS:
            yield module.name


def _fork_instead_of_spawn() -> None:
    """SGLang sets the start method of processes to spawn, for each engine again."""
    original = multiprocessing.set_start_method

    def set_fork(_method: str, force: bool = False) -> Any:
        return original("fork", force=True)

    multiprocessing.set_start_method = set_fork  # type: ignore[assignment]


def _in_child() -> None:
    die_with_parent()
    # Shared with the parent: a signal to an engine's process would reach its event loop.
    signal.set_wakeup_fd(-1)
