"""What is in logs already: hashes, roots, seeds and bytes that no later release may change.

A failure here means that a running fleet's log could not be read, or its blocks not be found, after an upgrade.
The remedy is a new tag or a new schema version, never a new number in this file.
"""

import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

import tests
from headwater.events.ports import Record
from headwater.router.decide import seed_of
from headwater.router.replay import Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.encoding import (
    SCHEMA_VERSION,
    Batch,
    UnreadableBatch,
    decode_batch,
    encode_batch,
    reader_of,
)
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EnginesWeighted,
    Event,
    KvGap,
    LoadReported,
    MediaPlace,
    RequestAccepted,
    RequestCheckpoint,
    RequestEncoded,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestsHeld,
    RequestsOpen,
    RequestStarted,
    RequestStepped,
    Rollout,
    TrafficSplit,
    UnknownEvent,
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.hashing import chain_plain, seed, sequence_hashes
from headwater.schemas.routing import (
    Candidate,
    Constraints,
    Decision,
    DecisionVoided,
    Preferences,
    Shadowed,
    Weights,
)
from tests.support.data.constrained_log import constrained_log
from tests.support.data.examples import EVENT_TYPES, packed

HASHES: list[tuple[list[int], int, int, list[int]]] = [
    (list(range(40)), 16, 0, [0xAF1C7F0ED0F94D67, 0x264B025C8101C371]),
    (list(range(40)), 13, 0, [0x3E7DA07EB6A3BCB8, 0x0061AD76B9BA7B2E, 0x6F5217BCE69ECD18]),
    ([0xFFFFFFFF] * 8, 4, 0, [0x341C3ED19DD5632A, 0x86559CDBFD2F9179]),
    (list(range(40)), 16, 0x7701B2B8DB1E9E50, [0x26F1AF769F934831, 0x5881EE70584088A4]),
    ([5, 5, 5], 1, 0, [0x7928037755839F4A, 0x265B2986DB1739D9, 0xC6D59E2BA76EC2FD]),
]

GOLDEN = Path(tests.__path__[0]) / "golden"
EVENTS: tuple[Event, ...] = (
    BlocksStored(7, packed(8, 9), 1, 2),
    BlocksRemoved(packed(8), 1, 2),
    BlocksCleared(2),
    KvGap(3, 2),
    LoadReported(1, 2, 3, 4, ("a",), ("b",), ("c",)),
    RequestsHeld(("a", "b")),
    Decision(
        number=5,
        position=40,
        seen=3,
        wall_ns=1_800_000_000_000_000_001,
        request="r-0-1",
        prompt_tokens=100,
        max_tokens=20,
        blocks=6,
        deepest=11,
        following=12,
        last=13,
        constraints=Constraints(pinned="w1", exclude=("w2.3",)),
        preferences=Preferences("kv", 0.0),
        weights=Weights(1.0, 0.5, 0.25),
        seed=99,
        worker="w1",
        epoch=4,
        candidates=(Candidate("w1", 4, 2, 1, 30, 40, 5, 61.5),),
        degraded=True,
    ),
    DecisionVoided("r-0-1", "w1", 4),
    Shadowed("r-0-1", "round_robin", "w2", "w1", "kv", 20.0, 12.5, 12.5),
    WorkerJoined("w1", 4, "m", "sim", "both", 16, 1000, 256),
    WorkerChanged("w1", 4, "paused", "decode", ("adapter",)),
    WorkerControlled("w1", 4, "sleep", b'{"level":1}', "someone", 200, "asleep"),
    WorkerDraining("w1", 4),
    WorkerLeft("w1", 4, "stopped"),
    EnginesWeighted({"vllm": 0.95, "sglang": 0.05}, "someone"),
    TrafficSplit(
        *("revision", {"r1": 95.0, "r2": 5.0}, 40, "someone", "why"),
        Rollout("a1", "r2", (5.0, 100.0), 0, 600.0, (("errors", 1.0),), 50, {"r1": 1.0}),
    ),
    RequestAccepted(
        *("r", "m", "chat", 10, 20, True),
        media=(MediaPlace("image", "0a" * 16, 3, 56),),
        trace="t",
        tenant=7,
        priority=2,
        span="s",
        sampled=True,
        trace_state="a=1",
        began_ns=1_800_000_000_000_000_000,
        prepare_ms=2.5,
        media_ms=1.5,
    ),
    RequestRouted("r", 1, "r-1-1", "w1", 4, 5, after_ms=3.5),
    RequestStarted("r", 1, "w1", 4, 16, 12.5),
    RequestCheckpoint("r", 1, 64, b"\1\0\0\0"),
    RequestStepped("r", 1, "prefill", "lost", "routing", "w1", 4, "it is gone", "h", 3.5),
    RequestEncoded("r", 1, "r-1-1", "0a" * 16, 56, "cached", "w1", 4, 12.5, "why", after_ms=3.5),
    RequestPrefilled("r", 1, "w1", 4, "h", 12.5, 30_000, 3.5),
    RequestEnded("r", "stop", 8, 4, 1, 12.5, 99.0, "x"),
    RequestsOpen(-1),
)
PINNED: dict[str, str] = json.loads((GOLDEN / "events.json").read_text())
"""The message of each event, in hexadecimal."""
UNTIMED: dict[str, str] = json.loads((GOLDEN / "untimed_events.json").read_text())
"""Those of events that had no times yet."""
LOG = GOLDEN / "pool.log.gz"
STATE, BLOCKS = "607830282e22bc80756edb140cc5b98d", 6231050919034565070
"""Digests of the state and of the index to which that log folds."""


@pytest.mark.parametrize(("tokens", "size", "parent", "names"), HASHES)
def test_blocks_are_named_as_they_always_were(
    tokens: list[int], size: int, parent: int, names: list[int]
) -> None:
    """Both implementations give the numbers that are in logs."""
    assert sequence_hashes(np.array(tokens, np.uint32), size, parent=parent).tolist() == names
    assert chain_plain(tokens, size, parent) == names


def test_multimodal_items_enter_the_hash_as_they_always_did() -> None:
    """One item in one block; the block before it keeps its name."""
    tokens = np.arange(40, dtype=np.uint32)
    names = sequence_hashes(tokens, 16, multimodal=[(1, 0x1234567890ABCDEF)]).tolist()
    assert names == [0xAF1C7F0ED0F94D67, 0xC0980E7A31600AF3]


def test_roots_and_seeds_are_what_they_always_were() -> None:
    """Roots by LoRA name and salt, and the tie-break by request id."""
    assert seed("adapter", "tenant") == 0x7701B2B8DB1E9E50
    assert seed("adapter") == 0x752A7ACF40679D21
    assert seed("", "tenant") == 0x8C6ACF02E741C003
    assert seed_of("chatcmpl-1-0-1") == 0x2FEBC631F93AAF06


def written_now(event: Event) -> bytes:
    """The message that today's writers make of an event."""
    return encode_batch(
        Batch(
            SCHEMA_VERSION, "w1", 4, 7, 1_800_000_000_000_000_000, (event,), trace="t", previous=b"12345678"
        )
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda value: type(value).__name__)
def test_events_are_written_and_read_as_they_always_were(event: Event) -> None:
    """Today's writers write these bytes, and they decode to these values."""
    data = PINNED[type(event).__name__]
    assert written_now(event).hex() == data
    [read] = decode_batch(bytes.fromhex(data)).events
    assert read == event


def test_every_event_type_is_pinned() -> None:
    """Whoever adds an event type pins its bytes here."""
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES)


@pytest.mark.parametrize(("kind", "data"), UNTIMED.items())
def test_events_from_before_they_had_times_are_read(kind: str, data: str) -> None:
    """As those whose times are not known."""
    [read] = decode_batch(bytes.fromhex(data)).events
    assert type(read).__name__ == kind
    unknown = {"began_ns": 0, "prepare_ms": 0.0, "media_ms": 0.0, "after_ms": 0.0}
    assert {name: getattr(read, name) for name in unknown if hasattr(read, name)} in (
        {"began_ns": 0, "prepare_ms": 0.0, "media_ms": 0.0},
        {"after_ms": 0.0},
    )


def test_a_request_accepted_before_its_tenant_was_recorded_is_read() -> None:
    """As one without."""
    data = (
        "9a01a277310407cf18fae27693b40000919cac7265712e6163636570746564a172a16da4636861740a14c301a36f6666c4009194a5696d616765d920"
        "30613061306130613061306130613061306130613061306130613061306130610338a174a9686561647761746572a174c4083132333435363738c4083c6fd32aec1fd978"
    )
    [read] = decode_batch(bytes.fromhex(data)).events
    assert isinstance(read, RequestAccepted)
    assert (read.trace, read.tenant, read.priority) == ("t", 0, 0)


class _GapV0(Event, frozen=True, tag="kv.gap.0"):
    """A retired event: it said only that there is a gap."""

    lost: bool


class _GapV1(Event, frozen=True, tag="kv.gap.1"):
    """Another one, which replaced that."""

    seen: int


def test_a_retired_event_is_read_as_its_replacement() -> None:
    """Version by version; what is current is read as before."""
    read = reader_of({_GapV0: lambda old: _GapV1(3 if old.lost else 0), _GapV1: lambda old: KvGap(old.seen)})
    events = (_GapV0(True), KvGap(1), _GapV1(7))
    data = encode_batch(Batch(SCHEMA_VERSION, "w1", 4, 7, 0, events))
    assert read(data).events == (KvGap(3), KvGap(1), KvGap(7))


def test_events_of_a_later_release_are_known_as_such() -> None:
    """Those that this release does not have: the others of their message are read. What is no event is unreadable."""
    events = (_GapV0(True), KvGap(1), _GapV1(7))
    data = encode_batch(Batch(SCHEMA_VERSION, "w1", 4, 7, 0, events))
    wanted: tuple[Event, ...] = (UnknownEvent("kv.gap.0"), KvGap(1), UnknownEvent("kv.gap.1"))
    found: tuple[Event, ...] = decode_batch(data).events
    assert found == wanted
    state = RouterState()
    assert state.apply(Record(1, "hw.t.pool.p.kv.w1", 0, decode_batch(data))) is None
    assert state.position == 1

    class Odd(msgspec.Struct, array_like=True):
        number: int

    damaged = encode_batch(Batch(SCHEMA_VERSION, "w1", 4, 7, 0, (Odd(3), KvGap(1))))
    with pytest.raises(UnreadableBatch, match="not a batch of events"):
        decode_batch(damaged)


def test_fields_of_a_later_release_are_ignored() -> None:
    """They are appended: what this release has is read."""
    later = msgspec.defstruct(
        "KvGap", [("seen", int), ("rank", int), ("cause", str)], bases=(Event,), tag="kv.gap", frozen=True
    )
    data = encode_batch(Batch(SCHEMA_VERSION, "w1", 4, 7, 0, (later(3, 2, "why"),)))
    assert decode_batch(data).events == (KvGap(3, 2),)


def records() -> list[Record]:
    """The golden log."""
    log = msgspec.msgpack.decode(gzip.decompress(LOG.read_bytes()))
    return [
        Record(position, subject, stored_ns, decode_batch(data)) for position, subject, stored_ns, data in log
    ]


def test_a_log_folds_to_the_state_it_always_did() -> None:
    """A recorded log decodes and folds to the digest that was noted when it was written."""
    state = RouterState()
    for record in records():
        assert state.apply(record) is None
    assert (state.digest(), state.index.digest()) == (STATE, BLOCKS)


def test_decisions_are_recomputed() -> None:
    """All policies and constraints: the recorded decision comes out again, bit for bit."""
    found = records()
    decisions = [
        Recorded((one.batch.writer, one.batch.epoch), event, one.stored_ns)
        for one in found
        for event in one.batch.events
        if isinstance(event, Decision)
    ]
    replay = Replay(RouterState(), decisions)
    assert replay.start() is None
    assert all(replay.step(one) is None for one in found)
    assert (replay.unverifiable, dict(replay.other_algorithms)) == (0, {})
    assert replay.verified == len(decisions) > 90
    learned = [one for one in decisions if one.decision.tenant and one.decision.output_deviation]
    assert len(learned) > 30


def test_a_log_with_constraints_is_written_as_it_always_was() -> None:
    """Today's writers append the same events; only the version of the algorithm is another one."""
    written = [
        msgspec.structs.replace(event, algorithm=1) if isinstance(event, Decision) else event
        for *_, data in constrained_log(9, 240)
        for event in decode_batch(data).events
    ]
    assert written == [event for one in records() for event in one.batch.events]


if __name__ == "__main__":
    # Until a release, whoever changes the form of an event records these again; after that they never change.
    pinned = {type(event).__name__: written_now(event).hex() for event in EVENTS}
    (GOLDEN / "events.json").write_text(json.dumps(pinned, indent=0, sort_keys=True) + "\n")
