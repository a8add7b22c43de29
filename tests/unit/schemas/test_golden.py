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
from headwater.events.log import Record
from headwater.router.decision.decide import seed_of
from headwater.router.fold.state import RouterState
from headwater.router.replay import Recorded, Replay
from headwater.schemas.constraints import Constraints, Preferences
from headwater.schemas.encoding.codec import decode_batch, encode_batch
from headwater.schemas.encoding.envelope import Batch
from headwater.schemas.events.event import Event
from headwater.schemas.events.fleet import (
    EnginesWeighted,
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.events.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.events.load import LoadReported, RequestsHeld
from headwater.schemas.events.request import (
    RequestAccepted,
    RequestCheckpoint,
    RequestEncoded,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestsOpen,
    RequestStarted,
    RequestStepped,
)
from headwater.schemas.events.route import Candidate, Decision, DecisionVoided, Shadowed, Weights
from headwater.schemas.hashing import chain_plain, seed, sequence_hashes
from tests.support.data.constrained_log import constrained_log
from tests.support.data.examples import EVENT_TYPES, batch, packed

HASHES: list[tuple[list[int], int, int, list[int]]] = [
    (list(range(40)), 16, 0, [0xAF1C7F0ED0F94D67, 0x264B025C8101C371]),
    (list(range(40)), 13, 0, [0x3E7DA07EB6A3BCB8, 0x0061AD76B9BA7B2E, 0x6F5217BCE69ECD18]),
    ([0xFFFFFFFF] * 8, 4, 0, [0x341C3ED19DD5632A, 0x86559CDBFD2F9179]),
    (list(range(40)), 16, 0x7701B2B8DB1E9E50, [0x26F1AF769F934831, 0x5881EE70584088A4]),
    ([5, 5, 5], 1, 0, [0x7928037755839F4A, 0x265B2986DB1739D9, 0xC6D59E2BA76EC2FD]),
]

GOLDEN = Path(tests.__path__[0]) / "golden"
# The state's digest moves with what a worker is known by; the index's never does.
LOGS = [
    ("pool-v1.log.gz", "e6fd334957977fbacc430419f566cbcd", 18429677081767367044),
    ("pool-v2.log.gz", "5b8778f95f7119f40c130765c09b8cdb", 11143978192293227892),
    ("pool-v2-decided.log.gz", "32a51c6bf624cbea1d2fa0ed7bb0e14a", 8743994246817469863),
    ("pool-v2-constraints.log.gz", "32a51c6bf624cbea1d2fa0ed7bb0e14a", 8743994246817469863),
    ("pool-v2-summary.log.gz", "32a51c6bf624cbea1d2fa0ed7bb0e14a", 8743994246817469863),
    ("pool-v2-pace.log.gz", "8253ff1d76e04d8a69756ae3a6a477f7", 7615386877702289470),
    ("pool-v2-decode.log.gz", "edbe8cd274bac96365096c1e9ed804f1", 7615386877702289470),
    ("pool-v2-arrivals.log.gz", "3d490db4434d2d7293cf30d806c7d85f", 9657791578513287112),
    ("pool-v2-pulls.log.gz", "12d0fd45e9a8b2db553ecd9ee33490e0", 9657791578513287112),
    ("pool-v2-queued.log.gz", "092d35e212327e864e87bcf7b0527477", 7970150887956441526),
    ("pool-v2-late.log.gz", "ce06b20defd30bbfacc508917083091c", 7970150887956441526),
    ("pool-v2-lengths.log.gz", "2c397356ecd577e69811f83b27c47b7c", 7970150887956441526),
    ("pool-v2-encoders.log.gz", "2c397356ecd577e69811f83b27c47b7c", 7970150887956441526),
    ("pool-v2-spare.log.gz", "2c397356ecd577e69811f83b27c47b7c", 7970150887956441526),
]
# One fleet's log, as written with decisions of the first form, of the second (constraints as one struct), with a digest of the costs, with step times of
# engines, with estimates of decoding, with a weight for requests that come later, with prefixes that are pulled, with a weight for prompts that are
# queued, with late load reports, with tenants and prompts of answers, with step times of encode workers apart, and with spare capacity.
ALGORITHM_1 = ["pool-v2-decided.log.gz", "pool-v2-constraints.log.gz", "pool-v2-summary.log.gz"]
ALGORITHM_2 = "pool-v2-pace.log.gz"
ALGORITHM_3 = "pool-v2-decode.log.gz"
ALGORITHM_4 = "pool-v2-arrivals.log.gz"
ALGORITHM_5 = "pool-v2-pulls.log.gz"
ALGORITHM_6 = "pool-v2-queued.log.gz"
ALGORITHM_7 = "pool-v2-late.log.gz"
ALGORITHM_8 = "pool-v2-lengths.log.gz"
ALGORITHM_9 = "pool-v2-encoders.log.gz"
ALGORITHM_10 = "pool-v2-spare.log.gz"

HEAD = "9601a277310407cf18fae27693b4000091"
WRITTEN: list[tuple[Event, str]] = [
    (
        BlocksStored(7, packed(8, 9), 1, 2),
        "95a96b762e73746f72656407c410080000000000000009000000000000000102",
    ),
    (BlocksRemoved(packed(8), 1, 2), "94aa6b762e72656d6f766564c40808000000000000000102"),
    (BlocksCleared(2), "92aa6b762e636c656172656402"),
    (KvGap(3, 2), "93a66b762e6761700302"),
    (
        LoadReported(1, 2, 3, 4, ("a",), ("b",), ("c",)),
        "98ad6c6f61642e7265706f727465640102030491a16191a16291a163",
    ),
    (
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
        "dc0015ad726f7574652e64656369646564052803cf18fae27693b40001a5722d302d316414060b0c0da2773191a477322e33"
        "a26b7693cb3ff0000000000000cb3fe0000000000000cb3fd000000000000063a27731049198a277310402011e2805cb404e"
        "c00000000000c3",
    ),
    (
        WorkerJoined("w1", 4, "m", "sim", "both", 16, 1000, 256),
        "99ac666c6565742e6a6f696e6564a2773104a16da373696da4626f746810cd03e8cd0100",
    ),
    (WorkerDraining("w1", 4), "93ae666c6565742e647261696e696e67a2773104"),
    (WorkerLeft("w1", 4, "stopped"), "94aa666c6565742e6c656674a2773104a773746f70706564"),
    (
        RequestAccepted("r", "m", "chat", 10, 20, True),
        "97ac7265712e6163636570746564a172a16da4636861740a14c3",
    ),
    (RequestRouted("r", 0, "", "w1", 4, 5), "96aa7265712e726f75746564a172a27731042805"),
    (
        RequestEnded("r", "stop", 8, 4, 1, 12.5, 99.0, "x"),
        "99a97265712e656e646564a172a473746f70080401cb4029000000000000cb4058c00000000000a178",
    ),
]

EVENTS_2: tuple[Event, ...] = (
    *(event for event, _ in WRITTEN if not isinstance(event, RequestRouted)),
    RequestsHeld(("a", "b")),
    RequestRouted("r", 1, "r-1-1", "w1", 4, 5),
    RequestStarted("r", 1, "w1", 4, 16, 12.5),
    RequestCheckpoint("r", 1, 64, b"\1\0\0\0"),
    RequestsOpen(-1),
    DecisionVoided("r-0-1", "w1", 4),
)
EVENTS_NOW: tuple[Event, ...] = (
    *EVENTS_2,
    WorkerChanged("w1", 4, "paused", "decode", ("adapter",)),
    WorkerControlled("w1", 4, "sleep", b'{"level":1}', "someone", 200, "asleep"),
    RequestPrefilled("r", 1, "w1", 4, "h", 12.5),
    Shadowed("r-0-1", "round_robin", "w2", "w1", "kv", 20.0, 12.5, 12.5),
    RequestStepped("r", 1, "prefill", "lost", "routing", "w1", 4, "it is gone", "h"),
    EnginesWeighted({"vllm": 0.95, "sglang": 0.05}, "someone"),
    RequestEncoded("r", 1, "r-1-1", "0a" * 16, 56, "cached", "w1", 4, 12.5, "why"),
)
PINNED_2: dict[str, str] = json.loads((GOLDEN / "events-v2.json").read_text())
"""As release 0.1 wrote them."""
PINNED_APPENDED: dict[str, str] = json.loads((GOLDEN / "events-v2-appended.json").read_text())
"""With the fields that were appended since."""
PINNED_CONSTRAINTS: dict[str, str] = json.loads((GOLDEN / "events-v2-constraints.json").read_text())
"""With decisions that carry their constraints and preferences as structs."""
PINNED_ENGINES: dict[str, str] = json.loads((GOLDEN / "events-v2-engines.json").read_text())
"""With engine weights, and with the tokenizers of workers."""
PINNED_NOW = {
    **PINNED_APPENDED,
    **PINNED_CONSTRAINTS,
    **PINNED_ENGINES,
    **json.loads((GOLDEN / "events-v2-decode.json").read_text()),
    **json.loads((GOLDEN / "events-v2-images.json").read_text()),
    **json.loads((GOLDEN / "events-v2-pulls.json").read_text()),
    **json.loads((GOLDEN / "events-v2-media.json").read_text()),
    **json.loads((GOLDEN / "events-v2-encoding.json").read_text()),
    **json.loads((GOLDEN / "events-v2-lengths.json").read_text()),
    **json.loads((GOLDEN / "events-v2-processors.json").read_text()),
    **json.loads((GOLDEN / "events-v2-spare.json").read_text()),
    **json.loads((GOLDEN / "events-v2-trace.json").read_text()),
}
"""All fields of today."""
PINNED_MEDIA = json.loads((GOLDEN / "events-v2-media.json").read_text())
"""Without the trace ids of requests."""
PINNED_ENCODING = json.loads((GOLDEN / "events-v2-encoding.json").read_text())
PINNED_LENGTHS = json.loads((GOLDEN / "events-v2-lengths.json").read_text())
PINNED_PULLS = json.loads((GOLDEN / "events-v2-pulls.json").read_text())
"""With decisions that name a prefix to pull, and no weight for queued prompts."""
PINNED_QUEUED = json.loads((GOLDEN / "events-v2-queued.json").read_text())
"""With decisions that weigh queued prompts, and no times of images."""
PINNED_IMAGES = json.loads((GOLDEN / "events-v2-images.json").read_text())
"""With the images of requests, and no other media."""
PINNED_ARRIVALS = json.loads((GOLDEN / "events-v2-arrivals.json").read_text())
"""With decisions that weigh requests that come later."""
PINNED_DECODE = json.loads((GOLDEN / "events-v2-decode.json").read_text())
PINNED_ENCODED = json.loads((GOLDEN / "events-v2-encoded.json").read_text())
"""With images that were encoded, without the bound by which that was preferred."""
THEN = Weights(1.0, 0.5, 0.25, crowding=0.25, retain=1.5, tail=2.0)
"""The weights of the pinned decision, as its releases wrote them: the defaults that followed were others than today's."""
PINNED_LIMITS = json.loads((GOLDEN / "events-v2-limits.json").read_text())
"""With decisions that keep a few candidates and a digest of the costs of all, a weight for long queues, and limits of latency."""
PINNED_PACE = json.loads((GOLDEN / "events-v2-pace.json").read_text())
PINNED_SUMMARY = json.loads((GOLDEN / "events-v2-summary.json").read_text())
EARLIER = {
    "appended": PINNED_APPENDED,
    "constraints": PINNED_CONSTRAINTS,
    "engines": PINNED_ENGINES,
    "summary": PINNED_SUMMARY,
    "pace": PINNED_PACE,
    "limits": PINNED_LIMITS,
    "decode": PINNED_DECODE,
    "encoded": PINNED_ENCODED,
    "arrivals": PINNED_ARRIVALS,
    "images": PINNED_IMAGES,
    "pulls": PINNED_PULLS,
    "queued": PINNED_QUEUED,
    "encoding": PINNED_ENCODING,
    "lengths": PINNED_LENGTHS,
    "media": PINNED_MEDIA,
}


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
        Batch(2, "w1", 4, 7, 1_800_000_000_000_000_000, (event,), trace="t", previous=b"12345678")
    )


@pytest.mark.parametrize(("event", "data"), WRITTEN, ids=lambda value: type(value).__name__)
def test_events_of_version_1_are_read_as_they_were_meant(event: Event, data: str) -> None:
    """These bytes lie in logs: they decode to these values, and retired events to what replaced them."""
    read = decode_batch(bytes.fromhex(HEAD + data))
    assert read == batch(event, seq=7, epoch=4, version=1)


@pytest.mark.parametrize("event", EVENTS_2, ids=lambda value: type(value).__name__)
def test_events_of_version_2_are_read_as_they_were_meant(event: Event) -> None:
    """Bytes from before fields were appended: those have their defaults."""
    [read] = decode_batch(bytes.fromhex(PINNED_2[type(event).__name__])).events
    assert read == event


def meant_then(event: Event) -> Event:
    """The event with the weights of earlier releases. What a form lacks of them has today's defaults."""
    if not isinstance(event, Decision):
        return event
    assert event.weights.crowding in (0.25, 0.05, Weights().crowding)
    return msgspec.structs.replace(event, weights=THEN)


def test_decisions_of_the_first_form_are_read_as_they_were_meant() -> None:
    """The retired tag: its fields become constraints and preferences."""
    [read] = decode_batch(bytes.fromhex(PINNED_APPENDED["Decision"])).events
    assert meant_then(read) == meant_then(next(event for event in EVENTS_NOW if isinstance(event, Decision)))


@pytest.mark.parametrize(
    "pinned",
    EARLIER.values(),
    ids=EARLIER,
)
def test_events_of_earlier_forms_are_read_as_they_were_meant(pinned: dict[str, str]) -> None:
    """Bytes from before workers had tokenizers, and decisions had draws, digests, a weight for long queues, limits of latency or estimates of
    decoding, and requests images."""
    for event in EVENTS_NOW:
        if type(event).__name__ in pinned:
            [read] = decode_batch(bytes.fromhex(pinned[type(event).__name__])).events
            assert meant_then(read) == meant_then(event)


@pytest.mark.parametrize("event", EVENTS_NOW, ids=lambda value: type(value).__name__)
def test_events_are_written_and_read_as_they_always_were(event: Event) -> None:
    """Today's writers write these bytes, and they decode to these values."""
    data = PINNED_NOW[type(event).__name__]
    assert written_now(event).hex() == data
    [read] = decode_batch(bytes.fromhex(data)).events
    assert read == event


def test_the_weights_of_a_decision_are_read_as_they_were_written() -> None:
    """Not as today's defaults; a weight that is younger than the record has its default."""
    [read] = decode_batch(bytes.fromhex(PINNED_DECODE["Decision"])).events
    assert isinstance(read, Decision)
    assert read.weights == THEN


def test_every_event_type_is_pinned() -> None:
    """Whoever adds an event type pins its bytes here."""
    assert {type(event) for event in EVENTS_NOW} == set(EVENT_TYPES)


@pytest.mark.parametrize(("name", "digest", "blocks"), LOGS)
def test_logs_of_every_release_fold_to_the_state_they_always_did(name: str, digest: str, blocks: int) -> None:
    """A recorded log decodes, is brought up to date and folds to the digest that was noted when it was written."""
    log = msgspec.msgpack.decode(gzip.decompress((GOLDEN / name).read_bytes()))
    state = RouterState()
    for position, subject, stored_ns, data in log:
        assert state.apply(Record(position, subject, stored_ns, decode_batch(data))) is None
    assert (state.digest(), state.index.digest()) == (digest, blocks)


def decisions_of(name: str) -> list[Decision]:
    """All decisions of a golden log."""
    log = msgspec.msgpack.decode(gzip.decompress((GOLDEN / name).read_bytes()))
    events = [event for *_, data in log for event in decode_batch(data).events]
    return [event for event in events if isinstance(event, Decision)]


def replayed(name: str) -> tuple[int, dict[int, int]]:
    """How many decisions of a golden log come out again, and how many were made by each other version of the algorithm."""
    log = msgspec.msgpack.decode(gzip.decompress((GOLDEN / name).read_bytes()))
    records = [
        Record(position, subject, stored_ns, decode_batch(data)) for position, subject, stored_ns, data in log
    ]
    decisions = [
        Recorded((one.batch.writer, one.batch.epoch), event, one.stored_ns)
        for one in records
        for event in one.batch.events
        if isinstance(event, Decision)
    ]
    replay = Replay(RouterState(), decisions)
    assert replay.start() is None
    assert all(replay.step(one) is None for one in records)
    assert replay.unverifiable == 0
    return replay.verified, dict(replay.other_algorithms)


def test_decisions_are_recomputed() -> None:
    """All policies and constraints: the recorded decision comes out again, bit for bit."""
    assert replayed(ALGORITHM_10) == (104, {})
    assert any(one.pull for one in decisions_of(ALGORITHM_10))
    assert sum(one.tenant > 0 and one.output_deviation > 0 for one in decisions_of(ALGORITHM_10)) > 30


def test_estimates_of_decoding_change_no_choice() -> None:
    """The same fleet and requests: version 3 chose what version 2 chose, version 8 what version 7 did, and so did version 9 without encode workers, and version 10 with few workers, at the same costs."""
    before, now = decisions_of(ALGORITHM_2), decisions_of(ALGORITHM_3)
    for names in (
        (ALGORITHM_2, ALGORITHM_3),
        (ALGORITHM_7, ALGORITHM_8),
        (ALGORITHM_8, ALGORITHM_9),
        (ALGORITHM_9, ALGORITHM_10),
    ):
        one, other = ([(made.worker, made.leg, made.digest) for made in decisions_of(name)] for name in names)
        assert one == other
    assert {one.algorithm for one in now} == {3}
    assert sum(one.chosen.itl_ms > 0 for one in now) > len(now) // 2
    assert not any(candidate.itl_ms or one.output_tokens for one in before for candidate in one.candidates)


@pytest.mark.parametrize(
    ("name", "version", "count"),
    [
        *((name, 1, 104) for name in ALGORITHM_1),
        (ALGORITHM_2, 2, 99),
        (ALGORITHM_3, 3, 99),
        (ALGORITHM_4, 4, 104),
        (ALGORITHM_5, 5, 104),
        (ALGORITHM_6, 6, 104),
        (ALGORITHM_7, 7, 104),
        (ALGORITHM_8, 8, 104),
        (ALGORITHM_9, 9, 104),
    ],
)
def test_decisions_of_an_earlier_algorithm_are_not_called_wrong(name: str, version: int, count: int) -> None:
    """They fold, and are reported as decisions that this release cannot make again."""
    assert replayed(name) == (0, {version: count})


def test_a_log_with_constraints_tells_what_it_always_did() -> None:
    """Today's writers append the same events; their bytes may have fields more."""
    log = msgspec.msgpack.decode(gzip.decompress((GOLDEN / ALGORITHM_10).read_bytes()))
    written = [event for *_, data in constrained_log(9, 240) for event in decode_batch(data).events]
    assert written == [event for *_, data in log for event in decode_batch(data).events]
