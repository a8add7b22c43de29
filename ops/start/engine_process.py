"""How an engine process begins: in an environment that has its engine; then as one worker, several that share an import, or a part of one elsewhere.

An engine and its torch are gigabytes that not everybody wants, and engines pin different builds of torch, so that no environment holds two.
Environments are made once, in the user's cache folder. By its engine's traits either the whole `headwater up` continues in an environment
that has it, or each process of a worker does, whatever started it.
"""

import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NoReturn

import structlog

from headwater import __version__
from headwater.engines import logs, process, registry
from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import Follower
from headwater.engines.traits import EngineEnvironment
from headwater.ops.config.processes import EngineProcess, LocalFleetSettings, engine_options, setting
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.worker import FleetSettings, section_of
from headwater.ops.start import metrics_folder
from headwater.ops.start.model_source import with_folder
from headwater.schemas.names import split_host_port

INSIDE: Final = "HEADWATER_ENVIRONMENT_OF"
"""Variable with the engine whose environment this process was continued in."""

PYTHON: Final = "python"
"""The option of an engine that names the Python of its environment."""

CPU_TORCH: Final = "torch==2.13.0+cpu"

REASON_MAX: Final = 2_000
"""Characters of what the installer says last before it fails."""


def _needs(engine: str) -> EngineEnvironment:
    needs = registry.traits_of(engine).environment
    assert needs is not None, engine
    return needs


def has(engine: str) -> bool:
    """Does this Python have the engine?"""
    return importlib.util.find_spec(_needs(engine).module) is not None


def enter(engine: str, arguments: Sequence[str], python: str = "") -> None:
    """Continue with the command line `arguments` in a Python that has the engine, unless this one does.

    `python` is its path, "" for an environment that is made if need be. Raises `EngineUnavailable`.
    """
    if python and _same(engine, python):
        return
    if not python and has(engine):
        return
    if os.environ.get(INSIDE) == engine:
        raise EngineUnavailable(
            f"{registry.traits_of(engine).title} is missing even in {sys.prefix}, which is to have it: install it there, or remove "
            "that folder if Headwater made it"
        )
    _continue(engine, arguments, check(engine, python) if python else ensure(engine))


def enter_for(
    settings: EngineProcess | LocalFleetSettings, arguments: Sequence[str], *, per_worker: bool
) -> None:
    """`enter` if this process, one of a worker or a whole fleet, is what is to continue. Raises `EngineUnavailable`."""
    engine = settings.worker.engine
    needs = registry.traits_of(engine).environment
    if needs is not None and needs.per_worker == per_worker:
        enter(engine, arguments, named_python(settings, engine))


def named_python(settings: EngineProcess | LocalFleetSettings, engine: str) -> str:
    """The Python that an engine's options name, "" for none."""
    return str(getattr(engine_options(settings, engine), PYTHON, ""))


def prepare(engine: str, python: str = "") -> None:
    """Make the environment that a worker's process will continue in, if there is one. Raises `EngineUnavailable`."""
    needs = registry.traits_of(engine).environment
    if needs is None or not needs.per_worker:
        return
    if python:
        check(engine, python)
    elif not has(engine):
        ensure(engine)


def check(engine: str, python: str) -> Path:
    """The path of an executable. Raises `EngineUnavailable`."""
    executable = shutil.which(os.path.expanduser(python))
    if executable is None:
        raise EngineUnavailable(
            f"{setting(f'{section_of(engine)}.{PYTHON}').flag} {python}: there is no such program; give the Python of an "
            f"environment that has {registry.traits_of(engine).title} and Headwater"
        )
    return Path(executable)


def ensure(engine: str) -> Path:
    """The Python of an environment with this engine, which is made if need be. Raises `EngineUnavailable`."""
    needs, title = _needs(engine), registry.traits_of(engine).title
    source = _source(needs.extras)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = hashlib.sha256(f"{source} {sys.version} {sys.prefix}".encode()).hexdigest()[:12]
    folder = Path(base) / "headwater" / f"env-{engine}-{__version__}-{key}"
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return python
    uv = os.environ.get("UV") or shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).is_file():
        raise EngineUnavailable(
            f"{title} is not installed here, and neither is uv, which would install it: `pip install uv`, or "
            f"install headwater's `{needs.extras.partition(',')[0]}` extra, or use another --engine"
        )
    logs.say(f"{title} is not installed here: installing it once into {folder} ({needs.size}) …")
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
    environ = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    torch = ([CPU_TORCH] if links else ["--torch-backend=cpu"]) if needs.cpu else []
    steps = [
        [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--python", str(python), *torch, *source],
    ]
    if needs.warm:
        steps.append([str(python), "-m", "headwater.ops.cli", "warm"])
    root = Path(source[1].partition("[")[0]) if source[0] == "-e" else None
    for step in steps:
        # In the project's folder uv reads what pyproject.toml says about the engine's dependencies.
        done = subprocess.run(step, env=environ, cwd=root, check=False, capture_output=logs.is_json())
        if done.returncode:
            said = (done.stderr or b"").decode(errors="replace").strip()[-REASON_MAX:]
            raise EngineUnavailable(
                f"installing {title} failed at: {' '.join(step[:3])}{said and f': {said}'}"
            )
    (folder / "complete").touch()
    return python


def _continue(engine: str, arguments: Sequence[str], python: Path) -> NoReturn:
    os.environ[INSIDE] = engine
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(python, [str(python), "-m", "headwater.ops.cli", *arguments])
    except OSError as error:
        raise EngineUnavailable(f"{python} cannot be run: {error.strerror}") from error


def _same(engine: str, python: str) -> bool:
    """Is this Python the one of that environment? Links of two environments may lead to one program."""
    return check(engine, python).absolute() == Path(sys.executable).absolute()


def _source(extras: str) -> list[str]:
    """Return how to install this very headwater: its checkout, or its released version."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return ["-e", f"{root}[{extras}]"]
    return [f"headwater[{extras}]=={metadata.version('headwater')}"]


LEADER_S: Final = 2.0
"""How long a follower tries to reach its leader before it loads."""

STANDS_S: Final = 1.0
"""A connection to a leader that ends sooner was not its own."""

FAILED: Final = 1

END_S: Final = 5.0
"""How long an engine may take to end by itself when its leader is gone, and to say why."""

SILENCE_S, PROBE_S, PROBES = 10, 5, 4
"""A host whose kernel was silent is asked so often, and then counts as gone."""

_log = structlog.get_logger("headwater.main")


def run(settings: EngineProcess) -> int:
    """Run until stopped; returns the exit code. Raises `EngineUnavailable` for what a user can fix.

    0 after `headwater ctl stop` only: a worker that a signal ended is to be started again.
    """

    logs.describe(kind="worker")
    enter_for(settings, sys.argv[1:], per_worker=True)
    settings = with_folder(settings)
    if registry.traits_of(settings.worker.engine).writes_metric_files and settings.metrics.port:
        # Before the first import of Prometheus: see there.
        metrics_folder.take()
    try:
        return _run(settings)
    finally:
        process.give_up_own()


def _run(settings: EngineProcess) -> int:
    from headwater.ops.start import engine, plan, signals

    launcher = plan.launcher_for(settings)
    follower = launcher.follower()
    if follower is not None:
        return _follow(settings, follower)
    if launcher.shares_import():
        from headwater.ops.start import forks

        return forks.run(settings)
    plans = plan.plan(_one(settings))
    plan.check_plan(settings, plans)
    alone = plan.of_worker(settings, plans[0]._replace(name=settings.name))
    return signals.run(lambda stop: engine.run_engine(alone, stop), reports_signal=True)


def _follow(settings: EngineProcess, follower: Follower) -> int:
    """Run a part of a worker elsewhere, which represents it in the fleet, and serve its metrics. Returns the exit code.

    A part that ends because its leader did is to be started again, so its code says that it failed.
    """
    from headwater.ops.start import metrics, plan

    plans = plan.plan(_one(settings))
    plan.check_plan(settings, plans)
    name = settings.name or follower.name
    if settings.metrics.port:
        labels = {"worker": name, "pool": "", "role": settings.worker.profile.role, "rank": follower.rank}
        metrics.serve(settings.metrics, lambda: labels, kind="worker")
    if reason := _unreached(follower.leader):
        _log.warning("leader_not_reached", leader=follower.leader, reason=reason)
    ended, gone = threading.Event(), threading.Event()
    if follower.leader and follower.ends_with_it:
        arguments = (follower.leader, ended, gone)
        threading.Thread(target=_end_with, args=arguments, name="leader", daemon=True).start()
    alone = plan.of_worker(settings, plans[0])
    spec = plan.with_model(alone, plan.spec_of(alone, name))
    try:
        plan.launcher_for(alone).run_follower(spec)
    except process.EngineInterrupted as interrupted:
        return FAILED if gone.is_set() else 128 + interrupted.number
    finally:
        ended.set()
    return FAILED


def _unreached(leader: str) -> str:
    """Why the leader of a follower does not answer now; empty where it does, and where its address is unknown. It may start later."""
    if not leader:
        return ""
    try:
        socket.create_connection(split_host_port(leader), LEADER_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _end_with(leader: str, ended: threading.Event, gone: threading.Event) -> None:
    """End this process, as SIGTERM does, when the leader is gone that answers first: the engine may wait for it for good.

    `ended`: this process ends already. `gone` is set before it is ended from here.
    """
    reason = ""
    while not reason:
        try:
            connection = socket.create_connection(split_host_port(leader), LEADER_S)
        except (OSError, ValueError):
            time.sleep(LEADER_S)
            continue
        began = time.monotonic()
        reason = _await_end(connection)
        if time.monotonic() - began < STANDS_S:
            # An engine finds a free port by listening there for a moment.
            reason = ""
            time.sleep(STANDS_S)
    if ended.wait(END_S):
        return
    _log.warning("leader_gone", leader=leader, reason=reason)
    gone.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _await_end(connection: socket.socket) -> str:
    """Return why a connection ended, once the other side closed it or was not heard of for long."""
    try:
        with connection:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("KEEPIDLE", SILENCE_S), ("KEEPINTVL", PROBE_S), ("KEEPCNT", PROBES)):
                # Not every system has them.
                if number := getattr(socket, f"TCP_{option}", None):
                    connection.setsockopt(socket.IPPROTO_TCP, number, value)
            while connection.recv(4096):
                pass
    except OSError as error:
        return str(error)
    return "it closed the connection"


def _one(settings: EngineProcess) -> EngineProcess:
    """The same settings for a single worker: without a shared import each worker is a process of its own."""
    fleet = settings.fleet
    if (fleet.workers or 1) > 1 or fleet.prefill_workers or fleet.decode_workers or fleet.encode_workers:
        raise ConfigError(
            f"this runs one {settings.worker.engine} worker per process: give --role and start one process per worker, "
            "or use `headwater up`"
        )
    return settings._replace(fleet=FleetSettings(workers=1))
