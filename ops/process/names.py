"""Names of processes that were given none."""

import secrets
import socket
from typing import Final

from headwater.schemas.names import slug

HOST_CHARACTERS_MAX: Final = 45
"""With a random part, and the number of a data-parallel rank behind it, a name has at most 64."""


def unique_name() -> str:
    """The end of this host's name, by which replicas differ, and a random part: containers share process ids, and some share names."""
    host = slug(socket.gethostname())[-HOST_CHARACTERS_MAX:].lstrip("-_") or "host"
    return f"{host}-{secrets.token_hex(4)}"
