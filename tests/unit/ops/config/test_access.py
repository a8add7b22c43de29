"""Where an edge may listen without authentication, and which settings OIDC needs."""

import pytest

from headwater.actors.edge.settings import AccessSettings, OidcSettings
from headwater.ops.config.sections import check_access
from headwater.ops.config.setting import ConfigError
from headwater.schemas.names import is_loopback

COMPLETE = OidcSettings("https://id.example", ("headwater",), "https://id.example/keys")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_without_authentication_an_edge_listens_on_loopback(host: str) -> None:
    assert is_loopback(host)
    check_access(AccessSettings(), host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "192.168.1.5", "::ffff:10.0.0.1", "edge", "localhost.example"]
)
def test_elsewhere_it_refuses_and_says_what_to_do(host: str) -> None:
    with pytest.raises(ConfigError, match="--auth keys") as caught:
        check_access(AccessSettings(), host)
    assert "keys create" in str(caught.value)
    check_access(AccessSettings("keys"), host)


@pytest.mark.parametrize("mode", ["oidc", "keys,oidc"])
@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"issuer": ""}, "--oidc-issuer"),
        ({"audience": ()}, "--oidc-audience"),
        ({"jwks_url": ""}, "--oidc-jwks-url"),
        ({"jwks_url": "file://elsewhere/keys.json"}, "must be file:///PATH"),
        ({"jwks_url": "file:keys.json"}, "must be file:///PATH"),
        ({"jwks_url": "file:///"}, "must be file:///PATH"),
        ({"jwks_url": "https://[::1/keys"}, "Invalid IPv6 URL"),
        ({"jwks_url": "http://id.example/keys"}, "https"),
    ],
)
def test_oidc_needs_an_issuer_an_audience_and_keys(mode: str, changes: dict[str, object], flag: str) -> None:
    for url in (COMPLETE.jwks_url, "file:///etc/jwks.json", "file://localhost/etc/jwks.json"):
        check_access(AccessSettings(mode, oidc=COMPLETE._replace(jwks_url=url)), "0.0.0.0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=flag):
        check_access(AccessSettings(mode, oidc=COMPLETE._replace(**changes)), "127.0.0.1")  # type: ignore[arg-type]
