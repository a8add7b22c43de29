"""SGLang's `Engine` under our own supervision: its start, its message loop, its death, its end.

Left to itself SGLang takes over the process: it replaces the handlers of SIGTERM and SIGQUIT, kills the process when one
of its own fails, and at the end kills every child of the process, also those that it did not start. Here its message loop is a task of
ours, a failure is a value with a cause, and only its own processes are ended.

SGLang does not report what it encodes, so its `get_embedding_and_mask` is wrapped here, which gets the function that encodes as an argument. A
release without it leaves no count, and the worker, which looks for the count at its start, does not start then.

Nothing of SGLang is imported before a process runs: the one that starts them does not need it.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from headwater.engines import embeddings as embedding_files
from headwater.engines import process
from headwater.engines import process as engine_process
from headwater.engines.engine import (
    EngineDied,
    EngineLoad,
    EngineStartFailed,
    EngineUnavailable,
    start_failure,
)
from headwater.engines.kv_events import KvTranslator, MediaSentinels
from headwater.engines.media import PROBE_ID
from headwater.engines.ranked import EngineRank
from headwater.engines.sglang import config

VARIABLE: Final = "HEADWATER_EMBEDDINGS_FOLDER"
"""Environment variable with the folder of counts, for the engine's processes."""

ID_DIGITS: Final = 16
"""Hexadecimal digits of an image's id that SGLang uses: 64 bits."""


@contextlib.contextmanager
def announced(folder: Path | None) -> Iterator[None]:
    """Processes that are started within it count in this folder, unless it is None."""
    if folder is None:
        yield
        return
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def install() -> None:
    """Install the counter if it was announced. Runs in the scheduler's process, before it loads its model."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from sglang.srt.managers import mm_utils

    if hasattr(mm_utils, "get_embedding_and_mask"):
        mm_utils.get_embedding_and_mask = counting(mm_utils.get_embedding_and_mask, Path(folder))


def counting(embed: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`embed`, SGLang's `get_embedding_and_mask`, with a `data_embedding_func` that counts."""

    def embed_and_count(*arguments: Any, data_embedding_func: Any, **named: Any) -> Any:
        @functools.wraps(data_embedding_func)
        def encode(items: list[Any]) -> Any:
            embeddings = data_embedding_func(items)
            # A count that cannot be written must not end the engine.
            with contextlib.suppress(OSError):
                for item in items:
                    embedding_files.count(folder, embedding_files.ENCODED)
                    if len(items) == 1 and item.hash == int(PROBE_ID[:ID_DIGITS], 16):
                        tensor = embeddings[0] if isinstance(embeddings, list) else embeddings
                        tensor = tensor.reshape(-1, tensor.shape[-1])
                        embedding_files.write(folder, PROBE_ID, tensor.detach().cpu())
            return embeddings

        # SGLang looks at the owner of the function.
        owner = getattr(data_embedding_func, "__self__", None)
        if owner is not None:
            encode.__self__ = owner  # type: ignore[attr-defined]  # as a method has it
        return embed(*arguments, data_embedding_func=encode, **named)

    return embed_and_count


# The programs of SGLang's own processes: SGLang's functions, which write down why they fail.

FATAL: Final = ("hit an exception",)
"""What SGLang logs before a process ends."""


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """A scheduler with its part of the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    process.keep("sglang", FATAL)
    install()
    run_scheduler_process(*arguments, **named)
    # It was asked to end, and has freed its memory. A prefill scheduler's transfer threads, which wait for transfers, would keep its process.
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """The process that turns tokens into text, through which all answers pass."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    process.keep("sglang", FATAL)
    run_detokenizer_process(*arguments, **named)


# The engine's start, message loop, death and end.

EXIT_S: Final = 10.0
"""How long its scheduler may take to free its memory before it is killed."""

SCHEDULER: Final = "::scheduler"
"""A part of the title of those processes that end when asked to, unlike the detokenizer and the controller of several ranks."""

POLL_S: Final = 0.02

STOPPED: Final = "stopped"
"""The failure of an engine that was asked to stop."""

T = TypeVar("T")

_log = structlog.get_logger("headwater.sglang")


class SglangProcess:
    """A started engine: what `launch` returned. `on_failure` is called once, on the event loop, with the reason of its death.

    Its first cause is in `failure_file`: see `headwater.engines.process`.
    """

    def __init__(self, engine: Any, on_failure: Callable[[str], None], failure_file: str) -> None:
        self.engine = engine
        self._failure_file = failure_file
        self.manager: Any = engine.tokenizer_manager
        self.failure = ""
        self._dead = asyncio.Event()
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._pids = list(engine.get_all_child_pids())
        # Not its `auto_create_handle_loop`, which takes over the process's signals.
        self.manager.event_loop = self._loop
        self._handling = self._loop.create_task(self.manager.handle_loop(), name="SGLang's messages")
        self._handling.add_done_callback(self._on_loop_end)
        # Its processes, and the thread that watches them, report a death by this signal.
        self._loop.add_signal_handler(signal.SIGQUIT, self._on_signal)

    def check(self) -> None:
        """Notice the death of a process that SGLang itself does not watch: a scheduler of several ranks. Raises `EngineDied`."""
        if not self.failure:
            watched = {process.pid for process in self._watched()}
            for pid in self._pids:
                # A watched one is reported by a signal, after its exit code is known.
                if pid not in watched and not _runs(pid):
                    self._fail(engine_process.read(self._failure_file, ()) or f"its process {pid} ended")
                    break
        if self.failure:
            raise EngineDied(f"SGLang died: {self.failure}")

    async def call(self, awaitable: Awaitable[T]) -> T:
        """The result of one of its calls, which would wait indefinitely for an answer of dead processes. Raises `EngineDied`."""
        answer = asyncio.ensure_future(awaitable)
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineDied(f"SGLang died: {self.failure}")
            return answer.result()
        finally:
            for future in (answer, death):
                future.cancel()

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("sglang_messages_failed", exc_info=error)
        self._fail(f"its message loop ended: {error!r}")

    def _on_signal(self) -> None:
        self._fail(engine_process.read(self._failure_file, self._watched()) or "one of its processes failed")

    def _watched(self) -> Sequence[Any]:
        """The processes that SGLang itself watches."""
        watchdog = getattr(self.manager, "_subprocess_watchdog", None)
        processes: Sequence[Any] = getattr(watchdog, "_processes", ())
        return processes

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self._dead.set()
            self._on_failure(reason)

    async def stop(self) -> None:
        """End all its processes: schedulers by themselves, so that they free GPU memory, then by signals. After a failure by signals at once."""
        failed = bool(self.failure)
        # Nothing that happens from here on is a failure.
        self.failure = self.failure or STOPPED
        self._dead.set()
        self._loop.remove_signal_handler(signal.SIGQUIT)
        watchdog = getattr(self.manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            await asyncio.to_thread(watchdog.stop)
        processes = _tree(self._pids)
        if not failed:
            # Else one of its ranks may wait for another that is dead.
            self._ask_to_end()
            await _gone([pid for pid in self._pids if SCHEDULER in _title(pid)], EXIT_S)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await _gone(processes, EXIT_S)
        self._handling.cancel()
        await asyncio.gather(self._handling, return_exceptions=True)
        self._release()

    def _ask_to_end(self) -> None:
        try:
            from sglang.srt.managers.io_struct import ShutdownReq

            self.manager._dispatch_to_scheduler(ShutdownReq())
        except Exception as error:  # an older release, or a dead scheduler: signals end it
            _log.debug("sglang_not_asked_to_end", reason=repr(error))

    def _release(self) -> None:
        """Release what its Python objects hold: sockets, and the files of those."""
        for name in ("recv_from_detokenizer", "send_to_scheduler"):
            channel = getattr(self.manager, name, None)
            if channel is not None:
                channel.close(linger=0)
        rpc = getattr(self.engine, "send_to_rpc", None)
        if rpc is not None:
            rpc.close(linger=0)
        ports = getattr(self.engine, "port_args", None)
        for value in vars(ports).values() if ports is not None else ():
            if isinstance(value, str) and value.startswith("ipc://"):
                Path(value.removeprefix("ipc://")).unlink(missing_ok=True)


def import_sglang() -> bool:
    """Import SGLang; is it to run on a CPU? Raises `EngineUnavailable`."""
    try:
        import sglang.srt.entrypoints.engine  # noqa: F401 (tried here, for its errors)
        from sglang.srt.utils import is_cpu
    except ImportError as error:
        if config.installed():
            raise EngineUnavailable(
                f"SGLang is installed here and cannot be imported: {error}. Its published packages need an NVIDIA "
                "GPU; on a CPU install its CPU build, with the kernels compiled for it"
            ) from error
        raise EngineUnavailable(
            "SGLang is not installed here: install headwater's `sglang` extra, give --sglang-python a Python that "
            "has it, or use another --engine"
        ) from error
    return bool(is_cpu())


def launch(arguments: dict[str, Any], failure_file: str) -> Any:
    """SGLang's `Engine`, started, without its hold on this process. Blocks until the model is loaded. Raises `EngineUnavailable`."""
    from sglang.srt.entrypoints.engine import Engine

    class ObservedEngine(Engine):  # type: ignore[misc]  # SGLang has no types
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    config.log_as_this_process(Path(failure_file).parent, arguments["log_level"])
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    before = signal.getsignal(signal.SIGQUIT)
    try:
        # A process that fails signals this one; the start then ends with an exception of its own.
        engine = ObservedEngine(**arguments, custom_sigquit_handler=_ignore)
    except SystemExit as error:
        cause = engine_process.read(failure_file, ())
        raise EngineStartFailed(
            f"SGLang ended its own start ({error.code}): {cause or 'see the log above'}"
        ) from error
    except Exception as error:  # whatever SGLang raises while it starts, it did not start
        _log.error("sglang_start_failed", exc_info=True)
        cause = engine_process.read(failure_file, ())
        raise start_failure(f"SGLang cannot start with {arguments['model_path']}", error, cause) from error
    finally:
        signal.signal(signal.SIGQUIT, before)
        root.handlers[:], root.level = handlers, level
    atexit.unregister(engine.shutdown)
    return engine


def _ignore(*_: object) -> None:
    """SIGQUIT while it starts: `Engine` notices the dead process itself."""


def _tree(pids: list[int]) -> list[int]:
    """These processes and all below them."""
    import psutil

    all_pids = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            all_pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return all_pids


def _title(pid: int) -> str:
    """Return what `ps` shows of it; empty for one that ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    """Does it run? One that ended waits to be reaped."""
    # Reaps all that ended.
    multiprocessing.active_children()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)


# Data-parallel ranks. There is at least one.


class SglangRank(EngineRank):
    """One rank. `reader` reads the loads that the schedulers publish, of their last steps."""

    def __init__(
        self,
        number: int,
        endpoints: tuple[str, str],
        translator: KvTranslator,
        total_blocks: int,
        page_size: int,
        reader: Any,
    ) -> None:
        super().__init__(number, endpoints, translator, total_blocks)
        self._page_size = page_size
        self._reader = reader
        self._unread = False

    def busy_load(self) -> EngineLoad:
        """See `EngineRank.busy_load`."""
        try:
            found = self._reader.read(self.number) if self._reader is not None else None
        except Exception as error:  # its file is SGLang's own
            if not self._unread:
                self._unread = True
                _log.warning("sglang_load_unreadable", rank=self.number, reason=repr(error))
            found = None
        if found is None:
            return self.idle._replace(running=len(self.running))
        used = -(-int(found.num_used_tokens) // self._page_size)
        total = self.idle.total_blocks
        return EngineLoad(int(found.num_running_reqs), int(found.num_waiting_reqs), min(used, total), total)


def of_engine(
    config: dict[str, Any],
    count: int,
    page_size: int,
    total_tokens: int,
    reader: Any,
    sentinels: MediaSentinels,
) -> list[SglangRank]:
    """The ranks of a started engine. `config` is that of its KV events, `sentinels` are the media of its requests."""
    from sglang.srt.disaggregation.kv_events import ZmqEventPublisher

    offset = ZmqEventPublisher.offset_endpoint_port
    return [
        SglangRank(
            number,
            (offset(config["endpoint"], number), offset(config["replay_endpoint"], number)),
            KvTranslator(page_size, sentinels=sentinels),
            total_tokens // page_size,
            page_size,
            reader,
        )
        for number in range(count)
    ]
