"""Keys × endpoints × models × headers, one row each: what an edge with API keys answers."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from headwater.actors.edge.admit.control import endpoint_of
from headwater.actors.edge.settings import AccessSettings
from headwater.ops.operator.keys import WantedKey
from headwater.schemas.tables import ENDPOINTS
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
ALL: Final = ("admin", "metrics", "tier", "worker", "toleration", "policy", "priority")

KEYS: Final = {
    "plain": WantedKey("acme"),
    "all": WantedKey("acme", permissions=ALL),
    "model m": WantedKey("acme", models=("m",)),
    "model other": WantedKey("acme", models=("other",)),
    "model gone": WantedKey("acme", models=("gone",)),
    "chat only": WantedKey("acme", endpoints=("chat",)),
    "metrics": WantedKey("acme", permissions=("metrics",)),
    **{permission: WantedKey("acme", permissions=(permission,)) for permission in ALL[2:]},
}


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    with EdgeWorld(access=AccessSettings("keys")) as world:
        world.serve("other", capabilities=EVERYTHING)
        world.serve("unsalted", capabilities=EVERYTHING - {"cache_salt"})
        yield world


@pytest.fixture(scope="module")
def keys(edge: EdgeWorld) -> dict[str, str]:
    """The keys as their owners use them; `wrong` differs from `plain` in the last digit, `revoked` is revoked."""
    texts = {name: edge.create_key(wanted) for name, wanted in KEYS.items()}
    revoked = texts["revoked"] = edge.create_key(WantedKey("acme"))
    edge.revoke_key(revoked)
    plain = texts["plain"]
    texts |= {
        "": "",
        "wrong": plain[:-1] + ("0" if plain[-1] != "0" else "1"),
        "unknown": "hw-0123456789ab-" + "0" * 64,
        "short": plain[:-1],
        "foreign": "sk-1234",
        "secret alone": plain.rpartition("-")[2],
    }
    return texts


def body_of(path: str, model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A sound body for an endpoint."""
    if path == CHAT or path.startswith("/v1/messages"):
        return {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], **fields}
    return {"model": model, "max_tokens": 2, "prompt": "hi", **fields}


@pytest.mark.parametrize(
    ("key", "path", "model", "headers", "fields", "status", "names"),
    [
        # No credential, or one that is not valid.
        ("", CHAT, "m", {}, {}, 401, "Authorization"),
        ("", MODELS, "", {}, {}, 401, "Authorization"),
        ("", "/metrics", "", {}, {}, 401, "Authorization"),
        ("", "/v1/nowhere", "", {}, {}, 401, "Authorization"),
        ("wrong", CHAT, "m", {}, {}, 401, "not valid"),
        ("unknown", CHAT, "m", {}, {}, 401, "not valid"),
        ("short", CHAT, "m", {}, {}, 401, "not valid"),
        ("foreign", CHAT, "m", {}, {}, 401, "not valid"),
        ("secret alone", CHAT, "m", {}, {}, 401, "not valid"),
        ("revoked", CHAT, "m", {}, {}, 401, "not valid"),
        ("wrong", "/metrics", "", {}, {}, 401, "not valid"),
        # Probes need none.
        ("", "/live", "", {}, {}, 200, ""),
        ("", "/health", "", {}, {}, 200, "ok"),
        ("wrong", "/live", "", {}, {}, 200, ""),
        # Models.
        ("plain", CHAT, "m", {}, {}, 200, ""),
        ("plain", CHAT, "other", {}, {}, 200, ""),
        ("plain", CHAT, "gone", {}, {}, 404, "gone"),
        ("model m", CHAT, "m", {}, {}, 200, ""),
        ("model m", COMPLETIONS, "m", {}, {}, 200, ""),
        ("model m", CHAT, "other", {}, {}, 403, "models:other"),
        ("model m", CHAT, "gone", {}, {}, 403, "models:gone"),
        ("model gone", CHAT, "gone", {}, {}, 404, "gone"),
        ("model m", MODELS + "/m", "", {}, {}, 200, ""),
        ("model m", MODELS + "/other", "", {}, {}, 403, "models:other"),
        ("plain", CHAT, "unsalted", {}, {}, 403, "--allow-unsalted-engines"),
        # Endpoints.
        ("chat only", CHAT, "m", {}, {}, 200, ""),
        ("chat only", COMPLETIONS, "m", {}, {}, 403, "endpoints:completions"),
        ("chat only", "/v1/embeddings", "m", {}, {}, 403, "endpoints:embeddings"),
        ("chat only", "/v2/rerank", "m", {}, {}, 403, "endpoints:rerank"),
        ("chat only", "/v1/messages", "m", {}, {}, 403, "endpoints:messages"),
        ("chat only", "/v1/messages/count_tokens", "m", {}, {}, 403, "endpoints:messages"),
        ("chat only", "/tokenize", "m", {}, {}, 403, "endpoints:tokenize"),
        ("plain", "/v1/messages", "m", {}, {}, 200, ""),
        ("", "/v1/messages", "m", {}, {}, 401, "authentication_error"),
        ("model m", "/v1/messages", "other", {}, {}, 403, "models:other"),
        ("model m", "/tokenize", "other", {}, {}, 403, "models:other"),
        ("", "/version", "", {}, {}, 401, "Authorization"),
        ("chat only", "/version", "", {}, {}, 200, ""),
        ("chat only", MODELS, "", {}, {}, 200, ""),
        ("plain", "/metrics", "", {}, {}, 403, "metrics"),
        ("metrics", "/metrics", "", {}, {}, 200, ""),
        ("all", "/metrics", "", {}, {}, 200, ""),
        ("plain", "/admin/anything", "", {}, {}, 403, "admin"),
        ("plain", "/v1/nowhere", "", {}, {}, 404, "Unknown route"),
        # Overrides of the router: each header needs its own scope.
        ("plain", CHAT, "m", {"x-headwater-tier": "gold"}, {}, 403, "'tier'"),
        ("plain", CHAT, "m", {"x-headwater-worker": "w1"}, {}, 403, "'worker'"),
        ("plain", CHAT, "m", {"x-headwater-engine": "vllm"}, {}, 403, "'worker'"),
        ("plain", CHAT, "m", {"x-headwater-tolerates": "batch"}, {}, 403, "'toleration'"),
        ("plain", CHAT, "m", {"x-headwater-policy": "random"}, {}, 403, "'policy'"),
        ("plain", CHAT, "m", {"x-headwater-router-temperature": "0.5"}, {}, 403, "'policy'"),
        ("plain", CHAT, "m", {}, {"priority": 3}, 403, "'priority'"),
        ("plain", CHAT, "m", {}, {"priority": 0}, 200, ""),
        ("tier", CHAT, "m", {"x-headwater-tier": "gold"}, {}, 200, ""),
        ("tier", CHAT, "m", {"x-headwater-policy": "random"}, {}, 403, "'policy'"),
        ("worker", CHAT, "m", {"x-headwater-tier": "gold"}, {}, 403, "'tier'"),
        ("toleration", CHAT, "m", {"x-headwater-tolerates": "batch"}, {}, 200, ""),
        ("policy", CHAT, "m", {"x-headwater-router-temperature": "0.5"}, {}, 200, ""),
        ("priority", CHAT, "m", {}, {"priority": 3}, 200, ""),
        ("priority", COMPLETIONS, "m", {}, {"priority": -3}, 200, ""),
        # The tenant is the credential's.
        ("plain", CHAT, "m", {"x-headwater-tenant": "acme"}, {}, 200, ""),
        ("plain", CHAT, "m", {"x-headwater-tenant": "other"}, {}, 403, "x-headwater-tenant"),
        ("all", CHAT, "m", {"x-headwater-tenant": "other"}, {}, 403, "x-headwater-tenant"),
    ],
)
@pytest.mark.parametrize("form", ["authorization", "x-api-key"])
def test_what_each_key_may_do(
    edge: EdgeWorld,
    keys: dict[str, str],
    key: str,
    path: str,
    model: str,
    headers: dict[str, str],
    fields: dict[str, Any],
    status: int,
    names: str,
    form: str,
) -> None:
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    if keys[key]:
        value = f"Bearer {keys[key]}" if form == "authorization" else keys[key]
        given.append((form.encode(), value.encode()))
    method = "POST" if model else "GET"
    response = edge.ask(path, body_of(path, model, fields), method=method, headers=given)
    assert response.status == status, response.body
    assert names in response.body.decode()
    if status == 401:
        assert response.headers[b"www-authenticate"] == b"Bearer"
    if status in (401, 403):
        assert keys[key][-20:] not in response.body.decode() or not keys[key]


def test_the_list_of_models_shows_what_the_key_permits(edge: EdgeWorld, keys: dict[str, str]) -> None:
    def listed(key: str) -> list[str]:
        headers = [(b"x-api-key", keys[key].encode())]
        document = edge.ask(MODELS, b"", method="GET", headers=headers).document
        return [entry["id"] for entry in document["data"]]

    assert listed("plain") == ["m", "other", "unsalted"]
    assert listed("model other") == ["other"]
    assert listed("model gone") == []


def test_a_404_does_not_name_models_of_others(edge: EdgeWorld, keys: dict[str, str]) -> None:
    headers = [(b"x-api-key", keys["model gone"].encode())]
    message = json.dumps(edge.ask(CHAT, body_of(CHAT, "gone", {}), headers=headers).document)
    assert "other" not in message
    assert "'m'" not in message


def test_two_credentials_that_differ_are_refused_in_any_order(edge: EdgeWorld, keys: dict[str, str]) -> None:
    bearer = (b"authorization", b"Bearer " + keys["plain"].encode())
    for other, status in (("all", 401), ("plain", 200)):
        headers = [bearer, (b"x-api-key", keys[other].encode())]
        for order in (headers, headers[::-1]):
            assert edge.ask(MODELS, b"", method="GET", headers=order).status == status


def test_a_key_in_the_url_is_not_read(edge: EdgeWorld, keys: dict[str, str]) -> None:
    assert edge.ask(f"{MODELS}?api_key={keys['plain']}", b"", method="GET").status == 401


def test_every_route_has_an_endpoint_that_keys_can_name(edge: EdgeWorld) -> None:
    assert {endpoint_of(path) for path in edge.app._routes.plain} <= set(ENDPOINTS)


def test_the_router_gets_the_tenant_of_the_key(edge: EdgeWorld, keys: dict[str, str]) -> None:
    headers = [(b"x-api-key", keys["plain"].encode()), (b"x-headwater-session", b"s1")]
    assert edge.ask(CHAT, body_of(CHAT, "m", {}), headers=headers).status == 200
    query = edge.queries[-1]
    assert query.flow.tenant == "acme"
    # Sessions of two tenants with one name are two sessions.
    assert query.preferences.session not in ("", "s1")
