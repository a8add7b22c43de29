"""`headwater admin`: the admin port, as a process and a NATS client of its own.

Not in the edge: that one faces the internet, and whoever controls workers must not be one mistake of its away. So
the edge's key can not control, and this process's key (kind `admin`) can do nothing but control and read leases.
"""

import asyncio
import ipaddress
from pathlib import Path

import structlog

from headwater.actors.admin import AdminApp
from headwater.actors.admin_tokens import LogIns, Token, WeakToken, parse_tokens
from headwater.actors.edge.server import STOP_S, UvicornServer
from headwater.actors.supervisor import GaveUp, supervise
from headwater.ops.access import credentials
from headwater.ops.config import ConfigError, Settings
from headwater.ops.run_actor import listen, world_of

_log = structlog.get_logger("headwater.admin")


def tokens_of(settings: Settings) -> list[Token]:
    """The tokens of `--admin-token-file`. Raises `ConfigError`: without one there is no admin port."""
    if not settings.admin_token_file:
        raise ConfigError("--admin-port needs --admin-token-file: nobody may control workers without a token")
    path = Path(settings.admin_token_file)
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token-file {path}: {error}") from error
    if mode & 0o077:
        _log.warning("admin_token_file_readable_by_others", path=str(path), mend="chmod 600")
    try:
        return parse_tokens(text)
    except WeakToken as error:
        raise ConfigError(f"--admin-token-file {path}: {error}") from error


def check(settings: Settings) -> None:
    """Raises `ConfigError` for an admin port that could not be opened with these settings."""
    tokens_of(settings)
    credentials(settings, "admin", "admin")
    listen(settings.admin_host, settings.admin_port, "--admin-port").close()


async def admin(settings: Settings, stop: asyncio.Event) -> int:
    """Serve the admin port until stopped."""
    if not settings.admin_port:
        raise ConfigError("give the port to listen on with --admin-port")
    tokens = tokens_of(settings)
    listener = listen(settings.admin_host, settings.admin_port, "--admin-port")
    if not _is_loopback(settings.admin_host):
        _log.warning(
            "admin_port_open",
            host=settings.admin_host,
            reason="tokens travel in the clear: put TLS before it",
        )
    async with world_of(settings, "admin", settings.name or "admin") as world:
        log_ins = LogIns(tokens, world.clock)
        serving: list[UvicornServer] = []

        async def one_life() -> str:
            server = UvicornServer(listener.dup())
            serving[:] = [server]
            try:
                await server.serve(AdminApp(world, log_ins))
            finally:
                server.close()
            return "" if stop.is_set() else "it stopped serving"

        work = asyncio.create_task(supervise("admin", one_life, world.clock), name="admin")
        waiting = asyncio.create_task(stop.wait(), name="stop")
        _log.info(
            "admin_listens", url=f"http://{settings.admin_host}:{listener.getsockname()[1]}/admin/workers"
        )
        try:
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for server in serving:
                server.stop()
            await asyncio.wait({work}, timeout=STOP_S)
            if work.done():
                work.result()
        except GaveUp as error:
            _log.error("gave_up", reason=str(error))
            return 1
        finally:
            waiting.cancel()
            work.cancel()
            listener.close()
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
