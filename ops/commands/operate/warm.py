"""`headwater warm`: what a first start would compile and cache."""

import os
import subprocess
import time

from headwater.ops.config.command import command


@command
def warm() -> int:
    """Precompile kernels and imports, so that the first start is as fast as later ones."""
    from headwater.ops.fleet.child import child_environment, headwater_command
    from headwater.ops.process.kernels import compile_kernels

    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return subprocess.run(headwater_command("warm"), env=child_environment(), check=False).returncode
    began = time.monotonic()
    compile_kernels()
    # Importing writes the bytecode of the modules that a fleet's processes use.
    from headwater.ops.fleet import demo, up  # noqa: F401 (for the bytecode)
    from headwater.ops.process import edge, routers  # noqa: F401 (for the bytecode)
    from headwater.ops.worker import engine  # noqa: F401 (for the bytecode)

    print(f"compiled the kernels in {time.monotonic() - began:.1f} s")
    return 0
