"""A fleet of `headwater up` as a process, on ports and a data directory of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from headwater.ops.start.sockets import free_port

READY: Final = re.compile(r"ready at (https?://[^/]+)/v1 ")
READY_S: Final = 400.0
STOP_S: Final = 60.0


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Words for Headwater, and those for the engine behind `--`."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


class FleetProcess:
    """`headwater up` with these words. Its log and data are in `folder`, and its NATS server is at `nats_url`."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._log = folder / "up.log"
        nats_port = free_port(0)
        self.nats_url = f"nats://127.0.0.1:{nats_port}"
        own, native = split_words(words)
        ports = ["--port", "0", "--nats-port", str(nats_port), "--data-dir", str(folder / "data")]
        command = [sys.executable, "-m", "headwater.ops.cli", "up", *ports, *own]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--", *native] if native else command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def url(self) -> str:
        """Where it serves, once it does. Raises RuntimeError."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self._process.poll() is None:
            found = READY.search(self._log.read_text(errors="replace"))
            if found:
                return found[1]
            time.sleep(0.5)
        raise RuntimeError("the fleet did not start")

    def last_words(self) -> str:
        """The end of its log, and what failed before."""
        lines = self._log.read_text(errors="replace").splitlines()
        failures = [line for line in lines if '"level": "error"' in line or "Error" in line]
        return "\n".join([*failures[:40], "…", *lines[-40:]])

    def stop(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
