"""Rights of each kind of client: what its work needs is there, and what it must not do is not."""

import pytest

from headwater.schemas import subjects
from headwater.schemas.names import PROBE, InvalidName
from headwater.schemas.permissions import DUTIES, KINDS, Kind, Rights, rights

NS = "ns"
REQUESTS = subjects.request_stream(NS)
POOL = subjects.pool_stream(NS, "p")
BLOBS = f"OBJ_{subjects.blob_bucket(NS)}"
LEASES = f"KV_{subjects.lease_bucket(NS)}"


def matches(pattern: str, subject: str) -> bool:
    """As the server matches: '*' is one token, '>' one or more at the end."""
    wanted, given = pattern.split("."), subject.split(".")
    for number, token in enumerate(wanted):
        if token == ">":
            return len(given) > number
        if number >= len(given) or token not in ("*", given[number]):
            return False
    return len(wanted) == len(given)


def may_publish(right: Rights, subject: str) -> bool:
    """Allowed and not denied."""
    return any(matches(pattern, subject) for pattern in right.publish) and not any(
        matches(pattern, subject) for pattern in right.deny_publish
    )


def may_subscribe(right: Rights, subject: str) -> bool:
    """Every subject of the pattern asked for lies within one that is allowed."""
    return any(matches(pattern, subject) for pattern in right.subscribe)


def reads(stream: str) -> list[str]:
    """What one sends to read a stream."""
    return [
        f"$JS.API.CONSUMER.CREATE.{stream}.c1",
        f"$JS.API.CONSUMER.CREATE.{stream}.c1.a.filter.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.c1",
        f"$JS.API.CONSUMER.DELETE.{stream}.c1",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.some.subject",
    ]


EVENTS = {kind: subjects.pool_subject(NS, "p", kind, "me") for kind in subjects.POOL_KINDS}
ENGINE = {verb: subjects.engine(NS, "w", 7, verb) for verb in ("generate", "cancel", "status", "drain")}
RESYNC = subjects.resync(NS, "w")
CONTROL = subjects.control(NS, "w")
FRAMES = subjects.edge_frames(NS, "e")
MEDIA = subjects.edge_media(NS, "e")
MEDIA_OFFER = subjects.edge_offer(NS, "e")
ROUTE = subjects.route_query(NS, "p")
DIGESTS = subjects.digests(NS, "p")
WAIT = subjects.route_wait(NS, "p", "me", 3)
REQUEST = subjects.request_subject(NS, "me")
CREATE = f"$JS.API.STREAM.CREATE.{POOL}"


def lease(kind: str) -> str:
    """Where a lease is written."""
    return f"$KV.{subjects.lease_bucket(NS)}.{kind}.me"


CARD = f"$KV.{subjects.card_bucket(NS)}.{subjects.card_key('p')}"
ADAPTER = f"$KV.{subjects.card_bucket(NS)}.{subjects.lora_key('p', 'some/adapter')}"
API_KEYS = f"KV_{subjects.api_key_bucket(NS)}"
API_KEY = f"$KV.{subjects.api_key_bucket(NS)}.0123456789ab"
SECRETS = f"KV_{subjects.secret_bucket(NS)}"
SECRET = f"$KV.{subjects.secret_bucket(NS)}.{subjects.SALT_KEY}"
CARDS = f"KV_{subjects.card_bucket(NS)}"
BLOB = f"$O.{subjects.blob_bucket(NS)}.C.abc"

PROBES = {subjects.pool_subject(NS, "p", "load", PROBE), subjects.request_subject(NS, PROBE)}

EVERYTHING = {
    *EVENTS.values(),
    *ENGINE.values(),
    RESYNC,
    CONTROL,
    FRAMES,
    MEDIA,
    MEDIA_OFFER,
    ROUTE,
    WAIT,
    REQUEST,
    CREATE,
    lease("edge"),
    lease("router"),
    lease("shadow"),
    lease("worker"),
    DIGESTS,
    CARD,
    ADAPTER,
    BLOB,
    "$SRV.PING",
    f"$JS.API.STREAM.DELETE.{POOL}",
    f"$JS.API.STREAM.PURGE.{POOL}",
    f"$JS.API.STREAM.PURGE.{BLOBS}",
    f"$JS.API.STREAM.UPDATE.{POOL}",
    f"$JS.API.STREAM.INFO.{REQUESTS}",
    *reads(POOL),
    *reads(REQUESTS),
    *reads(LEASES),
    *reads(CARDS),
    API_KEY,
    SECRET,
    *reads(API_KEYS),
    *reads(SECRETS),
}

WRITES: dict[Kind, set[str]] = {
    "edge": {
        ROUTE, WAIT, ENGINE["generate"], ENGINE["cancel"], ENGINE["status"], REQUEST, lease("edge"),
        *reads(REQUESTS), *reads(LEASES), *reads(CARDS), *reads(API_KEYS), *reads(SECRETS), SECRET,
    },
    "router": {
        EVENTS["route"], EVENTS["fleet"], RESYNC, DIGESTS, lease("router"), BLOB, f"$JS.API.STREAM.PURGE.{BLOBS}",
        *reads(POOL), *reads(LEASES), *reads(CARDS),
    },
    "shadow": {EVENTS["shadow"], lease("shadow"), *reads(POOL), *reads(LEASES), *reads(CARDS)},
    "worker": {
        EVENTS["fleet"], EVENTS["kv"], EVENTS["load"], FRAMES, MEDIA, MEDIA_OFFER, lease("worker"), CARD,
        ADAPTER, BLOB,
        *reads(LEASES), *reads(CARDS),
        f"$JS.API.STREAM.PURGE.{BLOBS}",
        f"$JS.API.STREAM.MSG.GET.{POOL}", f"$JS.API.DIRECT.GET.{POOL}.some.subject",
        f"$JS.API.STREAM.MSG.GET.{LEASES}", f"$JS.API.DIRECT.GET.{LEASES}.some.subject",
    },
    "operator": EVERYTHING
    - {*EVENTS.values(), REQUEST, FRAMES, MEDIA, MEDIA_OFFER, WAIT, ENGINE["generate"], DIGESTS, *reads(SECRETS)},
    "admin": {CONTROL, *reads(LEASES)},
    "console": {*reads(POOL), *reads(REQUESTS), *reads(LEASES), *reads(CARDS), *reads(API_KEYS)},
    "tracer": {*reads(POOL), *reads(REQUESTS)},
    "picker": {ROUTE, WAIT, *reads(LEASES), *reads(CARDS), *reads(API_KEYS), *reads(SECRETS), SECRET},
    "observer": {"$SRV.PING", *reads(POOL), *reads(REQUESTS), *reads(LEASES), *reads(CARDS)},
}  # fmt: skip
"""Of `EVERYTHING`, what each kind may publish; all may look whether a stream exists."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pools", [(), ("p",)], ids=["any pool", "one pool"])
def test_each_kind_may_publish_its_own_and_nothing_else(kind: Kind, pools: tuple[str, ...]) -> None:
    """Over everything that is published anywhere, so a right given by mistake is found."""
    right = rights(NS, kind, pools=pools)
    wanted = WRITES[kind] | {f"$JS.API.STREAM.INFO.{REQUESTS}"}
    assert {subject for subject in EVERYTHING if may_publish(right, subject)} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_reads_its_own_inbox_only(kind: Kind) -> None:
    """Neither another kind's, nor the one that clients have by default, nor everything."""
    right = rights(NS, kind)
    assert may_subscribe(right, subjects.inbox(NS, kind, "me", "bus") + ".id.token")
    for other in KINDS:
        if other != kind:
            assert not may_subscribe(right, subjects.inbox(NS, other, "me", "bus") + ".id.token")
            assert not may_subscribe(right, subjects.inbox_root(NS, other) + ".>")
    for subject in ("_INBOX.id", "_INBOX.>", ">", "*.>", f"hw.{NS}.>", "$JS.API.>"):
        assert not may_subscribe(right, subject)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("edge", {FRAMES}),
        ("router", {ROUTE, DIGESTS, WAIT}),
        ("shadow", set()),
        ("worker", {*ENGINE.values(), RESYNC, CONTROL}),
        ("operator", set()),
        ("admin", set()),
        ("console", {DIGESTS}),
        ("tracer", set()),
        ("picker", set()),
        ("observer", set()),
    ],
)
def test_each_kind_hears_what_is_meant_for_it(kind: Kind, own: set[str]) -> None:
    """Prompts go to workers and tokens to edges: nobody else may listen."""
    right = rights(NS, kind)
    asked = {FRAMES, ROUTE, WAIT, DIGESTS, *ENGINE.values(), RESYNC, CONTROL, *EVENTS.values(), REQUEST}
    assert {subject for subject in asked if may_subscribe(right, subject)} == own


@pytest.mark.parametrize("kind", ["edge", "router", "shadow", "worker", "tracer", "picker"])
def test_actors_answer_service_discovery(kind: Kind) -> None:
    """As the stock tool asks."""
    right = rights(NS, kind)
    for verb in ("PING", "INFO", "STATS"):
        for scope in ((), (f"headwater-{kind}",), (f"headwater-{kind}", "me")):
            assert may_subscribe(right, subjects.service(verb, *scope))


@pytest.mark.parametrize("kind", ["edge", "picker"])
def test_routers_answer_who_may_ask_them(kind: Kind) -> None:
    """A query without a reply is a time-out, however well the router decides."""
    assert may_publish(rights(NS, kind), ROUTE)
    assert may_publish(rights(NS, "router"), subjects.inbox(NS, kind, "me", "bus") + ".id")


def test_a_named_actor_is_itself_only() -> None:
    """A stolen key of one worker is not a key of all."""
    right = rights(NS, "worker", name="me", pools=("p",))
    assert may_publish(right, EVENTS["kv"])
    assert may_publish(right, lease("worker"))
    assert may_subscribe(right, subjects.engine(NS, "me", 3, "generate"))
    assert not may_publish(right, subjects.pool_subject(NS, "p", "kv", "you"))
    assert not may_publish(right, subjects.pool_subject(NS, "q", "kv", "me"))
    assert not may_publish(right, lease("worker").replace("me", "you"))
    assert not may_subscribe(right, subjects.engine(NS, "you", 3, "generate"))
    assert not may_subscribe(right, subjects.inbox(NS, "worker", "you", "bus") + ".id")


@pytest.mark.parametrize("kind", KINDS)
def test_only_an_operator_probes_logs_and_not_in_an_actors_name(kind: Kind) -> None:
    """A named actor has no right over the probe's subjects, and an operator none over any actor's."""
    right = rights(NS, kind, name="me", pools=("p",))
    assert {subject for subject in PROBES if may_publish(right, subject)} == (
        PROBES if kind == "operator" else set()
    )
    if kind == "operator":
        assert not may_publish(right, subjects.pool_subject(NS, "p", "kv", PROBE))
        assert not may_publish(right, subjects.pool_subject(NS, "p", "load", "probe"))
        assert not may_publish(right, subjects.request_subject(NS, "probe"))


@pytest.mark.parametrize("kind", KINDS)
def test_namespaces_are_apart(kind: Kind) -> None:
    """With their pools named, users of one namespace reach nothing of another."""
    right = rights(NS, kind, pools=("p",))
    if kind == "operator":
        # Streams are the server's, and so is their operator.
        right = right._replace(publish=tuple(one for one in right.publish if one != "$JS.API.>"))
    for subject in EVERYTHING - {"$SRV.PING"}:
        assert not may_publish(right, subject.replace(f".{NS}.", ".other.").replace(f"_{NS}_", "_other_"))


@pytest.mark.parametrize("bad", ["a.b", "*", ">", "a b", ""])
def test_names_can_not_widen_a_right(bad: str) -> None:
    """They become tokens of patterns."""
    with pytest.raises(InvalidName):
        rights(bad, "worker")
    with pytest.raises(InvalidName):
        rights(NS, "worker", pools=(bad,))
    if bad:
        with pytest.raises(InvalidName):
            rights(NS, "worker", name=bad)


def test_every_kind_says_what_it_does() -> None:
    """The command's help shows it."""
    assert set(DUTIES) == set(KINDS)
