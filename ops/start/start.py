"""Ways to run an engine process: one worker, several that share an import, or a part of a worker elsewhere."""

import os
import signal
import socket
import sys
import threading
import time
from typing import Final

import structlog

from headwater.engines import logs, process, registry
from headwater.engines.launcher import Follower
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.worker import FleetSettings
from headwater.ops.model_download.source import with_folder
from headwater.ops.process import metrics_folder
from headwater.schemas.addresses import split_host_port

LEADER_S: Final = 2.0
"""How long a follower tries to reach its leader before it loads."""

END_S: Final = 5.0
"""How long an engine may take to end by itself when its leader is gone, and to say why."""

SILENCE_S, PROBE_S, PROBES = 10, 5, 4
"""A host whose kernel was silent is asked so often, and then counts as gone."""

_log = structlog.get_logger("headwater.main")


def run(settings: EngineProcess) -> int:
    """Run until stopped; returns the exit code. Raises `EngineUnavailable` for what a user can fix.

    0 after `headwater ctl stop` only: a worker that a signal ended is to be started again.
    """
    from headwater.ops.start import environment

    logs.describe(kind="worker")
    environment.enter_for(settings, sys.argv[1:], per_worker=True)
    settings = with_folder(settings)
    if registry.traits_of(settings.worker.engine).writes_metric_files and settings.metrics.port:
        # Before the first import of Prometheus: see there.
        metrics_folder.take()
    try:
        return _run(settings)
    finally:
        process.give_up_own()


def _run(settings: EngineProcess) -> int:
    from headwater.ops.process import signals
    from headwater.ops.start import engine, plan

    launcher = plan.launcher_for(settings)
    follower = launcher.follower()
    if follower is not None:
        _follow(settings, follower)
        return 0
    if launcher.shares_import():
        from headwater.ops.start import forks

        return forks.run(settings)
    plans = plan.plan(_one(settings))
    plan.check(settings, plans)
    alone = plan.of_worker(settings, plans[0]._replace(name=settings.name))
    return signals.run(lambda stop: engine.run_engine(alone, stop), reports_signal=True)


def _follow(settings: EngineProcess, follower: Follower) -> None:
    """Run a part of a worker elsewhere, which represents it in the fleet, and serve its metrics."""
    from headwater.ops.process import metrics
    from headwater.ops.start import make_engine, plan

    plans = plan.plan(_one(settings))
    plan.check(settings, plans)
    name = settings.name or follower.name
    if settings.metrics.port:
        labels = {"worker": name, "pool": "", "role": settings.worker.profile.role, "rank": follower.rank}
        metrics.serve(settings.metrics, lambda: labels, kind="worker")
    if reason := _unreached(follower.leader):
        _log.warning("leader_not_reached", leader=follower.leader, reason=reason)
    if follower.leader and follower.ends_with_it:
        threading.Thread(target=_end_with, args=(follower.leader,), name="leader", daemon=True).start()
    alone = plan.of_worker(settings, plans[0])
    spec = make_engine.with_model(alone, plan.spec_of(alone, name))
    plan.launcher_for(alone).run_follower(spec)


def _unreached(leader: str) -> str:
    """Why the leader of a follower does not answer now; empty where it does, and where its address is unknown. It may start later."""
    if not leader:
        return ""
    try:
        socket.create_connection(split_host_port(leader), LEADER_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _end_with(leader: str) -> None:
    """End this process, as SIGTERM does, when the leader is gone that answers first: the engine may wait for it for good."""
    while _unreached(leader):
        time.sleep(LEADER_S)
    reason = "it closed the connection"
    try:
        with socket.create_connection(split_host_port(leader), LEADER_S) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("KEEPIDLE", SILENCE_S), ("KEEPINTVL", PROBE_S), ("KEEPCNT", PROBES)):
                # Not every system has them.
                if number := getattr(socket, f"TCP_{option}", None):
                    connection.setsockopt(socket.IPPROTO_TCP, number, value)
            while connection.recv(4096):
                pass
    except OSError as error:
        reason = str(error)
    time.sleep(END_S)
    _log.warning("leader_gone", leader=leader, reason=reason)
    os.kill(os.getpid(), signal.SIGTERM)


def _one(settings: EngineProcess) -> EngineProcess:
    """The same settings for a single worker: without a shared import each worker is a process of its own."""
    fleet = settings.fleet
    if (fleet.workers or 1) > 1 or fleet.prefill_workers or fleet.decode_workers or fleet.encode_workers:
        raise ConfigError(
            f"this runs one {settings.worker.engine} worker per process: give --role and start one process per worker, "
            "or use `headwater up`"
        )
    return settings._replace(fleet=FleetSettings(workers=1))
