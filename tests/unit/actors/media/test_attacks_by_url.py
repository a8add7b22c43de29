"""URLs that would make the edge access what it must not: each is rejected with its code, and nothing is connected to."""

import os
from pathlib import Path

import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import MediaSource
from tests.support.media.images import encoded, picture
from tests.support.media.internet import PUBLIC, Internet
from tests.unit.actors.media.conftest import HOST, OTHER_HOST, rejection

PRIVATE = "media_private_address"
BAD_HOST = "media_bad_host"
BAD_URL = "media_bad_url"
SCHEME = "media_scheme_not_allowed"

URLS = {
    "loopback": ("https://127.0.0.1/", PRIVATE),
    "loopback IPv6": ("https://[::1]/", PRIVATE),
    "any address": ("https://0.0.0.0/", PRIVATE),
    "any address IPv6": ("https://[::]/", PRIVATE),
    "private network": ("https://10.0.0.1/", PRIVATE),
    "metadata service": ("https://169.254.169.254/latest/meta-data/", PRIVATE),
    "metadata service of another cloud": ("https://100.100.100.200/", PRIVATE),
    "IPv4 mapped": ("https://[::ffff:127.0.0.1]/", PRIVATE),
    "IPv4 mapped as hex": ("https://[::ffff:7f00:1]/", PRIVATE),
    "IPv4 compatible": ("https://[::127.0.0.1]/", PRIVATE),
    "NAT64": ("https://[64:ff9b::7f00:1]/", PRIVATE),
    "6to4": ("https://[2002:7f00:1::]/", PRIVATE),
    "Teredo": ("https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", PRIVATE),
    "unique local": ("https://[fd00:ec2::254]/", PRIVATE),
    "localhost": ("https://localhost/", PRIVATE),
    "localhost with a dot": ("https://localhost./", PRIVATE),
    "name of a private address": ("https://inside.example/", PRIVATE),
    "name of a public and a private address": ("https://mixed.example/", PRIVATE),
    "decimal address": ("https://2130706433/", BAD_HOST),
    "hex address": ("https://0x7f000001/", BAD_HOST),
    "octal address": ("https://0177.0.0.1/", BAD_HOST),
    "short address": ("https://127.1/", BAD_HOST),
    "address with a hex part": ("https://127.0.0.0x1/", BAD_HOST),
    "address with a final dot": ("https://127.0.0.1./", BAD_HOST),
    "full-width digits": ("https://１２７.０.０.１/", BAD_HOST),
    "ideographic full stops": ("https://127。0。0。1/", BAD_HOST),
    "circled letters": ("https://ⓛocalhost/", BAD_HOST),
    "zone": ("https://[fe80::1%25eth0]/", BAD_HOST),
    "percent-encoded host": ("https://%31%32%37.0.0.1/", BAD_HOST),
    "empty host": ("https:///image.png", BAD_HOST),
    "empty label": ("https://a..example/", BAD_HOST),
    "user name": (f"https://{HOST}@127.0.0.1/", BAD_URL),
    "user name and password": (f"https://user:secret@{HOST}/", BAD_URL),
    "backslash before the host": (f"https://127.0.0.1\\@{HOST}/", BAD_URL),
    "backslashes for slashes": (f"https:\\\\{HOST}\\", BAD_URL),
    "line break": (f"https://{HOST}/\r\nHost: 127.0.0.1", BAD_URL),
    "tab": (f"https://{HOST}/a\tb", BAD_URL),
    "zero byte": (f"https://{HOST}/\0", BAD_URL),
    "space": (f"https://{HOST}/a b", BAD_URL),
    "text before brackets": ("https://a[::1]/", BAD_URL),
    "no slashes": (f"https:{HOST}/", BAD_URL),
    "bad port": (f"https://{HOST}:port/", BAD_URL),
    "port out of range": (f"https://{HOST}:65536/", BAD_URL),
    "too long": (f"https://{HOST}/{'a' * 9000}", BAD_URL),
    "lone surrogate": (f"https://{HOST}/\ud800", BAD_URL),
    "another service's port": (f"https://{HOST}:6379/", "media_port_not_allowed"),
    "port 0": (f"https://{HOST}:0/", "media_port_not_allowed"),
    "unknown name": ("https://nowhere.example/", "media_host_not_found"),
    "http": (f"http://{HOST}/", SCHEME),
    "file": ("file:///etc/passwd", SCHEME),
    "ftp": (f"ftp://{HOST}/", SCHEME),
    "gopher": (f"gopher://{HOST}/", SCHEME),
    "no scheme": ("/etc/passwd", SCHEME),
    "empty": ("", SCHEME),
}


@pytest.fixture(scope="module", autouse=True)
def names(net: Internet) -> None:
    """Names with addresses that are not public."""
    net.name("localhost", ["127.0.0.1", "::1"])
    net.name("inside.example", ["10.1.2.3"])
    net.name("mixed.example", [PUBLIC, "192.168.0.1"])


@pytest.mark.parametrize("attack", URLS)
async def test_a_url_that_leads_inside_is_rejected(strict: MediaIntake, net: Internet, attack: str) -> None:
    """No connection is made at all."""
    url, code = URLS[attack]
    before = len(net.asked("connect"))
    error = await rejection(strict, MediaSource.from_url("image", url))
    assert error.code == code
    assert len(net.asked("connect")) == before


@pytest.mark.parametrize(
    ("to", "code"),
    [
        ("https://169.254.169.254/", PRIVATE),
        ("https://inside.example/", PRIVATE),
        ("//[::1]/", PRIVATE),
        ("https://2130706433/", BAD_HOST),
        (f"https://user@{HOST}/", BAD_URL),
        (f"https://127.0.0.1\\@{HOST}/", "media_bad_response"),
        (f"http://{HOST}/plain", "media_redirect_downgrade"),
        (f"https://{HOST}:22/", "media_port_not_allowed"),
        ("file:///etc/passwd", SCHEME),
        ("data:image/png;base64,AAAA", SCHEME),
        ("", "media_bad_response"),
    ],
)
async def test_a_redirect_is_checked_like_a_url(
    strict: MediaIntake, net: Internet, to: str, code: str
) -> None:
    """An allowed host cannot lead elsewhere."""
    net.redirect("/away", to)
    before = len(net.asked("connect"))
    error = await rejection(strict, MediaSource.from_url("image", f"https://{HOST}/away"))
    assert error.code == code
    assert net.asked("connect")[before:] == [f"connect {PUBLIC} 443"]


async def test_redirects_end(strict: MediaIntake, net: Internet) -> None:
    """A circle is left after three of them."""
    net.redirect("/round", "/round")
    before = len(net.asked("connect"))
    error = await rejection(strict, MediaSource.from_url("image", f"https://{HOST}/round"))
    assert error.code == "media_too_many_redirects"
    assert len(net.asked("connect")) == before + 4


async def test_a_name_is_resolved_once_a_hop_and_the_checked_address_is_connected_to(
    strict: MediaIntake, net: Internet
) -> None:
    """DNS rebinding: between check and connection there is no second look-up; after a redirect the new answer is checked."""
    net.name("rebound.example", [PUBLIC], ["127.0.0.1"])
    net.redirect("/again", "https://rebound.example/again")
    before = len(net.asked("connect"))
    error = await rejection(strict, MediaSource.from_url("image", "https://rebound.example/again"))
    assert net.asked("connect")[before:] == [f"connect {PUBLIC} 443"]
    # Its certificate is for other names, so the first hop ends at TLS; the name was looked up once for it.
    assert error.code == "media_fetch_failed"
    assert net.asked("resolve rebound") == ["resolve rebound.example"]
    error = await rejection(strict, MediaSource.from_url("image", "https://rebound.example/again"))
    assert error.code == PRIVATE
    assert len(net.asked("connect")) == before + 1


async def test_a_name_that_changes_between_hops_is_rejected(wide: MediaIntake, net: Internet) -> None:
    """The same host, first public, then private: over http, where no certificate stands in between."""
    net.name("a.cdn.example", [PUBLIC], ["169.254.169.254"])
    net.redirect("/hop", "http://a.cdn.example/hop")
    error = await rejection(wide, MediaSource.from_url("image", "http://a.cdn.example/hop"))
    assert error.code == PRIVATE
    assert len(net.asked("resolve a.cdn.example")) == 2


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (f"https://{OTHER_HOST}/", "media_host_not_allowed"),
        (f"https://evil{HOST}/", "media_host_not_allowed"),
        (f"https://{HOST}.evil.example/", "media_host_not_allowed"),
        ("https://cdn.example/", "media_host_not_allowed"),
        ("https://evilcdn.example/", "media_host_not_allowed"),
        ("http://127.0.0.1/", PRIVATE),
        (f"http://{HOST}:8081/", "media_port_not_allowed"),
    ],
)
async def test_a_list_of_hosts_is_exact(wide: MediaIntake, url: str, code: str) -> None:
    """And a listed private address is private still: `networks` allows those."""
    assert (await rejection(wide, MediaSource.from_url("image", url))).code == code


async def test_a_redirect_leaves_the_list_of_hosts_for_none(wide: MediaIntake, net: Internet) -> None:
    """The list holds for every hop."""
    net.redirect("/leave", f"https://{OTHER_HOST}/")
    error = await rejection(wide, MediaSource.from_url("image", f"https://{HOST}/leave"))
    assert error.code == "media_host_not_allowed"


PATHS = {
    "outside": "/etc/passwd",
    "of this process": "/proc/self/environ",
    "parent": "{}/../secret.png",
    "parent, encoded": "{}/%2e%2e/secret.png",
    "parent, encoded slash": "{}/..%2Fsecret.png",
    "link": "{}/link.png",
    "folder that is a link": "{}/linked/secret.png",
    "folder with the same beginning": "{}-more/secret.png",
    "the folder": "{}",
    "a folder in it": "{}/folder",
    "pipe": "{}/pipe",
    "absent": "{}/absent.png",
}


@pytest.mark.parametrize("attack", PATHS)
async def test_a_path_does_not_leave_the_listed_folder(wide: MediaIntake, files: Path, attack: str) -> None:
    """Not by its text, not by links; and what is no file is not waited for."""
    _secrets(files)
    error = await rejection(wide, MediaSource.from_url("image", "file://" + PATHS[attack].format(files)))
    assert error.code == "media_path_not_allowed"


@pytest.mark.parametrize(
    "url", ["file://host{}/a.png", "file:{}/a\\b.png", "file://{}/a%00.png", "file://{}/a.png?b"]
)
async def test_a_malformed_url_of_a_file_is_rejected(wide: MediaIntake, files: Path, url: str) -> None:
    """Other hosts, backslashes, zero bytes, queries."""
    assert (await rejection(wide, MediaSource.from_url("image", url.format(files)))).code == BAD_URL


def _secrets(files: Path) -> None:
    """An image outside the folder, and ways to it from inside."""
    data = encoded(picture(), "PNG")
    if (files / "pipe").exists():
        return
    outside = files.with_name(files.name + "-more")
    outside.mkdir()
    (outside / "secret.png").write_bytes(data)
    (files.parent / "secret.png").write_bytes(data)
    (files / "link.png").symlink_to(outside / "secret.png")
    (files / "linked").symlink_to(outside)
    (files / "folder").mkdir()
    os.mkfifo(files / "pipe")
