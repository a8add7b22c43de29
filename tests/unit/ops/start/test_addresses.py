"""Host and port as one text: one function, for addresses of both kinds."""

import ast
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import headwater
from headwater.ops.nats import config as nats_config
from headwater.ops.start import sockets
from headwater.schemas.names import host_port, reachable, split_host_port

ADDRESSES = [
    ("127.0.0.1", "127.0.0.1:80"),
    ("localhost", "localhost:80"),
    ("::1", "[::1]:80"),
    ("::", "[::]:80"),
    ("[::1]", "[::1]:80"),
    ("fe80::1%eth0", "[fe80::1%eth0]:80"),
]


@pytest.mark.parametrize(("host", "text"), ADDRESSES)
def test_a_host_and_a_port_in_one_text(host: str, text: str) -> None:
    """Addresses of IPv6 have brackets, however they were given; the text is read back."""
    assert host_port(host, 80) == text
    assert split_host_port(text) == (host.strip("[]"), 80)
    assert urlsplit(f"http://{host_port(host, 80)}").port == 80


@pytest.mark.parametrize(
    ("listening", "reached"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("::", "::1"),
        ("[::]", "::1"),
        ("::1", "::1"),
        ("192.0.2.1", "192.0.2.1"),
        ("host.example", "host.example"),
    ],
)
def test_where_a_listening_server_is_reached(listening: str, reached: str) -> None:
    """What stands for every address is none to connect to."""
    assert reachable(listening) == reached


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1", "localhost"])
def test_free_ports_of_any_host(host: str) -> None:
    """They are found, and can be bound."""
    sockets.bind(host, sockets.free_port(0, host)).close()
    first = sockets.free_range(2, host)
    with sockets.bind(host, first) as taken:
        taken.listen()
        assert sockets.free_port(first, host) != first


def test_servers_of_nats_on_ipv6() -> None:
    """Addresses to listen on, routes of the cluster and URLs of clients."""
    made = nats_config.make(nats_config.Wanted("default", "password", servers=3, hosts=("::1",)), {})
    text = "\n".join([*made.configurations.values(), *made.secrets.values()])
    assert '"listen": "[::1]:4222"' in text.replace("listen: ", '"listen": ')
    assert "@[::1]:4223" in text
    assert "@::1" not in text
    assert "//::1" not in text


def test_no_other_place_joins_a_host_and_a_port() -> None:
    """An f-string with a colon between two values of which the second is a port is a URL that IPv6 breaks."""
    root = Path(headwater.__path__[0])
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for folder in ("actors", "engines", "events", "ops", "router", "schemas")
        for path in sorted((root / folder).rglob("*.py"))
        # Parsing takes ten times as long as looking for a value beside a colon.
        if path.name != "names.py" and re.search(rb"}:|:{", path.read_bytes())
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.JoinedStr) and _joins(node)
    ]
    assert not found


def _joins(text: ast.JoinedStr) -> bool:
    parts = text.values
    words = ("port", "sockname")
    return any(
        isinstance(host, ast.FormattedValue)
        and isinstance(colon, ast.Constant)
        and colon.value == ":"
        and isinstance(port, ast.FormattedValue)
        and any(word in ast.unparse(port.value).lower() for word in words)
        for host, colon, port in zip(parts, parts[1:], parts[2:])
    )
