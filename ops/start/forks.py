"""Several workers of one machine whose engine's import is shared: a host that imports once and forks a process for each.

The host does nothing but fork, wait and fork again: it opens no socket and starts no thread, so that its
children inherit only imports. When a worker died, a child of its own revokes its lease; then the worker
is started again.
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

from headwater.actors.runtime.actor import DEFAULT_POLICY, Backoff
from headwater.engines import logs
from headwater.engines.engine import EngineUnavailable
from headwater.events.jetstream import JetStreamTable
from headwater.events.ports import LogError
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.sections import NatsSettings
from headwater.ops.nats.connect import open_connection
from headwater.ops.start import engine, plan, signals
from headwater.ops.start import plan as workers
from headwater.ops.start.actor import EXIT_START_FAILED, EXIT_UNRECOVERABLE, compile_kernels, revoke_leases_of
from headwater.schemas import subjects

POLL_S = 0.2

_log = structlog.get_logger("headwater.host")


def run(settings: EngineProcess) -> int:
    """Host the settings' workers until a signal asks it to end, or one cannot be kept alive; returns the exit code."""
    logs.describe(kind="host")
    # Before anything is imported: a wrong path should not cost a minute.
    plan.with_model(settings, workers.spec_of(settings, ""))
    plans = workers.plan(settings)
    workers.check_plan(settings, plans)
    try:
        workers.launcher_for(settings).import_once(workers.specs_of(settings, plans))
    except EngineUnavailable as error:
        _log.error("engine_cannot_start", reason=str(error))
        return EXIT_UNRECOVERABLE
    compile_kernels()
    return _Host(settings, plans).run()


class _Host:
    def __init__(self, settings: EngineProcess, plans: list[workers.WorkerPlan]) -> None:
        self._settings = settings
        self._plans = {plan.name: plan for plan in plans}
        self._stopping = False
        self._exit_code = 0
        self._pids: dict[int, str] = {}
        self._started_s: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._backoff: dict[str, Backoff] = {}
        self._steady: set[str] = set()
        """Workers that once ran for `steady_s`: what ends those again and again may be a request."""

    def run(self) -> int:
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signals.replace_handlers(self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._again = dict.fromkeys(self._plans, 0.0)
        self._backoff = {name: Backoff(DEFAULT_POLICY) for name in self._plans}
        while True:
            now = time.monotonic()
            for name in [name for name, due in self._again.items() if due <= now and not self._stopping]:
                del self._again[name]
                self._start(name)
            if self._stopping and not self._pids:
                return self._exit_code
            self._reap()
            select.select([wake_read], [], [], POLL_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)

    def _on_signal(self, number: int, _: object) -> None:
        self._stop(signals.exit_code(number))

    def _stop(self, code: int) -> None:
        """Stop all workers, then end with `code`: the first one that was given."""
        self._exit_code = self._exit_code or code
        self._stopping = True
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _start(self, name: str) -> None:
        settings = workers.of_worker(self._settings, self._plans[name])
        self._started_s[name] = time.monotonic()
        pid = _fork(lambda: signals.run(lambda stop: engine.run_engine(settings, stop), reports_signal=True))
        self._pids[pid] = name

    def _reap(self) -> None:
        """Restart dead children. Stop all if one cannot be kept alive, and none runs steadily."""
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
            _fork(partial(_revoke_now, self._settings.nats, name, pid))
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                # `headwater ctl stop` ended it.
                _log.info("worker_ended", worker=name)
                continue
            now = time.monotonic()
            delay = self._delay_s(name, code, now)
            if delay is None:
                _log.error("process_abandoned", child=name, exit_code=code)
                if not self._is_any_steady(now):
                    self._stop(code if code == EXIT_START_FAILED else EXIT_UNRECOVERABLE)
                continue
            _log.warning("child_restarting", child=name, exit_code=code, delay_s=delay)
            self._again[name] = now + delay

    def _delay_s(self, name: str, code: int, now: float) -> float | None:
        """Seconds until a worker that ended with `code` is started again, None for never."""
        ran_s = now - self._started_s[name]
        if code == EXIT_START_FAILED:
            backoff, is_steady = self._backoff[name], bool(self._steady) or self._is_any_steady(now)
            start_s = backoff.next_start_s()
            return start_s if is_steady or backoff.starts_failed < DEFAULT_POLICY.starts_max else None
        delay = self._backoff[name].next_delay_s(now, ran_s)
        if ran_s >= DEFAULT_POLICY.steady_s:
            self._steady.add(name)
        if code == EXIT_UNRECOVERABLE:
            return None
        if delay is None and (name in self._steady or self._is_any_steady(now)):
            _log.error(
                "child_restart_limit_exceeded",
                child=name,
                exit_code=code,
                delay_s=DEFAULT_POLICY.kept_delay_s,
            )
            return DEFAULT_POLICY.kept_delay_s
        return delay

    def _is_any_steady(self, now: float) -> bool:
        """Does a worker run, and has for long?"""
        return any(now - self._started_s[name] >= DEFAULT_POLICY.steady_s for name in self._pids.values())


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
        signals.replace_handlers(signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = main()
    except BaseException as error:
        _log.error("worker_failed", reason=f"{type(error).__name__}: {error}", exc_info=error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's exit handlers are not ours to run.
        os._exit(code)


def _revoke_now(nats: NatsSettings, name: str, pid: int) -> int:
    return asyncio.run(_revoke(nats, name, pid))


async def _revoke(nats: NatsSettings, name: str, pid: int) -> int:
    try:
        # As the worker: it may delete its own lease.
        client = await open_connection(nats, "worker", name, inbox="revoke_leases_of", wait_s=2.0)
        try:
            leases = JetStreamTable(client, subjects.lease_bucket(nats.namespace))
            await revoke_leases_of(leases, "worker", name, pid)
        finally:
            await client.close()
    except LogError:
        # The lease expires within three seconds.
        return 1
    return 0
