"""SGLang's diffusion server on a CPU: its environment, and the arguments that tests start it with."""

from pathlib import Path
from typing import Final

from tests.support.sglang.environment import PYTHON, ROOT

PACKAGES: Final = ROOT / ".sglang-diffusion"
"""Where `make sglang-diffusion` installs what SGLang's environment lacks."""

INSTALLED: Final = PACKAGES.is_dir() and PYTHON.exists()
SERVER_ARGUMENTS: Final = ("--warmup-mode", "off")


def python_on_cpu(folder: Path) -> Path:
    """An interpreter for the option `python`: SGLang's environment with these packages, one thread, no compiler and no network."""
    [ffmpeg] = (PACKAGES / "imageio_ffmpeg" / "binaries").glob("ffmpeg*")
    (folder / "ffmpeg").symlink_to(ffmpeg)
    site = Path(__file__).parent / "site"
    made = folder / "python"
    made.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH="{site}:{PACKAGES}" PATH="{folder}:$PATH"\n'
        "export TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1\n"
        f'exec "{PYTHON}" "$@"\n'
    )
    made.chmod(0o700)
    return made
