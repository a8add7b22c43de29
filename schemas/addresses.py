"""Host and port as one text, for names and for addresses of IPv4 and IPv6. No other place joins the two."""

from ipaddress import ip_address
from typing import Final

NATS_PORT: Final = 4222
"""The port that NATS servers listen on by convention."""

LOOPBACK: Final = "127.0.0.1"
WILDCARDS: Final = ("0.0.0.0", "::", "[::]")
"""All addresses of a machine, and none that another one could connect to."""


def host_port(host: str, port: int) -> str:
    """`host:port` as it stands in a URL: an address of IPv6 in brackets."""
    bare = _bare(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """The opposite of `host_port`. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    return _bare(host), int(port)


def reachable(host: str) -> str:
    """An address of this machine at which a server that listens on `host` answers."""
    bare = _bare(host)
    return {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}.get(bare, bare)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches servers that listen on this address. Names are not looked up."""
    try:
        return ip_address(_bare(host)).is_loopback
    except ValueError:
        return host == "localhost"


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")
