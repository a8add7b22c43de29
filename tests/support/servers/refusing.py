"""A NATS server that says what a test wants it to say: it greets, takes subscriptions, echoes, and refuses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec


class RefusingServer:
    """Speaks as much of the protocol as a client needs that subscribes and publishes.

    While `refusal` is set, each connection gets it instead of the answer to its first PING, and is closed.
    `subscriptions` are the subjects of the connection that came last; `logins` counts the connections that were let in.
    """

    def __init__(self, *, nonce: str = "", max_payload: int = 1 << 20) -> None:
        self.refusal = ""
        self.subscriptions: dict[str, str] = {}
        self.logins = 0
        self.refused = 0
        self.port = 0
        self._info = {"server_id": "S", "version": "2.15.0", "headers": True, "max_payload": max_payload}
        if nonce:
            self._info |= {"auth_required": True, "nonce": nonce}
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    def refuse(self, text: str) -> None:
        """Refuse every connection with these words, also those that are open."""
        self.refusal = text
        self.cut(b"-ERR '%s'\r\n" % text.encode())

    def accept(self) -> None:
        """Refuse none any more."""
        self.refusal = ""

    def cut(self, last_words: bytes = b"") -> None:
        """Close every open connection."""
        for writer in self._writers:
            writer.write(last_words)
            writer.close()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        writer.write(b"INFO %s\r\n" % msgspec.json.encode(self._info))
        subscriptions: dict[str, str] = {}
        greeted = False
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                verb, *words = line.decode().split()
                if verb == "PING" and not greeted and self.refusal:
                    self.refused += 1
                    writer.write(b"-ERR '%s'\r\n" % self.refusal.encode())
                    break
                if verb == "PING":
                    if not greeted:
                        greeted, self.subscriptions = True, subscriptions
                        self.logins += 1
                        self._writers.append(writer)
                    writer.write(b"PONG\r\n")
                elif verb == "SUB":
                    subscriptions[words[0]] = words[-1]
                elif verb == "PUB":
                    data = await reader.readexactly(int(words[-1]) + 2)
                    if words[0] in subscriptions:
                        writer.write(
                            b"MSG %s %s %s\r\n%s"
                            % (
                                *(one.encode() for one in (words[0], subscriptions[words[0]], words[-1])),
                                data,
                            )
                        )
        writer.close()


@asynccontextmanager
async def refusing_server(*, nonce: str = "") -> AsyncIterator[RefusingServer]:
    """A server on a port of its own."""
    made = RefusingServer(nonce=nonce)
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.cut()
        listening.close()
