"""How events of a stream are framed. An event's name is its `type`; a stream has no `[DONE]`."""

from collections.abc import Callable

Framing = Callable[[bytes, bytes], bytes]
"""An event's type and its JSON text, as the bytes to send."""


def server_sent(kind: bytes, data: bytes) -> bytes:
    """A server-sent event."""
    return b"event: " + kind + b"\ndata: " + data + b"\n\n"


def json_line(kind: bytes, data: bytes) -> bytes:
    """One line, which becomes one WebSocket message. JSON text contains no line breaks of its own."""
    del kind
    return data + b"\n"
