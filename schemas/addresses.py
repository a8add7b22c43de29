"""Host and port as one text, for names and for addresses of IPv4 and IPv6. No other place joins the two."""


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
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")
