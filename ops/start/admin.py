"""`headwater admin`: the admin port, as a process and a NATS client of its own.

The port is not part of the edge: the edge faces the internet, and one mistake in it must not give control over workers. So the edge's
key cannot control workers, and this process's key (kind `admin`) can only control them and read leases.
"""

import asyncio
from pathlib import Path

import structlog

from headwater.actors.admin import AdminApp, Token, TokenAuthenticator, WeakToken, parse_tokens
from headwater.actors.http.server import STOP_S, UvicornServer
from headwater.actors.limits import ConnectionLimits
from headwater.actors.runtime.actor import RestartLimitReached, supervise
from headwater.ops.config.processes import AdminProcess
from headwater.ops.config.sections import AdminSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.config import credentials
from headwater.ops.nats.connect import ports_of
from headwater.ops.start.sockets import bind
from headwater.ops.start.system import connections_possible
from headwater.schemas.names import host_port, is_loopback

_log = structlog.get_logger("headwater.admin")


def tokens_of(settings: AdminSettings) -> list[Token]:
    """The tokens of `--admin-token-file`. Raises `ConfigError`: without one there is no admin port."""
    if not settings.token_file:
        raise ConfigError("--admin-port needs --admin-token-file: control of workers requires a token")
    return read_tokens(settings.token_file, "--admin-token-file")


def read_tokens(file: str, flag: str) -> list[Token]:
    """The tokens of a file that a flag names. Raises `ConfigError`."""
    path = Path(file)
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    if mode & 0o077:
        _log.warning("admin_token_file_readable_by_others", path=str(path), fix="chmod 600")
    try:
        return parse_tokens(text)
    except WeakToken as error:
        raise ConfigError(f"{flag} {path}: {error}") from error


def check(settings: AdminProcess) -> None:
    """Raises `ConfigError` for an admin port that could not be opened with these settings."""
    tokens_of(settings.admin)
    credentials(settings.nats, "admin", "admin")
    bind(settings.admin.host, settings.admin.port, "--admin-port").close()


async def admin(settings: AdminProcess, stop: asyncio.Event) -> int:
    """Serve the admin port until stopped."""
    admin_settings = settings.admin
    if not admin_settings.port:
        raise ConfigError("give the port to listen on with --admin-port")
    tokens = tokens_of(admin_settings)
    listener = bind(admin_settings.host, admin_settings.port, "--admin-port")
    limits = ConnectionLimits()
    limits = limits._replace(connections=connections_possible(limits.connections))
    if not is_loopback(admin_settings.host):
        _log.warning(
            "admin_port_open",
            host=admin_settings.host,
            reason="tokens are sent unencrypted: put a TLS proxy in front",
        )
    async with ports_of(settings.nats, "admin", settings.name or "admin", waits=True) as ports:
        authenticator = TokenAuthenticator(tokens, ports.clock)
        serving: list[UvicornServer] = []

        async def one_life() -> str:
            server = UvicornServer(listener.dup(), limits)
            serving[:] = [server]
            try:
                await server.serve(AdminApp(ports, authenticator))
            finally:
                server.close()
            return "" if stop.is_set() else "the server stopped"

        work = asyncio.create_task(supervise("admin", one_life, ports.clock), name="admin")
        waiting = asyncio.create_task(stop.wait(), name="stop")
        _log.info(
            "admin_listening",
            url=f"http://{host_port(admin_settings.host, listener.getsockname()[1])}/admin/workers",
        )
        try:
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for server in serving:
                server.stop()
            await asyncio.wait({work}, timeout=STOP_S)
            if work.done():
                work.result()
        except RestartLimitReached as error:
            _log.error("process_abandoned", reason=str(error))
            return 1
        finally:
            waiting.cancel()
            work.cancel()
            listener.close()
    return 0
