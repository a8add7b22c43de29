"""Where adapters may come from: sources taken apart, compared with prefixes, and addresses that are not for HTTP."""

import pytest

from headwater.engines.lora_cache import LoraError, LoraPolicy
from headwater.engines.lora_sources import parse, parse_networks, parse_sources


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("/srv/adapters/a", ("file", "", "/srv/adapters/a")),
        ("file:///srv/adapters/a/", ("file", "", "/srv/adapters/a")),
        ("file:///srv/x/../adapters/a", ("file", "", "/srv/adapters/a")),
        ("https://Example.org/a/b/", ("https", "example.org:443", "/a/b")),
        ("http://[::1]:8000/a.zip", ("http", "[::1]:8000", "/a.zip")),
        ("s3://bucket/a/b", ("s3", "bucket", "/a/b")),
        ("hf://org/name", ("hf", "org", "name")),
        ("hf://org/na.me@refs/pr/1", ("hf", "org", "na.me/@refs/pr/1")),
    ],
)
def test_a_source_is_taken_apart(text: str, parts: tuple[str, str, str]) -> None:
    """By scheme, host and path."""
    source = parse(text)
    assert (source.scheme, source.host, source.path) == parts
    assert source.text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "adapters/a",
        "ftp://host/a",
        "file://host/a",
        "https://",
        "https:///a",
        "https://host/a/../b",
        "https://host/a/%2e%2e/b",
        "https://host/a%5cb",
        "https://host:port/a",
        "s3:///a",
        "s3://bucket/../other",
        "hf://name",
        "hf://org/name/more",
        "hf://org/na me",
        "hf://org/name@../x",
    ],
)
def test_a_source_that_is_none_is_refused(text: str) -> None:
    """With what to write instead, where that is known."""
    with pytest.raises(LoraError, match="not valid") as caught:
        parse(text)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "https://me:secret@host/a",
        "https://token@host/a",
        "https://host/a?sig=secret",
        "https://host/a#secret",
    ],
)
def test_a_source_with_a_secret_is_refused_and_not_repeated(text: str) -> None:
    """It would be stored in the card, which every worker and edge reads, and in the audit."""
    with pytest.raises(LoraError, match="stored in the card") as caught:
        parse(text)
    assert "secret" not in str(caught.value)
    assert "token" not in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "source", "within"),
    [
        ("/srv/a", "/srv/a", True),
        ("/srv/a", "/srv/a/b", True),
        ("/srv/a", "/srv/ab", False),
        ("/srv/a", "file:///srv/a/../b", False),
        ("https://host/a", "https://host/a/b", True),
        ("https://host/a", "https://host/ab", False),
        ("https://host/a", "https://host:443/a/b", True),
        ("https://host/a", "https://host:8443/a/b", False),
        ("https://host/a", "http://host/a/b", False),
        ("https://host", "https://host.evil.org/a", False),
        ("https://", "https://any.org/a", True),
        ("s3://bucket/a", "s3://bucket/a/b", True),
        ("s3://bucket/a", "s3://other/a/b", False),
        ("hf://", "hf://org/name", True),
        ("hf://org", "hf://org/name@v1", True),
        ("hf://org", "hf://organisation/name", False),
        ("hf://org/name", "hf://org/name@v1", True),
        ("hf://org/name", "hf://org/name2", False),
        ("hf://org/name@v1", "hf://org/name@v1", True),
        ("hf://org/name@v1", "hf://org/name", False),
    ],
)
def test_a_prefix_allows_what_is_below_it(prefix: str, source: str, within: bool) -> None:
    """By whole parts of the path."""
    policy = LoraPolicy(parse_sources([prefix]))
    if within:
        assert policy.admit(source).text == source
    else:
        with pytest.raises(LoraError, match="--lora-sources allows") as caught:
            policy.admit(source)
        assert caught.value.status == 403


def test_without_a_list_nothing_is_allowed() -> None:
    """Safe until somebody says otherwise."""
    with pytest.raises(LoraError, match="--lora-sources allows nothing"):
        LoraPolicy().admit("/srv/a")


def test_a_network_has_no_host_bits() -> None:
    """As `ip_network` demands: a mistyped prefix would allow other addresses than it shows."""
    with pytest.raises(LoraError, match="--lora-networks"):
        parse_networks(["10.0.0.1/8"])
