"""Real servers for a benchmark, with temporary stores."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headwater.ops.nats.server import binary, wait_until_up, write_config
from headwater.ops.process.signals import die_with_parent
from headwater.ops.process.sockets import free_port


@asynccontextmanager
async def servers(folder: Path, count: int) -> AsyncIterator[str]:
    """`count` servers (more than one: a cluster) with their stores in `folder`; yields their comma-separated URLs."""
    ports = [free_port(0) for _ in range(count)]
    routes = [free_port(0) for _ in range(count)]
    started = []
    for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
        cluster = {
            "name": "bench",
            "listen": f"127.0.0.1:{route}",
            "routes": [f"nats://127.0.0.1:{other}" for other in routes],
        }
        started.append(
            _start(folder / f"n{number}", port, f"n{number}", {"cluster": cluster} if count > 1 else {})
        )
    try:
        await asyncio.gather(*(wait_until_up(port) for port in ports))
        yield ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)


def _start(folder: Path, port: int, name: str, settings: dict[str, object]) -> "subprocess.Popen[bytes]":
    config = write_config(folder, port, name=name, settings=settings)
    with (folder / "server.log").open("ab") as output:
        return subprocess.Popen(
            [binary(), "-c", str(config)], stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
