"""The console's HTTP application: views that agree with the log, hostile requests, and who may see what."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.actors.admin import AdminApp, TokenAuthenticator, parse_tokens
from headwater.actors.edge.admit.control import (
    AccessControl,
    KeyRing,
    digest_of,
    key_text,
    new_id,
    new_secret,
)
from headwater.actors.edge.settings import AccessSettings, OidcSettings
from headwater.actors.http.asgi import Scope
from headwater.actors.http.errors import ApiError
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.engines.sim.engine import SimEngine
from headwater.ops.console.app import (
    EVERYTHING,
    READ,
    ConsoleAccess,
    ConsoleApp,
    ConsoleScopes,
    without_tenants,
)
from headwater.ops.console.pools import WATCHED_S, Pools
from headwater.ops.console.process import keys_of
from headwater.ops.history.requests import decisions_in, request_of
from headwater.ops.sim import fleet as sim_fleet
from headwater.ops.sim.fleet import SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.router.replay import Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.routing import Decision
from headwater.schemas.tables import ApiKey, Scopes, SecretDigest
from tests.sim.disaggregated import ask, fleet_of
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world
from tests.support.worlds.told import ask_many, ports_of, records_of, told
from tests.support.worlds.virtual import virtual
from tests.unit.actors.edge.admit.test_jwks_over_http import NEW, OLD, Issuer
from tests.unit.actors.edge.admit.test_oidc import ISSUER

TOKEN = "a-token-of-an-operator"
HOST = (b"host", b"localhost:8001")


class Answer(msgspec.Struct):
    """A response."""

    status: int = 0
    headers: dict[bytes, bytes] = {}
    body: bytes = b""

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)


def scope_of(method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Scope:
    """A request as a server passes it to an application."""
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "method": method,
        "path": path.decode("utf-8", "replace"),
        "query_string": query,
        "headers": list(headers),
        "client": ("127.0.0.1", 5),
    }


async def call(
    app: ConsoleApp,
    target: str | bytes,
    method: str = "GET",
    headers: Sequence[tuple[bytes, bytes]] = (HOST,),
    body: bytes = b"",
) -> Answer:
    """One request. `target` is a path with its query, as bytes on the wire."""
    scope = scope_of(method, target if isinstance(target, bytes) else target.encode(), headers)
    answer = Answer()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], dict(message["headers"])
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer


class Reader(ConsoleAccess):
    """Admits everyone without the scope of tenants."""

    async def admit(self, scope: Scope) -> ConsoleScopes:
        return READ


def open_app(fleet: SimFleet, access: type[ConsoleAccess] = ConsoleAccess) -> ConsoleApp:
    """A console of a fleet that everyone on the machine may read."""
    pools = Pools(ports_of(fleet), "the simulator")
    app = ConsoleApp(pools, access(None, None, is_open=True))
    fleet.loop.create_task(pools.run())
    return app


async def followed_app(fleet: SimFleet) -> ConsoleApp:
    """Such a console, whose history has all that is in the logs."""
    app = open_app(fleet)
    await call(app, "/api/fleet")
    await asyncio.sleep(2)
    return app


@virtual
async def test_views_say_what_the_log_says(clock: VirtualLoop) -> None:
    """At one position: workers as a replay has them, requests as the log has them, and decisions by their records."""
    async with told(clock) as fleet:
        app, records = await followed_app(fleet), await records_of(fleet)
        decisions = [
            Recorded((record.batch.writer, record.batch.epoch), event)
            for record in records
            for event in record.batch.events
            if isinstance(event, Decision)
        ]
        for record in records[:: len(records) // 7]:
            replay = Replay(RouterState(), decisions)
            for earlier in records:
                if earlier.position <= record.position:
                    replay.fold(earlier)
            view = (await call(app, f"/api/fleet?at={record.position}")).document
            assert view["position"] == record.position
            shown = {
                one["name"]: (one["running"], one["requests"], one["used_blocks"]) for one in view["workers"]
            }
            assert shown == {
                one.name: (one.running, len(one.requests), one.used_blocks)
                for one in replay.state.loads.workers.values()
            }
            tree = (await call(app, f"/api/tree?at={record.position}")).document
            assert tree["held"] == dict(replay.state.index.blocks)
        await check_requests(app)


async def check_requests(app: ConsoleApp) -> None:
    """Lists, single requests and their decisions agree."""
    listed = (await call(app, "/api/requests?window_s=3600&limit=1000")).document
    assert listed["total"] == 48
    failed = (await call(app, "/api/requests?window_s=3600&state=migrated")).document
    assert 0 < failed["total"] < 48
    for row in listed["requests"][::7]:
        one = (await call(app, f"/api/request?id={row['id']}")).document
        assert one["completion_tokens"] == row["completion_tokens"]
        for made in one["decisions"]:
            decision = (await call(app, f"/api/decision?id={made['id']}&policy=kv")).document
            assert decision["chosen"] == made["worker"]
            assert decision["what_if"]["same"]
            assert sum(term["value"] for term in decision["candidates"][0]["terms"]) == pytest.approx(
                decision["candidates"][0]["score"]
            )


@virtual
async def test_a_position_shows_nothing_of_what_came_later(clock: VirtualLoop) -> None:
    """Every view at a position is the same before and after more has happened, also where requests were open then."""
    async with told(clock, bursts=2) as fleet:
        app = await followed_app(fleet)
        asked = asyncio.ensure_future(ask_many(fleet, random.Random(1), 20))
        await asyncio.sleep(0.3)
        # Both logs are read up to here, and no further until this turn ends.
        history = await app._pools.history("")
        await history.follow()
        last = (await call(app, "/api/log")).document["last"]
        views = (
            "fleet?",
            "requests?",
            "queue?",
            "stuck?",
            "handoffs?",
            "series?columns=20&split=model&",
            "usage?",
            "lanes?columns=20&",
            "tree?",
        )
        targets = [f"/api/{view}at={last - back}" for back in (0, 11) for view in views]
        listed = (await call(app, f"/api/requests?at={last - 11}")).document["requests"]
        opened = [row["id"] for row in listed if row["state"] != "ended"]
        assert opened
        targets += [f"/api/request?at={last - back}&id={name}" for back in (0, 11) for name in opened]
        before = [(await call(app, target)).document for target in targets]
        await asked
        await ask_many(fleet, random.Random(3), 5)
        await asyncio.sleep(3)
        assert (await call(app, "/api/log")).document["last"] > last
        after = [(await call(app, target)).document for target in targets]
        for target, was, now in zip(targets, before, after, strict=True):
            assert now == was, target


@virtual
async def test_a_request_is_shown_as_it_was_known_at_the_position(clock: VirtualLoop) -> None:
    """At each position of its life it has the events until then and no later one; before its acceptance there is none."""
    async with told(clock) as fleet:
        app = await followed_app(fleet)
        rows = (await call(app, "/api/requests?window_s=3600&state=migrated")).document["requests"]
        for row in rows:
            whole = (await call(app, f"/api/request?id={row['id']}")).document
            assert whole["state"] == "ended"
            first, last = whole["decided_position"], whole["position_end"]
            seen = []
            for at in range(first - 1, last + 1):
                answer = await call(app, f"/api/request?id={row['id']}&at={at}")
                if answer.status == 404:
                    assert (answer.document["error"]["code"], at) == ("not_yet", first - 1)
                    continue
                shown = answer.document
                now_ms = shown["time_ms"]
                assert shown["position"] == at
                assert shown["marks"] == [one for one in whole["marks"] if one["time_ms"] <= now_ms]
                assert shown["decisions"] == [one for one in whole["decisions"] if one["stored"] <= at]
                assert all(span["start_ms"] <= now_ms for span in shown["spans"])
                assert all((span["end_ms"] or 0) <= now_ms for span in shown["spans"])
                if at < last:
                    assert shown["state"] != "ended"
                    assert [shown[name] for name in ("reason", "duration_ms", "position_end")] == [
                        "",
                        None,
                        None,
                    ]
                    assert any(span["end_ms"] is None for span in shown["spans"])
                    assert not any(line.startswith("req.ended") for line in shown["explanation"])
                seen.append((shown["state"], len(shown["decisions"]), shown["migrations"]))
            assert seen == sorted(seen, key=lambda one: one[1:])
            assert seen[-1] == ("ended", len(whole["decisions"]), whole["migrations"])
            assert seen[0][1:] == (1, 0)
        early = await call(app, f"/api/request?id={row['id']}&at=1")
        assert (early.status, early.document["error"]["code"]) == (404, "not_yet")


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "prefill", "decode", "decode")])
@virtual
async def test_a_decision_has_its_regret_once_the_first_token_is_known(
    clock: VirtualLoop, roles: Any
) -> None:
    """That of the series: of one decision of each request, and not before the position at which its first token is known."""
    async with told(clock, roles) as fleet:
        app = await followed_app(fleet)
        rows = (await call(app, "/api/requests?window_s=3600&limit=1000")).document["requests"]
        regrets, moved = [], 0
        for row in rows:
            made = (await call(app, f"/api/request?id={row['id']}")).document["decisions"]
            views = [(await call(app, f"/api/decision?id={one['id']}")).document for one in made]
            [led] = [one for one in views if one["found"]["led"]]
            moved += len(views) > 1 and led is not views[-1]
            assert all(one["found"]["started"] and one["settled"] for one in views)
            assert all(one["found"]["ttft_ms"] is None for one in views if one is not led)
            assert led["found"]["ttft_ms"] == row["ttft_ms"]
            early = (await call(app, f"/api/decision?id={led['id']}&at={led['stored']}")).document
            assert not early["found"]["started"]
            assert (early["found"]["regret_ms"], early["later"], early["settled"]) == (None, [], False)
            before = await call(app, f"/api/decision?id={led['id']}&at={led['stored'] - 1}")
            assert (before.status, before.document["error"]["code"]) == (404, "not_yet")
            if led["found"]["regret_ms"] is not None:
                found = led["found"]
                regrets.append(found["ttft_ms"] - found["waited_ms"] - found["expected_ttft_ms"])
                assert found["regret_ms"] == pytest.approx(regrets[-1])
        assert moved, "no request has a decision after the one that led to its first token"
        whole = (await call(app, "/api/series?window_s=3600&columns=1")).document["series"]["regret_ms"]
        assert whole == pytest.approx([sorted(regrets)[-(-len(regrets) // 2) - 1]])
        assert len(regrets) > 10


VIEWS = (
    b"fleet lanes series requests request decision tree origin usage queue handoffs stuck events diff step position replicas log pools policies "
    b"nothing ../../etc/passwd %00"
).split()

PARAMETERS = (
    b"at window_s columns limit offset id worker text state sort pool a b kind event writer direction by time_ms depth policy "
    b"weight.memory weight.x all block split tenant"
).split()

VALUES = (
    *(b"", b"a" * 5_000, b"__import__('os').system('id')", b"\xd9\xa1", b"\x80\x81"),
    *b"-1 0 99999999999999999999999 1e400 nan NaN inf 0x10 1_000 %D9%A1 %00 %ff%fe ../../../etc/passwd ${7*7}".split(),
    *b"'%22><script>alert(1)</script> 9223372036854775808 -9223372036854775809 %F0%9F%98%80".split(),
)

PATHS = b"/assets/../app.py /assets/%2e%2e/app.py // /api /api/ /admin/workers".split()


def hostile(draw: random.Random) -> list[tuple[str, bytes]]:
    """200 requests that nobody should send."""
    found = []
    for _ in range(190):
        pairs = [draw.choice(PARAMETERS) + b"=" + draw.choice(VALUES) for _ in range(draw.randrange(1, 5))]
        target = b"/api/" + draw.choice(VIEWS) + b"?" + b"&".join(pairs)
        found.append((draw.choice(("GET", "GET", "GET", "POST", "PUT", "HEAD")), target))
    found += [("GET", b"/api/fleet?" + b"at=1&" * 100), ("GET", b"/api/fleet?" + b"x" * 20_000)]
    found += [("GET", path) for path in PATHS]
    return [*found, ("POST", b"/admin/workers/w/drain"), ("DELETE", b"/")]


async def follow(app: ConsoleApp, ends: asyncio.Event, received: list[bytes]) -> None:
    """A page that follows the log until it is closed."""

    async def receive() -> dict[str, Any]:
        await ends.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        received.append(message.get("body", b""))

    await app(scope_of("GET", b"/api/live", (HOST,)), receive, send)


@pytest.mark.parametrize("end", ["the page is closed", "the console stops", "the log is another one"])
@virtual
async def test_a_stream_of_positions_ends_with_its_page_and_then_nothing_is_read(
    clock: VirtualLoop, end: str
) -> None:
    """While it is open it tells of new positions."""
    async with told(clock, bursts=1) as fleet:
        app, closed, received = open_app(fleet), asyncio.Event(), list[bytes]()
        page = asyncio.ensure_future(follow(app, closed, received))
        await asyncio.sleep(60)
        history = await app._pools.history("")
        before = (await history.log.bounds()).last
        await ask_many(fleet, random.Random(1), 3)
        await asyncio.sleep(2)
        assert msgspec.json.decode(received[-1].removeprefix(b"data: "))["last"] > before
        assert not page.done()
        if end == "the page is closed":
            closed.set()
        elif end == "the console stops":
            app.close()
        else:
            del app._pools._histories[history.pool]
        await asyncio.sleep(1)
        assert page.done()
        await asyncio.sleep(WATCHED_S)
        last = history.last.position
        await ask_many(fleet, random.Random(2), 3)
        await asyncio.sleep(5)
        assert history.last.position == last


@virtual
async def test_hostile_requests_are_refused(clock: VirtualLoop) -> None:
    """Each gets an answer of JSON that is no failure of the server's, and the console answers on."""
    async with told(clock, bursts=2) as fleet:
        app = await followed_app(fleet)
        requests = hostile(random.Random(11))
        assert len(requests) == 200
        statuses = set()
        for method, target in requests:
            answer = await call(app, target, method)
            assert answer.status < 500, (method, target, answer.body)
            assert answer.headers[b"content-security-policy"].startswith(b"default-src 'none'")
            if answer.status >= 400:
                assert answer.document["error"]["message"]
            statuses.add(answer.status)
        assert statuses >= {200, 400, 403, 404}
        assert (await call(app, "/api/fleet")).status == 200


@virtual
async def test_what_each_credential_may_see(clock: VirtualLoop) -> None:
    """Without one nothing, beyond loopback; a key with `metrics` reads without tenants and contents, an operator's token controls."""
    async with told(clock, bursts=1) as fleet:
        ports = ports_of(fleet)
        ring = KeyRing(ports.api_keys, ports.clock)
        watching = asyncio.create_task(ring.run())
        reader, nobody, chief = [
            await _key(ports, scopes) for scopes in (["metrics"], ["endpoints:*"], ["admin"])
        ]
        await ring.known.wait()
        await asyncio.sleep(1)
        tokens = TokenAuthenticator(parse_tokens(f"amy {TOKEN}"), ports.clock)
        pools = Pools(ports, "the simulator")
        app = ConsoleApp(
            pools, ConsoleAccess(tokens, AccessControl(ring), is_open=False), AdminApp(ports, tokens)
        )
        following = asyncio.create_task(pools.run())

        def shown(secret: str) -> list[tuple[bytes, bytes]]:
            return [(b"host", b"console.example"), (b"authorization", f"Bearer {secret}".encode())]

        assert (await call(app, "/api/pools", headers=[HOST])).status == 401
        assert (await call(app, "/", headers=[HOST])).status in (200, 404)
        assert (await call(app, "/api/fleet", headers=shown("hw-wrong"))).status == 401
        assert (await call(app, "/api/fleet", headers=shown("a-wrong-token-of-16"))).status == 401
        assert (await call(app, "/api/fleet", headers=shown(nobody))).status == 403
        scopes = {}
        for name, secret in (("reader", reader), ("chief", chief), ("token", TOKEN)):
            scopes[name] = (await call(app, "/api/pools", headers=shown(secret))).document["scopes"]
        assert scopes == {
            "reader": ["read"],
            "chief": ["contents", "control", "read", "tenants"],
            "token": ["contents", "control", "read", "tenants"],
        }
        [worker, *_] = fleet.engines
        target = f"/admin/workers/{worker}/drain"
        assert (await call(app, target, "POST", shown(reader))).status == 403
        done = await call(app, target, "POST", shown(TOKEN))
        assert (done.status, done.document["worker"]) == (200, worker)
        await asyncio.sleep(2)
        view = (await call(app, "/api/fleet", headers=shown(reader))).document
        assert {one["name"]: one["state"] for one in view["workers"]}[worker] == "draining"
        for task in (watching, following):
            task.cancel()


@virtual
async def test_engine_weights_are_set_by_an_operator_and_recorded(clock: VirtualLoop) -> None:
    """What no router takes is refused by it; who set them is in the log."""
    async with told(clock, bursts=1) as fleet:
        ports = ports_of(fleet)
        tokens = TokenAuthenticator(parse_tokens(f"amy {TOKEN}"), ports.clock)
        pools = Pools(ports, "the simulator")
        access = ConsoleAccess(tokens, None, is_open=False)
        app, bare = ConsoleApp(pools, access, AdminApp(ports, tokens)), ConsoleApp(pools, access)
        following = asyncio.create_task(pools.run())
        shown = [(b"host", b"console.example"), (b"authorization", f"Bearer {TOKEN}".encode())]
        target = f"/admin/pools/{(await pools.history('')).pool}/weights"
        assert (await call(bare, target, "POST", shown, b'{"sim": 1}')).status == 403
        for body, status in (
            (b'{"sim": "1"}', 400),
            (b"[]", 400),
            (b'{"sim": -1}', 400),
            (b'{"other": 1}', 400),
            (b'{"sim": 2}', 200),
        ):
            answer = await call(app, target, "POST", shown, body)
            assert answer.status == status, (body, answer.body)
        assert answer.document["engines"][0]["weight"] == 2
        assert (await call(app, target, "GET", shown)).document["engines"][0]["weight"] == 2
        assert (await call(app, "/admin/pools/x/y", "POST", shown)).status == 404
        await asyncio.sleep(2)
        view = (await call(app, "/api/fleet", headers=shown)).document
        assert view["engine_weights"] == {"sim": 2}
        assert b"token amy" in (await call(app, "/api/events?kind=fleet", headers=shown)).body
        following.cancel()


async def test_tokens_of_an_identity_provider_are_admitted_by_their_scopes() -> None:
    """As an edge admits them, with its settings: keys of the provider are read over HTTP."""
    issuer, clock = Issuer(), ManualClock()
    oidc = OidcSettings(ISSUER, ("headwater",), issuer.url)
    control, loops = keys_of(AccessSettings(mode="oidc", oidc=oidc), memory_world(clock))
    assert control is not None
    access = ConsoleAccess(None, control, is_open=False)

    async def admitted(token: bytes) -> Any:
        scope = {"headers": [(b"host", b"console.example"), (b"authorization", b"Bearer " + token)]}
        try:
            return await access.admit(scope)
        except ApiError as error:
            return error.status

    now_s = clock.wall_ns() // 10**9
    try:
        assert await admitted(issuer.token(OLD, "old", "EdDSA", scope="admin")) == EVERYTHING
        assert await admitted(issuer.token(OLD, "old", "EdDSA", scope="metrics endpoints:*")) == READ
        assert await admitted(issuer.token(OLD, "old", "EdDSA", scope="endpoints:*")) == 403
        assert await admitted(issuer.token(OLD, "old", "EdDSA", scope="admin", aud="other")) == 401
        assert await admitted(issuer.token(OLD, "old", "EdDSA", scope="admin", exp=now_s - 60)) == 401
        assert await admitted(issuer.token(NEW, "old", "ES256", scope="admin")) == 401
        assert await admitted(b"a-token-of-an-operator") == 401
    finally:
        issuer.close()
        for one in loops:
            one.close()


async def _key(ports: Ports, scopes: list[str]) -> str:
    """A new API key with these scopes."""
    key_id, secret = new_id(), new_secret()
    key = ApiKey(
        id=key_id,
        name="a key",
        tenant="tenant",
        created_s=1,
        digests=(SecretDigest(digest_of(key_id, secret.encode())),),
        scopes=Scopes.parse(scopes),
    )
    await ApiKeyTable(ports.api_keys).create(key)
    return key_text(key_id, secret)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([HOST], 200),
        ([(b"host", b"127.0.0.1:8001")], 200),
        ([(b"host", b"[::1]:8001")], 200),
        ([(b"host", b"evil.example")], 403),
        ([(b"host", b"evil.example:8001")], 403),
        ([HOST, (b"sec-fetch-site", b"cross-site")], 403),
        ([HOST, (b"sec-fetch-site", b"same-site")], 403),
        ([HOST, (b"sec-fetch-site", b"same-origin")], 200),
    ],
)
@virtual
async def test_pages_of_other_sites_get_nothing(
    clock: VirtualLoop, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """Nor does a name that was pointed at loopback."""
    async with told(clock, bursts=1) as fleet:
        assert (await call(open_app(fleet), "/api/pools", headers=headers)).status == status


def test_tenants_have_no_names_without_the_scope() -> None:
    """At any depth."""
    document = {
        "answered": [[9, 7]],
        "tenant": "a",
        "rows": [{"tenant": "b", "id": 1}],
        "by": {"tenant": "c"},
    }
    assert without_tenants(document) == {
        "answered": "",
        "tenant": "",
        "rows": [{"tenant": "", "id": 1}],
        "by": {"tenant": ""},
    }


@virtual
async def test_a_request_without_progress_is_shown_with_what_it_waits_for(
    clock: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker hangs: the overview finds it, and the view names the worker and the remedy."""

    class Hanging(SimEngine):
        hangs = False

        def submit(self, *request: Any) -> None:
            if not Hanging.hangs:
                super().submit(*request)

    monkeypatch.setattr(sim_fleet, "SimEngine", Hanging)
    async with fleet_of(clock, roles=("both",)) as fleet:
        app = open_app(fleet)
        await ask_many(fleet, random.Random(2), 3)
        Hanging.hangs = True
        asked = asyncio.ensure_future(ask(fleet, [3] * 40, 50))
        await asyncio.sleep(30)
        await call(app, "/api/fleet")
        await asyncio.sleep(2)
        view = (await call(app, "/api/stuck")).document
        titles = [one["title"] for one in (await call(app, "/api/fleet")).document["findings"]]
        asked.cancel()
        assert "A request makes no progress" in titles
        [stuck] = view["stuck"]
        assert stuck["worker"] == fleet.engines[0]
        assert fleet.engines[0] in stuck["waits_for"]
        assert stuck["remedy"]


@virtual
async def test_steps_go_to_the_nearest_position_of_their_kind(clock: VirtualLoop) -> None:
    """In both directions, from any position of what happened."""
    async with told(clock) as fleet:
        app, records = await followed_app(fleet), await records_of(fleet)
        decided = [one for record in records for one in decisions_in(record)]
        first = {request_of(one.decision.request): one.position for one in reversed(decided)}
        places = {
            "message": [one.position for one in records],
            "decision": [one.position for one in decided],
            "request": sorted(first.values()),
            "fleet": [mark.position for mark in (await app._pools.history("")).fleet.marks],
        }
        for by, known in places.items():
            for at in (known[0], known[1], known[-1], *(one.position for one in records[::40])):
                later, earlier = [one for one in known if one > at], [one for one in known if one < at]
                for direction, wanted in ((1, later[:1]), (-1, earlier[-1:])):
                    answer = await call(app, f"/api/step?by={by}&at={at}&direction={direction}")
                    assert not wanted or answer.document["position"] == wanted[0], (by, at, direction)
                    # The log goes on meanwhile: there may be a later message.
                    assert wanted or by == "message" or answer.status == 404, (by, at, direction)
