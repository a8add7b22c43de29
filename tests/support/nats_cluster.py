"""Three real nats-servers as one cluster, for what a single server can not do: replicas."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import msgspec

from headwater.ops.nats_server import binary, free_port, wait_until_up, write_config
from headwater.ops.process import die_with_parent

SIZE = 3


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[str]:
    """A cluster on loopback with its stores in `folder`; gives the URL of its first server.

    Its JetStream takes requests only after an election: ask until it does.
    """
    ports = [free_port(0) for _ in range(SIZE)]
    routes = [free_port(0) for _ in range(SIZE)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, (port, route) in enumerate(zip(ports, routes)):
            home = folder / f"n{number}"
            path = write_config(home, port, name=f"n{number}")
            config = msgspec.json.decode(path.read_bytes())
            config["cluster"] = {
                "name": "test",
                "listen": f"127.0.0.1:{route}",
                "routes": [f"nats://127.0.0.1:{other}" for other in routes],
            }
            path.write_bytes(msgspec.json.encode(config))
            with (home / "server.log").open("ab") as output:
                command = [binary(), "-c", str(path)]
                started.append(_spawn(command, output))
        for port in ports:
            await wait_until_up(port)
        yield f"nats://127.0.0.1:{ports[0]}"
    finally:
        for server in started:
            server.kill()
        for server in started:
            server.wait()


def _spawn(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    # Not asyncio's: such a process is tied to the loop of one test.
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
