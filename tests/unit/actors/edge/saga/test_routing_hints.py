"""Routing headers and fields: how they reach the route query, and what is refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest

from headwater.actors.edge.saga.http_call import RoutingHints, parse_routing_headers
from headwater.actors.edge.settings import ClientLimits
from headwater.actors.http.errors import ApiError
from headwater.schemas.hashing import tenant_digest
from headwater.schemas.inference import Embedded
from headwater.schemas.routing import (
    CLIENT_POLICIES,
    Constraints,
    FlowControl,
    Preferences,
    RouteQuery,
    RouteRefused,
)
from headwater.schemas.tables import Capability
from tests.support.data.queries import changed
from tests.support.worlds.edge import EdgeWorld

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOUND: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 2}
EMBED: frozenset[Capability] = frozenset({"embed"})


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """One edge with one model that generates and one that embeds."""
    with EdgeWorld() as world:
        world.serve("vectors", capabilities=EMBED, tasks=("embed",))
        yield world


def asked(edge: EdgeWorld, headers: dict[str, str], **fields: Any) -> RouteQuery:
    """The query that a request with these headers leads to."""
    edge.queries.clear()
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    response = edge.ask(COMPLETIONS, {**SOUND, **fields}, headers=raw)
    assert response.status == 200, response.body
    return edge.queries[0]


def test_a_request_without_hints(edge: EdgeWorld) -> None:
    """May wait, and leaves all to the router."""
    query = asked(edge, {})
    assert query.constraints == Constraints()
    assert query.preferences == Preferences("", -1.0, "")
    assert query.flow == FlowControl(0, "", 0, waits=True)


def test_every_hint_reaches_the_router(edge: EdgeWorld) -> None:
    """By its header; priority is the body's."""
    query = asked(
        edge,
        {
            "x-headwater-session": "chat 7",
            "x-headwater-policy": "round_robin",
            "x-headwater-router-temperature": "0.5",
            "x-headwater-tier": "gold",
            "x-headwater-tolerates": "batch, spot,batch",
            "x-headwater-tenant": "team a",
            "x-headwater-deadline-ms": "2500",
        },
        priority=-3,
    )
    assert query.constraints == Constraints(tier="gold", tolerates=("batch", "spot"))
    assert query.preferences == Preferences("round_robin", 0.5, "chat 7")
    assert query.flow == FlowControl(-3, "team a", 2_500, waits=True)
    assert edge.given[-1].tenant == tenant_digest("team a") > 0


def test_where_session_and_tenant_come_from_without_their_headers(edge: EdgeWorld) -> None:
    """The other session header, then `user`; the API key. Neither user nor key leaves the edge as it is."""
    assert asked(edge, {"x-session-id": "s"}).preferences.session == "s"
    assert asked(edge, {"x-session-id": "s", "x-headwater-session": "t"}).preferences.session == "t"
    query = asked(edge, {"authorization": "Bearer sk-secret"}, user="ann@example.com")
    assert query.preferences.session.startswith("user-")
    assert query.flow.tenant.startswith("key-")
    assert "ann" not in query.preferences.session
    assert "sk-secret" not in query.flow.tenant
    again = asked(edge, {"authorization": "bearer sk-secret"}, user="ann@example.com")
    assert (again.preferences.session, again.flow.tenant) == (query.preferences.session, query.flow.tenant)
    assert asked(edge, {"authorization": "Bearer sk-other"}).flow.tenant != query.flow.tenant
    assert asked(edge, {"authorization": "Bearer k", "x-headwater-tenant": "t"}).flow.tenant == "t"
    assert asked(edge, {"authorization": "Basic abc"}).flow.tenant == ""


@pytest.mark.parametrize(
    ("header", "value", "told"),
    [
        ("x-headwater-policy", "direct", ", ".join(CLIENT_POLICIES)),
        ("x-headwater-policy", "best", "kv, slo"),
        ("x-headwater-worker", "w1", "may not choose a worker"),
        ("x-headwater-engine", "vllm", "may not choose a worker"),
        ("x-headwater-revision", "vllm-0.31", "may not choose a worker"),
        ("x-headwater-router-temperature", "1.5", "from 0 to 1"),
        ("x-headwater-router-temperature", "-1", "from 0 to 1"),
        ("x-headwater-router-temperature", "nan", "from 0 to 1"),
        ("x-headwater-router-temperature", "warm", "from 0 to 1"),
        ("x-headwater-tier", "a.b", "letters, digits"),
        ("x-headwater-tolerates", "batch,,spot", "letters, digits"),
        ("x-headwater-tolerates", ",".join(f"t{number}" for number in range(17)), "at most 16"),
        ("x-headwater-deadline-ms", "0", "milliseconds"),
        ("x-headwater-deadline-ms", "-5", "milliseconds"),
        ("x-headwater-deadline-ms", "1.5", "milliseconds"),
        ("x-headwater-deadline-ms", "9" * 30, "milliseconds"),
        ("x-headwater-session", "", "printable"),
        ("x-headwater-session", "x" * 257, "printable"),
        ("x-headwater-tenant", "a\tb", "printable"),
        ("x-session-id", "é", "printable"),
    ],
)
def test_a_hint_that_cannot_be_met_is_refused_by_name(
    edge: EdgeWorld, header: str, value: str, told: str
) -> None:
    """400; the message says what is allowed, and no router is asked."""
    edge.queries.clear()
    response = edge.ask(COMPLETIONS, SOUND, headers=[(header.encode(), value.encode())])
    assert response.status == 400, response.body
    error = response.document["error"]
    assert error["param"] == header
    assert header in error["message"]
    assert told in error["message"]
    assert edge.queries == []


def test_an_edge_may_let_clients_choose_no_policy() -> None:
    """The message says so."""
    headers = [(b"x-headwater-policy", b"kv")]
    with pytest.raises(ApiError, match="none"):
        parse_routing_headers(headers, ClientLimits(()))
    assert parse_routing_headers(headers, ClientLimits(("kv",))).preferences.policy == "kv"


def test_a_client_may_choose_its_worker_where_that_is_allowed() -> None:
    """That worker and no other; the leg behind a prefill elsewhere is anybody's, and other choices stay where the first one went."""
    headers = [(b"x-headwater-worker", b"w7")]
    hints = parse_routing_headers(headers, ClientLimits(("kv", "direct")))
    query = RouteQuery("r", 16, 5, b"")
    hinted = hints.apply_to(query, passed_s=0.0, waits=True)
    assert (hinted.constraints.pinned, hinted.preferences.policy) == ("w7", "direct")
    decode = changed(query, leg="decode")
    assert hints.apply_to(decode, passed_s=0.0, waits=False).constraints.pinned == ""
    placed = changed(query, pinned="w1")
    assert hints.apply_to(placed, passed_s=0.0, waits=False).constraints.pinned == "w1"


def test_a_client_may_choose_its_engine_where_that_is_allowed() -> None:
    """Under the policy that it would have anyway, and for every leg."""
    hints = parse_routing_headers([(b"x-headwater-engine", b"vllm")], ClientLimits(("kv", "direct")))
    query = RouteQuery("r", 16, 5, b"")
    for leg in ("", "decode"):
        hinted = hints.apply_to(changed(query, leg=leg), passed_s=0.0, waits=True)
        assert (hinted.constraints.engine, hinted.preferences.policy) == ("vllm", "")


def test_a_client_may_choose_its_revision_where_that_is_allowed() -> None:
    """For every leg, and not for what encodes its images."""
    hints = parse_routing_headers([(b"x-headwater-revision", b"a+b_1.2-3")], ClientLimits(("kv", "direct")))
    query = RouteQuery("r", 16, 5, b"")
    for leg in ("", "decode"):
        hinted = hints.apply_to(changed(query, leg=leg), passed_s=0.0, waits=True)
        assert hinted.constraints.revision == "a+b_1.2-3"
    image = changed(query, needs=("encode",), pairs_with="sim")
    assert hints.apply_to(image, passed_s=0.0, waits=True).constraints.revision == ""


def test_the_turns_of_a_conversation_are_known_by_how_it_begins(edge: EdgeWorld) -> None:
    """Also without a session; the log has a digest of it. Completions have no conversation."""

    def conversation(*texts: str, headers: dict[str, str] | None = None) -> str:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        edge.queries.clear()
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        body = {"model": "m", "messages": messages, "max_tokens": 2}
        assert edge.ask(CHAT, body, headers=raw).status == 200
        return edge.queries[0].preferences.conversation

    first = conversation("Be brief.", "Where is the source?")
    assert first.startswith("opening-")
    assert conversation("Be brief.", "Where is the source?", "In the hills.", "Which?") == first
    assert conversation("Be brief.", "Where is the mouth?") != first
    assert conversation("Be long.", "Where is the source?") != first
    assert conversation("Be brief.", "Where is the source?", headers={"x-headwater-tier": "gold"}) == first
    long = "x" * 3_000
    assert conversation("Be brief.", long + "a") != conversation("Be brief.", long + "b")
    assert asked(edge, {}).preferences.conversation == ""


def test_what_a_client_chose_is_not_who_encodes_its_images() -> None:
    """Neither the worker nor the engine, and the policy stays the router's; a tier and tolerated taints count."""
    given = [(b"x-headwater-worker", b"w7"), (b"x-headwater-engine", b"vllm"), (b"x-headwater-tier", b"gold")]
    hints = parse_routing_headers(given, ClientLimits(("kv", "direct")))
    query = changed(RouteQuery("r", 16, 0, b""), needs=("encode",), pairs_with="sglang")
    hinted = hints.apply_to(query, passed_s=0.0, waits=False)
    assert (hinted.constraints.pinned, hinted.constraints.engine) == ("", "")
    assert (hinted.constraints.tier, hinted.constraints.pairs_with) == ("gold", "sglang")
    assert hinted.preferences.policy == ""


def test_what_a_router_let_through_once_waits_no_more(edge: EdgeWorld) -> None:
    """A request whose worker was lost keeps its hints, but neither queues up again nor has a deadline left."""
    edge.breaks_after.append(1)
    first = asked(edge, {"x-headwater-tenant": "t", "x-headwater-deadline-ms": "5000"}, max_tokens=4)
    second = edge.queries[1]
    assert (first.flow.waits, first.flow.deadline_ms) == (True, 5_000)
    assert (second.flow.waits, second.flow.deadline_ms, second.flow.tenant) == (False, 0, "t")


def test_choices_of_one_prompt_wait_once(edge: EdgeWorld) -> None:
    """The others go where the first went, at once."""
    asked(edge, {}, n=3)
    assert [(query.constraints.pinned, query.flow.waits) for query in edge.queries] == [
        ("", True),
        ("w1", False),
        ("w1", False),
    ]


def test_a_deadline_is_counted_from_when_the_request_came() -> None:
    """What has passed is taken off; one that has passed altogether is one millisecond, which no router meets."""
    query = RouteQuery("a", 1, 1, b"")
    hints = RoutingHints(flow=FlowControl(deadline_ms=1_000))
    assert hints.apply_to(query, passed_s=0.25, waits=True).flow.deadline_ms == 750
    assert hints.apply_to(query, passed_s=3.0, waits=True).flow.deadline_ms == 1


@pytest.mark.parametrize(
    ("refused", "status", "code", "retry"),
    [
        (RouteRefused("full", 6.2, 503, True, "overloaded"), 503, "overloaded", b"7"),
        (RouteRefused("share", 0.3, 429, True, "rate_limit_exceeded"), 429, "rate_limit_exceeded", b"1"),
        (RouteRefused("late", 2.0, 503, True, "deadline_exceeded"), 503, "deadline_exceeded", b"2"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
def test_a_final_refusal_reaches_the_client_at_once(
    edge: EdgeWorld, path: str, refused: RouteRefused, status: int, code: str, retry: bytes
) -> None:
    """In OpenAI's shape, with when to come again in whole seconds; it is not asked again."""
    edge.refuses.append(refused)
    edge.queries.clear()
    body = {**SOUND, "messages": [{"role": "user", "content": "hi"}], "stream": path != "/v1/embeddings"}
    if path == "/v1/embeddings":
        body = {"model": "vectors", "input": "hi"}
    response = edge.ask(path, body)
    assert response.status == status, response.body
    error = response.document["error"]
    assert (error["code"], error["type"]) == (
        code,
        "rate_limit_error" if status == 429 else "server_error",
    )
    assert refused.reason in error["message"]
    assert response.headers[b"retry-after"] == retry
    assert len(edge.queries) == 1


def test_a_mistake_that_only_the_router_sees_is_the_client_s(edge: EdgeWorld) -> None:
    """400, without a second try."""
    edge.refuses.append(RouteRefused("unknown policy x", status=400))
    edge.queries.clear()
    response = edge.ask(COMPLETIONS, SOUND)
    assert response.status == 400
    assert response.document["error"]["type"] == "invalid_request_error"
    assert len(edge.queries) == 1


def test_pooling_has_the_same_hints(edge: EdgeWorld) -> None:
    """Headers, user and priority."""
    edge.pool = lambda request: Embedded(tuple(b"\0\0\x80?" * 4 for _ in request.prompts))
    edge.queries.clear()
    response = edge.ask(
        "/v1/embeddings",
        {"model": "vectors", "input": "hi", "user": "ann", "priority": 4},
        headers=[(b"x-headwater-tier", b"gold"), (b"x-headwater-deadline-ms", b"900")],
    )
    assert response.status in (200, 503), response.body
    [query] = edge.queries[:1]
    assert query.constraints.tier == "gold"
    assert (query.flow.priority, query.flow.deadline_ms, query.flow.waits) == (4, 900, True)
    assert query.preferences.session.startswith("user-")
