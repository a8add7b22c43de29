"""`headwater console`: the console as a process and a NATS client of its own, apart from everything that serves requests."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import structlog

from headwater.actors.admin import AdminApp, TokenAuthenticator
from headwater.actors.edge.admit.control import AccessControl, KeyRing
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.server import STOP_S, UvicornServer
from headwater.actors.limits import ConnectionLimits
from headwater.actors.runtime.ports import Ports
from headwater.engines.process import collect_rarely, freeze_heap
from headwater.events.jetstream import without_secret
from headwater.ops.config.processes import ConsoleProcess
from headwater.ops.config.sections import ConsoleSettings, check_console
from headwater.ops.config.setting import ConfigError
from headwater.ops.console.app import ConsoleAccess, ConsoleApp
from headwater.ops.console.pools import Pools
from headwater.ops.nats.capture_ports import capture_ports
from headwater.ops.nats.connect import ports_of
from headwater.ops.start.admin import read_tokens
from headwater.ops.start.sockets import bind, free_port
from headwater.ops.start.system import connections_possible
from headwater.schemas.names import host_port, is_loopback, reachable

CONNECTIONS_MAX: Final = 256

NICENESS: Final = 5
"""By how much the process lowers its priority."""

_log = structlog.get_logger("headwater.console")


async def console(settings: ConsoleProcess, stop: asyncio.Event) -> int:
    """Serve the console of a fleet until stopped."""
    console_settings = settings.console
    check_console(console_settings, settings.auth)
    # On a machine that has not enough processors, what serves requests goes first.
    os.nice(NICENESS)
    async with AsyncExitStack() as stack:
        ports = await stack.enter_async_context(
            ports_of(settings.nats, "console", settings.name or "console", waits=True)
        )
        tokens = None
        admin = None
        if console_settings.token_file:
            tokens = TokenAuthenticator(
                read_tokens(console_settings.token_file, "--console-token-file"), ports.clock
            )
            controlling = await stack.enter_async_context(ports_of(settings.nats, "admin", "console-admin"))
            admin = AdminApp(controlling, tokens)
        keys, loops = keys_of(settings.auth, ports)
        access = ConsoleAccess(
            tokens, keys, is_open=is_loopback(console_settings.host) and tokens is None and keys is None
        )
        pools = Pools(ports, without_secret(settings.nats.address))
        await stack.enter_async_context(_running([*loops, pools.run()]))
        return await serve(ConsoleApp(pools, access, admin), console_settings, stop)


async def open_capture(file: str, console_settings: ConsoleSettings, stop: asyncio.Event) -> int:
    """Serve the console of a captured part of a log until stopped. Raises `ConfigError`."""
    if not is_loopback(console_settings.host):
        raise ConfigError(
            f"--console-host {console_settings.host}: a capture is shown on a loopback address only"
        )
    path = Path(file)
    async with capture_ports(path) as ports:
        pools = Pools(ports, f"file {path.name}", live=False)
        access = ConsoleAccess(None, None, is_open=True)
        async with _running([pools.run()]):
            return await serve(
                ConsoleApp(pools, access), console_settings, stop, announce=f"{path.name} is shown at"
            )


def keys_of(
    auth: AccessSettings, ports: Ports
) -> tuple[AccessControl | None, list[Coroutine[Any, Any, None]]]:
    """Verification of an edge's API keys and OIDC tokens, as `--auth` says, with what keeps it current."""
    kinds = auth.mode.split(",")
    ring = KeyRing(ports.api_keys, ports.clock) if "keys" in kinds else None
    loops = [ring.run()] if ring is not None else []
    verifier = None
    if "oidc" in kinds:
        from headwater.actors.edge.admit.oidc import TokenVerifier, signing_keys

        signing = signing_keys(auth.oidc, ports.clock)
        verifier = TokenVerifier(auth.oidc, signing, ports.clock)
        loops.append(signing.run())
    return (AccessControl(ring, verifier) if loops else None), loops


@contextlib.asynccontextmanager
async def _running(loops: list[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop, name="console") for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    app: ConsoleApp, console_settings: ConsoleSettings, stop: asyncio.Event, announce: str = ""
) -> int:
    """Serve the application until stopped. `announce`: what to print before its address."""
    # Collections would go through the rows of all requests, of which none is garbage, and stop what is shown for half a second.
    freeze_heap()
    collect_rarely()
    port = console_settings.port
    if console_settings.port == ConsoleSettings().port:
        port = free_port(console_settings.port, console_settings.host)
    listener = bind(console_settings.host, port, "--console-port")
    limits = ConnectionLimits()._replace(connections=connections_possible(CONNECTIONS_MAX))
    server = UvicornServer(listener.dup(), limits)
    url = f"http://{host_port(reachable(console_settings.host), listener.getsockname()[1])}"
    work = asyncio.create_task(server.serve(app), name="console server")
    waiting = asyncio.create_task(stop.wait(), name="stop")
    _log.info("console_listening", url=url)
    if announce:
        print(f"{announce} {url}", flush=True)
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        app.close()
        server.stop()
        await asyncio.wait({work}, timeout=STOP_S)
        return 0 if stop.is_set() else 1
    finally:
        waiting.cancel()
        work.cancel()
        server.close()
        listener.close()
