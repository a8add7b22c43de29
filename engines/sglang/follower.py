"""A node of an SGLang engine other than the first: it computes its part of the model, and is no worker.

The first node is the worker, and represents all of them in the fleet. Without this SGLang would keep the process busy with
an HTTP server, and ignore SIGTERM.
"""

import contextlib
import multiprocessing
import os
import time
from typing import Any, Final

from headwater.engines import kv_socket
from headwater.engines import process as engine_process
from headwater.engines.engine import EngineDied
from headwater.engines.process import EngineInterrupted, interruptible
from headwater.engines.sglang import config
from headwater.engines.sglang.config import SglangSettings, keyword_arguments
from headwater.engines.sglang.process import import_sglang, launch

BLOCK: Final = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"
POLL_S: Final = 0.2


def run(settings: SglangSettings) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP, or until the first node stops. Raises `EngineUnavailable`, and `EngineDied` with the cause."""
    cpu = import_sglang()
    given = config.parse(settings.native)
    folder = engine_process.take("engine")
    failure = engine_process.prepare(folder)
    # Else the constructor returns when the schedulers have ended.
    os.environ[BLOCK] = "0"
    try:
        with interruptible():
            launch(keyword_arguments(settings, given, *kv_socket.in_folder(folder), cpu=cpu), failure)
            _watch(multiprocessing.active_children(), failure)
    except EngineInterrupted:
        return
    finally:
        # Those of this process only: the first node notices that its peer is gone.
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        engine_process.give_up(folder)


def _watch(processes: list[Any], failure: str) -> None:
    """Return when all have ended, as they do when the first node stops. Raises `EngineDied`."""
    while any(process.is_alive() for process in processes):
        if cause := engine_process.read(failure, processes):
            raise EngineDied(f"SGLang died: {cause}")
        with contextlib.suppress(InterruptedError):
            time.sleep(POLL_S)
    if cause := engine_process.read(failure, processes):
        raise EngineDied(f"SGLang died: {cause}")
