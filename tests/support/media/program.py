"""The intake's program with another network: names from a table, and every connection to a server of the test.

    python program.py FOLDER FD

`FOLDER/network.json` has the addresses of each name: a list of answers, one for each look-up, the last one for all further
ones. Look-ups and connections are written to `FOLDER/asked`. Production has no way here: the program is an argument of a
constructor that settings do not reach.
"""

import ctypes
import json
import socket
import ssl
import sys
from functools import cache
from pathlib import Path

from headwater.actors.media import program
from headwater.engines.public_address import WebAccess

FOLDER = Path(sys.argv[1])


def _note(text: str) -> None:
    with (FOLDER / "asked").open("a") as file:
        file.write(f"{text}\n")


def _resolve(host: str, port: int) -> list[str]:
    answers: dict[str, list[list[str]]] = json.loads((FOLDER / "network.json").read_text())
    if host not in answers:
        raise socket.gaierror(socket.EAI_NONAME, "unknown name")
    before = (FOLDER / "asked").read_text().split("\n").count(f"resolve {host}")
    _note(f"resolve {host}")
    if host.startswith("stuck"):
        _wait_without_end()
    return answers[host][min(before, len(answers[host]) - 1)]


def _wait_without_end() -> None:
    """As the system's resolver waits for a server that is gone: no signal interrupts it."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _connect(address: str, port: int) -> socket.socket:
    _note(f"connect {address} {port}")
    plain = port in (80, 8080)
    return socket.create_connection(("127.0.0.1", int((FOLDER / ("plain" if plain else "tls")).read_text())))


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(FOLDER / "ca.pem"))


program.main(WebAccess(_resolve, _connect, _tls))
