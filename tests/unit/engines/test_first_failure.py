"""The cause of an engine's death, as the process that fails logs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.engines import process
from headwater.ops.start.children import child_environment

PROGRAM = """
import json, logging.config, sys
from pathlib import Path
from headwater.engines import logs, process

process.keep("engine", ("hit an exception",))
if sys.argv[2] == "later":
    logging.config.dictConfig(json.loads(logs.write_config(Path(sys.argv[1]), {"engine": "info"}).read_bytes()))

def fails(logger, text, error):
    try:
        raise error
    except Exception:
        logging.getLogger(logger).error(text)

fails("engine.calls", "a call failed", ValueError("an answer"))
fails("engineer", "it hit an exception", ValueError("of another"))
fails("engine.scheduler", "it hit an exception", RuntimeError("reset by peer \\N{BEACH WITH UMBRELLA}"))
fails("engine", "it hit an exception", KeyError("a consequence"))
"""


@pytest.mark.parametrize("configured", ["before", "later"])
def test_the_first_fatal_exception_is_kept(tmp_path: Path, configured: str) -> None:
    """Also in a process that configures its logging after it began, as those of SGLang do."""
    path = tmp_path / "first-failure"
    environ = child_environment() | {process.VARIABLE: str(path)}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), configured], env=environ, check=True)
    assert process.read(str(path), ()) == "RuntimeError: reset by peer \N{BEACH WITH UMBRELLA}"
