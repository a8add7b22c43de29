"""Imports vLLM once for several engines of one machine: the parent imports it, and each engine is a fork.

vLLM's import takes 10 to 30 s, and on CPU every engine repeats it three times (its three processes are spawned). A fork of a
process that has imported everything starts in 3 s. This is for CPU engines; with CUDA a forked child cannot use what its
parent initialised, so GPU engines start separately.
"""

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from typing import Any

from headwater.engines import logs

PRELOADS = (
    "vllm.v1.engine.async_llm",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.structured_output",
    "vllm.v1.metrics.loggers",
    "vllm.distributed.kv_events",
    "vllm.config.kv_events",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.platforms",
    "xgrammar",
)

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs more than it saves here
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # forks log as the process that imported it
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # vLLM's value, which it can only set before NIXL is imported
}

OFFLINE = frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"})

SPIN_PAUSE_S = 0.0003

PROGRESS_POLL_US = 1_000
"""Longest wait of NIXL's progress thread for an event."""

_PR_SET_PDEATHSIG = 1


def preload(*, online: bool = False) -> float:
    """Import everything that an engine needs and make vLLM's own processes forks too. Returns the duration in seconds.

    `online`: LoRA adapters may be fetched from a hub, whose library reads its offline setting when imported.
    """
    for name, value in ENVIRONMENT.items():
        if not (online and name in OFFLINE):
            os.environ.setdefault(name, value)
    # Deprecations inside vLLM and torch are of no use to operators.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)
    # Its own variable goes before.
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", logs.level()).upper())
    began = time.monotonic()
    for name in PRELOADS:
        try:
            importlib.import_module(name)
        except ImportError:
            # Another release: only start-up takes longer.
            if name == PRELOADS[0]:
                raise
    _fork_instead_of_spawn()
    _pause_while_spinning()
    _wait_for_transfers()
    _let_llvmlite_be_scanned()
    _children_die_with_us()
    gc.collect()
    gc.freeze()
    return time.monotonic() - began


def _fork_instead_of_spawn() -> None:
    """Replace vLLM's helper that selects the start method of processes, which on CPU is always spawn."""
    import vllm.utils.system_utils

    context = multiprocessing.get_context("fork")
    original = vllm.utils.system_utils.get_mp_context

    def fork_context() -> Any:
        return context

    for module in list(sys.modules.values()):
        # Not getattr, which would import lazy modules.
        if module.__dict__.get("get_mp_context") is original:
            module.__dict__["get_mp_context"] = fork_context


def _pause_while_spinning() -> None:
    """Let vLLM's workers sleep while they poll shared memory: without it two engines on two cores starve."""
    broadcast = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    if "sched_yield" in broadcast.__dict__:
        broadcast.__dict__["sched_yield"] = lambda: time.sleep(SPIN_PAUSE_S)


def _wait_for_transfers() -> None:
    """Let NIXL's progress threads wait for events: its Python API gives them no time to, and each keeps a core busy."""
    try:
        binding = importlib.import_module("nixl._api").__dict__["nixlBind"]
    except (ImportError, KeyError):
        return
    agent_config: Any = binding.nixlAgentConfig

    class WaitingConfig(agent_config):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_POLL_US if name == "pthrDelay" else value)

    binding.nixlAgentConfig = WaitingConfig


def _let_llvmlite_be_scanned() -> None:
    """Make llvmlite's object raise AttributeError for special names, such as `__dict__`.

    On CPU vLLM reads `__dict__` of every object in all loaded modules. llvmlite (used by numba, for the block hashes) has an object that
    returns a native function for any attribute, which makes the worker fail.
    """
    ffi = importlib.import_module("llvmlite.binding.ffi")
    wrapper: Any = getattr(ffi, "_lib_wrapper", None)
    if wrapper is None:
        return
    native = wrapper.__getattr__

    def only_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return native(self, name)

    wrapper.__getattr__ = only_functions


def _children_die_with_us() -> None:
    """Make all processes forked from now on end with their parent, however it ends."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The wake-up descriptor is shared: a SIGTERM to an engine's process would reach its worker's event loop.
        signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=in_child)
