"""Where an engine publishes its KV events on this machine."""

from pathlib import Path
from typing import Final

EVENTS: Final = "inproc-events"
REPLAY: Final = "inproc-replay"
"""Names of the sockets in the engine's own folder. vLLM and SGLang derive an endpoint for each rank from the given one, for tcp
and inproc only, which they detect by these words: with this name they add a suffix to Unix sockets."""


def in_folder(folder: Path) -> tuple[str, str]:
    """Endpoints for events and their replay. Unix sockets: no port conflicts, no access from outside."""
    events, replay = (f"ipc://{folder / name}" for name in (EVENTS, REPLAY))
    return events, replay


def reachable(endpoint: str) -> str:
    """Where to connect to what is bound to `endpoint` on this machine."""
    for everywhere, here in (
        ("tcp://*:", "127.0.0.1"),
        ("tcp://0.0.0.0:", "127.0.0.1"),
        ("tcp://[::]:", "[::1]"),
    ):
        if endpoint.startswith(everywhere):
            return f"tcp://{here}:" + endpoint.removeprefix(everywhere)
    return endpoint
