"""A real nats-server for a test: on a free port, killed and started again at will, never outliving the test."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from headwater.ops.nats.server import binary, wait_until_up, write_config
from headwater.ops.start.signals import die_with_parent
from headwater.ops.start.sockets import free_port


class NatsServer:
    """One server with its store, configuration and output in `folder`.

    `ack_v2` sets the flag js_ack_fc_v2, which changes the format of every delivered message's reply subject;
    `settings` go into the configuration file as they are, over what every test server has.
    Port and store stay the same over `kill` and `restart`. Start it from the main thread: the kernel ends it
    with the thread that started it. A `config` of the test's own must listen on `port`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ack_v2: bool = False,
        settings: Mapping[str, Any] | None = None,
        port: int = 0,
        config: Path | None = None,
    ) -> None:
        self.folder = folder
        self.ack_v2 = ack_v2
        self.settings = settings
        self.port = port or free_port(0)
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def log_file(self) -> Path:
        """What the server printed, over all its lives."""
        return self.folder / "server.log"

    async def start(self) -> None:
        """Start, and return once it answers."""
        self._spawn()
        await wait_until_up(self.port)

    def _room(self) -> dict[str, Any]:
        """A store that promises any number of streams their greatest size: no test fills the disk."""
        return {
            "jetstream": {"store_dir": str(self.folder.resolve() / "jetstream"), "max_file_store": 1 << 50}
        }

    def _spawn(self) -> None:
        assert self._process is None, "the server is already running"
        config = self._config or write_config(
            self.folder,
            self.port,
            name=f"test-{self.port}",
            ack_v2=self.ack_v2,
            settings={**self._room(), **(self.settings or {})},
        )
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [binary(), "-c", str(config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    def violations(self) -> list[str]:
        """What was denied to clients, as the server logged it."""
        lines = self.log_file.read_text().splitlines()
        return [line for line in lines if "Violation" in line]

    def start_now(self) -> None:
        """The same for callers without a running event loop, such as session fixtures."""
        # A factory of its own: a plain `asyncio.run` would unset the loop of pytest-asyncio.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(self.start())

    def kill(self) -> None:
        """SIGKILL: what the server had not written is lost, and nobody is told."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers. Returns once every thread stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        while any(_state(thread / "stat") != "T" for thread in threads.iterdir()):
            time.sleep(0.001)

    def resume(self) -> None:
        """Go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def reload(self) -> None:
        """SIGHUP: the server reads its configuration again."""
        os.kill(self.pid, signal.SIGHUP)

    async def restart(self) -> None:
        """Start again on the same port and store, after `kill` or `stop`."""
        await self.start()

    def stop(self) -> None:
        """End in an orderly way; fine if it is not running."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        """Started at once; stopped at the end of the block."""
        self.start_now()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[NatsServer]:
    """A server with these settings, for a test in an event loop; stopped at the end of the block."""
    server = NatsServer(folder, settings=settings)
    await server.start()
    try:
        yield server
    finally:
        server.stop()


def _state(stat: Path) -> str:
    """A thread's state, as /proc spells it."""
    return stat.read_text().rsplit(")", 1)[1].split()[0]
