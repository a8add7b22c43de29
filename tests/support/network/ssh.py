"""Hosts that a real sshd stands for, each an address of this machine's loopback interface."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from headwater.ops.nats import config as nats_config
from headwater.ops.start.children import child_environment, headwater_command
from headwater.ops.start.sockets import free_port

NO_SSHD: Final = shutil.which("sshd", path="/usr/sbin:/usr/bin") is None


def write_keys(folder: Path, addresses: list[str], port: int) -> Path:
    """Write the keys of a cluster with these addresses; returns their folder."""
    wanted = nats_config.Wanted("default", servers=len(addresses), hosts=tuple(addresses), port=port)
    nats_config.write(wanted, folder / "keys")
    return folder / "keys"


@contextmanager
def sshd(folder: Path) -> Iterator[Path]:
    """An sshd of the test's own; gives a configuration of ssh that reaches it under any name."""
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port(0)
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    )
    try:
        yield folder / "ssh_config"
    finally:
        server.terminate()
        server.wait()


@asynccontextmanager
async def running(folder: Path, path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`headwater launch` of a file, in a process group of its own, killed at the end."""
    with (folder / "launch.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *headwater_command("launch", str(path)),
            stdout=log,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def until_logged(log: Path, text: str, within_s: float) -> None:
    """Wait until a log has a text."""
    async with asyncio.timeout(within_s):
        while text not in log.read_text():
            await asyncio.sleep(0.2)
