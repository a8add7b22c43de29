"""Tokens of an identity provider: claims, times, algorithms, rotation of keys. Real signatures, no network."""

import asyncio
from pathlib import Path
from typing import Any, Final

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from headwater.actors.edge.admit import oidc
from headwater.actors.edge.admit.oidc import SigningKeys, TokenVerifier, parse_jwks, signing_keys
from headwater.actors.edge.settings import OidcSettings, check_jwks_url
from headwater.actors.http.errors import ApiError
from tests.support.worlds.clock import ManualClock

ISSUER: Final = "https://id.example"
SETTINGS: Final = OidcSettings(ISSUER, ("headwater", "other"), default_scopes=("endpoints:*",))
RSA: Final = rsa.generate_private_key(65537, 2048)
RSA_2: Final = rsa.generate_private_key(65537, 2048)
EC: Final = ec.generate_private_key(ec.SECP256R1())
ED: Final = ed25519.Ed25519PrivateKey.generate()
KEYS: Final[dict[str, tuple[Any, str]]] = {
    "rsa": (RSA, "RS256"),
    "ec": (EC, "ES256"),
    "ed": (ED, "EdDSA"),
}


def jwk(key: Any, key_id: str, algorithm: str) -> dict[str, Any]:
    """The public part of a key as a JWKS has it."""
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": key_id, "alg": algorithm, "use": "sig"}


def document(*entries: dict[str, Any]) -> bytes:
    """A JWKS."""
    return msgspec.json.encode({"keys": list(entries)})


ALL_KEYS: Final = document(*(jwk(key, name, algorithm) for name, (key, algorithm) in KEYS.items()))


class Provider:
    """An identity provider whose keys can change, and a verifier of its tokens."""

    def __init__(self, settings: OidcSettings = SETTINGS) -> None:
        self.clock = ManualClock()
        self.jwks = ALL_KEYS
        self.fails = False
        self.fetched = 0
        self.keys = SigningKeys(self._fetch, self.clock, rotates=True)
        self.verifier = TokenVerifier(settings, self.keys, self.clock)

    def _fetch(self) -> bytes:
        self.fetched += 1
        if self.fails:
            raise OSError("no route")
        return self.jwks

    def token(self, key: str = "rsa", *, header: dict[str, Any] | None = None, **changes: Any) -> bytes:
        """A token with these claims changed; None removes one."""
        now_s = self.clock.wall_ns() // 1_000_000_000
        claims = {"iss": ISSUER, "aud": "headwater", "sub": "u1", "tenant": "acme", "exp": now_s + 600}
        claims = {name: value for name, value in (claims | changes).items() if value is not None}
        private, algorithm = KEYS[key]
        return jwt.encode(claims, private, algorithm, headers={"kid": key, **(header or {})}).encode()


@pytest.fixture
def provider() -> Provider:
    return Provider()


async def refused(provider: Provider, token: bytes, status: int = 401) -> str:
    """Why a token is refused."""
    with pytest.raises(ApiError) as caught:
        await provider.verifier.verify(token)
    assert caught.value.status == status
    return str(caught.value)


@pytest.mark.parametrize("key", KEYS)
async def test_a_token_names_tenant_and_scopes(provider: Provider, key: str) -> None:
    token = provider.token(key, scope="openid models:m models:n tier unknown")
    principal = await provider.verifier.verify(token)
    assert principal.tenant == "acme"
    assert principal.credential.startswith("token-")
    assert principal.scopes.models == ("m", "n")
    assert principal.scopes.endpoints == ("*",)
    assert principal.scopes.permissions == ("tier",)


async def test_scopes_may_be_a_list_and_default_to_none(provider: Provider) -> None:
    listed = await provider.verifier.verify(provider.token(scope=["models:m", 7]))
    assert listed.scopes.models == ("m",)
    assert (await provider.verifier.verify(provider.token())).scopes.models == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"aud": "elsewhere"}, "another audience"),
        ({"aud": None}, "'aud'"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"iss": None}, "'iss'"),
        ({"exp": None}, "'exp'"),
        ({"exp": 1}, "expired"),
        ({"exp": "soon"}, "'exp'"),
        ({"exp": True}, "'exp'"),
        ({"exp": 1e400}, "'exp'"),
        ({"nbf": 4e9}, "not valid yet"),
        ({"tenant": None}, "'tenant'"),
        ({"tenant": ""}, "'tenant'"),
        ({"tenant": "a b"}, "'tenant'"),
        ({"tenant": "ü"}, "'tenant'"),
        ({"tenant": ["acme"]}, "'tenant'"),
        ({"tenant": "a" * 129}, "'tenant'"),
    ],
)
async def test_each_claim_is_checked(provider: Provider, changes: dict[str, Any], says: str) -> None:
    token = provider.token(**changes)
    assert says in await refused(provider, token)


async def test_times_have_a_leeway_and_no_more(provider: Provider) -> None:
    now_s = provider.clock.wall_ns() // 1_000_000_000
    await provider.verifier.verify(
        provider.token(exp=now_s - oidc.LEEWAY_S + 2, nbf=now_s + oidc.LEEWAY_S - 2)
    )
    assert "expired" in await refused(provider, provider.token(exp=now_s - oidc.LEEWAY_S))
    assert "yet" in await refused(provider, provider.token(nbf=now_s + oidc.LEEWAY_S + 2))


async def test_a_remembered_token_ends_when_it_expires(provider: Provider) -> None:
    token = provider.token()
    await provider.verifier.verify(token)
    await provider.clock.advance(600 + oidc.LEEWAY_S - 1)
    await provider.verifier.verify(token)
    await provider.clock.advance(1)
    assert "expired" in await refused(provider, token)


async def test_remembered_tokens_are_bounded(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "REMEMBERED_MAX", 3)
    for number in range(6):
        await provider.verifier.verify(provider.token("ed", sub=str(number)))
    assert len(provider.verifier._remembered) == 3


async def test_a_token_cannot_choose_how_it_is_verified(provider: Provider) -> None:
    """No algorithm at all, a symmetric one keyed with the public key, or one that is not the key's."""
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    unsigned = jwt.encode(claims, "", "none", headers={"kid": "rsa"}).encode()
    assert "algorithm" in await refused(provider, unsigned)
    forged = jwt.encode(claims, b"k" * 64, "HS256", headers={"kid": "rsa"}).encode()
    assert "algorithm" in await refused(provider, forged)
    other = jwt.encode(claims, RSA, "PS256", headers={"kid": "rsa"}).encode()
    await refused(provider, other)
    wrong_key = jwt.encode(claims, RSA_2, "RS256", headers={"kid": "rsa"}).encode()
    assert "signature" in await refused(provider, wrong_key)
    token = provider.token()
    assert "not valid" in await refused(provider, token[:-4] + b"AAAA")


@pytest.mark.parametrize("token", [b"a.b.c", b"", b"..", b"\xff.\xff.\xff", b"x" * 9000, b"e30.e30.e30"])
async def test_what_is_no_token_is_refused(provider: Provider, token: bytes) -> None:
    await refused(provider, token)


async def test_a_new_key_is_read_when_a_token_names_it_but_not_for_every_token(provider: Provider) -> None:
    await provider.verifier.verify(provider.token("rsa"))
    assert provider.fetched == 1
    provider.jwks = document(jwk(RSA_2, "new", "RS256"))
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    rotated = jwt.encode(claims, RSA_2, "RS256", headers={"kid": "new"}).encode()
    for _ in range(20):
        assert "unknown key" in await refused(provider, rotated)
    assert provider.fetched == 1
    await provider.clock.advance(oidc.REFRESH_S_MIN)
    await asyncio.gather(*(provider.verifier.verify(rotated) for _ in range(5)))
    assert provider.fetched == 2
    # The key before it is gone, and so are its tokens once they are no longer remembered.
    await provider.clock.advance(oidc.REMEMBERED_S)
    await refused(provider, provider.token("rsa"))


async def test_without_any_keys_a_token_may_be_right(provider: Provider) -> None:
    """503: the client's token is not wrong."""
    provider.fails = True
    assert "identity provider" in await refused(provider, provider.token(), 503)


async def test_keys_of_a_file_are_read_at_the_start(tmp_path: Path) -> None:
    """Its URL may have escapes, and names a file of this machine."""
    file = tmp_path / "the keys.json"
    file.write_bytes(ALL_KEYS)
    keys = signing_keys(SETTINGS._replace(jwks_url=file.as_uri()), ManualClock())
    reading = asyncio.create_task(keys.run())
    async with asyncio.timeout(10):
        while not keys.available:
            await asyncio.sleep(0.001)
    reading.cancel()
    assert await keys.find("rsa") is not None
    assert await keys.find("none") is None
    with pytest.raises(ValueError, match="file:///PATH"):
        signing_keys(SETTINGS._replace(jwks_url="file://elsewhere/keys.json"), ManualClock())


def test_only_signing_keys_of_asymmetric_algorithms_are_read() -> None:
    encryption = {**jwk(RSA, "enc", "RS256"), "use": "enc"}
    symmetric = {"kty": "oct", "k": "c2VjcmV0", "kid": "sym", "alg": "HS256"}
    unknown = {"kty": "NEW", "kid": "x"}
    broken = {"kty": "RSA", "kid": "y", "n": 7}
    found = parse_jwks(document(encryption, symmetric, unknown, broken, jwk(EC, "ec", "ES256")))
    assert list(found) == ["ec"]
    for bad in (b"", b"[]", b'{"keys": 1}', document(), document(symmetric), document(encryption)):
        with pytest.raises(ValueError, match="JWKS"):
            parse_jwks(bad)


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("https://id.example/keys", True),
        ("http://127.0.0.1:8080/keys", True),
        ("http://localhost/keys", True),
        ("http://id.example/keys", False),
        ("http://127.0.0.1.example/keys", False),
        ("file:///etc/keys", False),
        ("ftp://id.example/keys", False),
        ("keys", False),
        ("", False),
    ],
)
def test_keys_come_over_https_or_from_this_machine(url: str, good: bool) -> None:
    if good:
        check_jwks_url(url)
    else:
        with pytest.raises(ValueError, match="https"):
            check_jwks_url(url)
