"""Listening sockets of a process."""

import atexit
import contextlib
import secrets
import socket
import sys
import time

from headwater.engines.engine import EngineUnavailable
from headwater.ops.config.setting import ConfigError
from headwater.schemas.names import host_port

FREE_FROM, FREE_TO = 20_000, 32_000
"""Range of the ports found by `free_range`: below the range that systems assign to clients."""

RESERVED_S = 60.0
"""A port that was found is found by no other process of this machine for this long, or until this process ends."""

_reservations: list[tuple[float, socket.socket]] = []


@atexit.register
def _release() -> None:
    for _, reservation in _reservations:
        reservation.close()


def bind(host: str, port: int, flag: str = "--port", *, share: bool = False) -> socket.socket:
    """A bound, not yet listening socket. Raises `ConfigError` naming the address and the flag to change.

    With `share` other processes that ask for it may listen on the same port, too: the kernel spreads connections over them.
    """
    try:
        sock = _bound(host, port, reuse=True, share=share)
    except OSError as error:
        free = ", or 0 for a free one" if flag == "--port" else ""
        raise ConfigError(
            f"cannot listen on {host_port(host, port)}: {error.strerror or error}. Choose another {flag}{free}"
        ) from error
    sock.set_inheritable(True)
    return sock


def free_port(preferred: int, host: str = "127.0.0.1") -> int:
    """`preferred` if it can be bound, else a free port. 0 asks for any. Raises `EngineUnavailable`.

    Not one of the system's choice, which it may give to the next client before the caller listens.
    """
    if preferred:
        with contextlib.suppress(OSError):
            _bound(host, preferred, reuse=True).close()
            return preferred
    return free_range(1, host)


def free_range(count: int, host: str) -> int:
    """The first of `count` consecutive ports that can be bound now and that no other process found just before.

    Raises `EngineUnavailable`.
    """
    now = time.monotonic()
    while _reservations and _reservations[0][0] < now - RESERVED_S:
        _reservations.pop(0)[1].close()
    for _ in range(100):
        first = FREE_FROM + secrets.randbelow(FREE_TO - FREE_FROM - count)
        with contextlib.ExitStack() as undo:
            held = [_reserve(first + number, undo) for number in range(count)]
            if all(held) and all(_is_free(host, first + number) for number in range(count)):
                _reservations.extend((now, reserved) for reserved in held if reserved is not None)
                undo.pop_all()
                return first
    raise EngineUnavailable(
        f"no {count} consecutive free ports on {host}: give --handoff-port or --metrics-port, or an address of this machine "
        "as --handoff-host or --host"
    )


def _reserve(port: int, undo: contextlib.ExitStack) -> socket.socket | None:
    """Hold a name for the port, which the kernel gives to one process at a time; None if another has it.

    Between finding a port and listening on it, which another process does, seconds may pass. Only Linux has such names, in the network
    namespace as ports are; elsewhere nothing is reserved.
    """
    name = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    if sys.platform == "linux":
        try:
            name.bind(f"\0headwater-port-{port}")
        except OSError:
            return None
    return name


def _is_free(host: str, port: int) -> bool:
    try:
        _bound(host, port).close()
    except OSError:
        return False
    return True


def family_of(host: str) -> tuple[socket.AddressFamily, str]:
    """Return whether a host to listen on is IPv4 or IPv6, and its address. Raises `OSError` for a name that has none."""
    bare = host.removeprefix("[").removesuffix("]")
    if not bare:
        return socket.AF_INET, ""
    infos = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Names of both kinds listen where they always did.
    family, *_, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, str(address[0])


def is_own(host: str) -> bool:
    """Is it an address, or the name of one, that a server of this machine can listen on?"""
    try:
        _bound(host, 0).close()
    except OSError:
        return False
    return True


def _bound(host: str, port: int, *, reuse: bool = False, share: bool = False) -> socket.socket:
    family, address = family_of(host)
    sock = socket.socket(family)
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
