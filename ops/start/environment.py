"""Environments for engines that this one lacks: made once, in the user's cache folder, and continued in.

An engine and its torch are gigabytes that not everybody wants, and engines pin different builds of torch, so that no
environment holds two. By its engine's traits either the whole `headwater up` continues in an environment that has it, or each
process of a worker does, whatever started it.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NoReturn

from headwater import __version__
from headwater.engines import logs, registry
from headwater.engines.engine import EngineUnavailable
from headwater.engines.traits import EngineEnvironment
from headwater.ops.config.processes import EngineProcess, LocalFleetSettings, engine_options, setting
from headwater.ops.config.worker import section_of

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
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise EngineUnavailable(
            f"{setting(f'{section_of(engine)}.{PYTHON}').flag} {python}: there is no such program; give the Python of an "
            f"environment that has {registry.traits_of(engine).title} and Headwater"
        )
    return Path(found)


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
