"""Several vLLM engines on one machine's CPUs: a host that imports once and forks a worker process for each.

The host does nothing but fork, wait and fork again: it opens no socket and starts no thread, so that its
children inherit only imports. A worker that died is buried by a child of its own (which revokes its lease), then
started again.
"""

import asyncio
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import structlog

from headwater.actors.supervisor import DEFAULT_POLICY, Backoff
from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm import native, share_imports
from headwater.events.errors import LogError
from headwater.events.jetstream import JetStreamTable, connect
from headwater.ops import engines, preflight, process, run_actor, run_engine, workers
from headwater.ops.access import credentials
from headwater.ops.bury import bury
from headwater.ops.children import HOPELESS
from headwater.ops.config import Settings
from headwater.ops.warm import compile_kernels
from headwater.schemas import subjects

POLL_S = 0.2

_log = structlog.get_logger("headwater.host")


def run(settings: Settings) -> int:
    """Host the settings' workers until SIGTERM or SIGINT. 1 when one can not be kept alive."""
    # Before anything is imported: a wrong path should not cost a minute.
    engines.model_folder(settings)
    plans = workers.plan(settings)
    preflight.check(settings, plans)
    _log.info("vllm_importing", workers=len(plans))
    try:
        seconds = share_imports.preload(online="hf://" in settings.lora_sources)
    except ImportError as error:
        raise EngineUnavailable(f"vLLM can not be imported: {error}") from error
    try:
        # Once for all, with vLLM's own parser; what it means is not needed here.
        native.parse(settings.native)
    except EngineUnavailable as error:
        _log.error("engine_cannot_start", reason=str(error))
        return HOPELESS
    compile_kernels()
    _log.info("vllm_imported", seconds=round(seconds, 1))
    return _Host(settings, plans).run()


class _Host:
    def __init__(self, settings: Settings, plans: list[workers.WorkerPlan]) -> None:
        self._settings = settings
        self._plans = {plan.name: plan for plan in plans}
        self._stopping = False
        self._failed = False
        self._pids: dict[int, str] = {}
        self._started_s: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._backoff: dict[str, Backoff] = {}

    def run(self) -> int:
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._again = dict.fromkeys(self._plans, 0.0)
        self._backoff = {name: Backoff(DEFAULT_POLICY) for name in self._plans}
        while True:
            now = time.monotonic()
            for name in [name for name, due in self._again.items() if due <= now and not self._stopping]:
                del self._again[name]
                self._start(name)
            if self._stopping and not self._pids:
                return HOPELESS if self._failed else 0
            self._reap()
            select.select([wake_read], [], [], POLL_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)

    def _on_stop(self, *_: object) -> None:
        self._stopping = True
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _start(self, name: str) -> None:
        settings = workers.of_worker(self._settings, self._plans[name])
        self._started_s[name] = time.monotonic()
        pid = _fork(lambda: process.run(lambda stop: run_engine.run_engine(settings, stop)))
        self._pids[pid] = name

    def _reap(self) -> None:
        """Look after dead children: restart them, or give up on all when one can not be kept alive."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            name = self._pids.pop(pid, None)
            if name is None:
                continue
            # The engine's own processes are in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if self._stopping:
                continue
            _fork(partial(_bury_now, self._settings, name, pid))
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                # It was told to, by `headwater ctl stop`.
                _log.info("worker_ended", worker=name)
                continue
            now = time.monotonic()
            delay = self._backoff[name].next_delay_s(now, now - self._started_s[name])
            if code == HOPELESS:
                delay = None
            if delay is None:
                _log.error("gave_up", child=name, exit_code=code)
                self._on_stop()
                self._failed = True
                continue
            _log.warning("child_restarts", child=name, exit_code=code, delay_s=delay)
            self._again[name] = now + delay


def _fork(main: Callable[[], int]) -> int:
    """Run `main` in a forked child with its own process group; returns the child's id."""
    pid = os.fork()
    if not pid:
        _child(main)
    return pid


def _child(main: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = main()
    except BaseException as error:
        _log.error("worker_failed", reason=f"{type(error).__name__}: {error}", exc_info=error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's exit handlers are not ours to run.
        os._exit(code)


def _bury_now(settings: Settings, name: str, pid: int) -> int:
    return asyncio.run(_bury(settings, name, pid))


async def _bury(settings: Settings, name: str, pid: int) -> int:
    try:
        # In the worker's name: it may end its own lease.
        client = await connect(
            run_actor.nats_url(settings),
            "undertaker",
            inbox=subjects.inbox(settings.namespace, "worker", name, "bury"),
            credentials=credentials(settings, "worker", name),
            wait_s=2.0,
        )
        try:
            await bury(JetStreamTable(client, subjects.lease_bucket(settings.namespace)), "worker", name, pid)
        finally:
            await client.close()
    except LogError:
        # The lease lapses by itself in three seconds.
        return 1
    return 0
