"""Chains: whatever is taken out of a log, put elsewhere in it, repeated or altered, the fold tells where and whose."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.events.chain import Break, Chains, Head
from headwater.events.ports import Record
from headwater.router.replay import Replay
from headwater.router.state import RouterState
from headwater.schemas.encoding import (
    DIGEST_BYTES,
    NO_DIGEST,
    SCHEMA_VERSION,
    Batch,
    UnreadableBatch,
    decode_batch,
    seal,
)
from headwater.schemas.events import BlocksStored, KvGap
from tests.support.data.examples import joined, packed
from tests.support.worlds.chained_log import Folded, Teller, Told, a_log, read, subject

draws = st.randoms(use_true_random=False)
turns = st.integers(0, 40)


def numbers(draw: Any) -> Callable[[int], int]:
    """A source of numbers from 0 to n."""
    return lambda most: draw.randint(0, most)


def pick(draw: Any, told: list[Told]) -> int:
    """Index of some message."""
    index: int = draw.randrange(len(told))
    return index


def next_of(told: list[Told], name: str, start: int) -> int | None:
    """Index of the first message of a subject from `start` on."""
    return next((at for at in range(start, len(told)) if told[at].subject == name), None)


def digest(state: RouterState) -> str:
    """Of what was folded, wherever it stood."""
    state.position = 0
    return state.digest()


@given(draws, turns)
def test_an_untouched_log_has_no_break(draw: Any, count: int) -> None:
    """Over several workers, lives and subjects."""
    folded = Folded().over(read(a_log(numbers(draw), count)))
    assert (folded.breaks, folded.unreadable, folded.state.cold) == ([], [], set())


@given(draws, turns)
def test_a_missing_message_is_told_once_at_the_next_of_its_subject(draw: Any, count: int) -> None:
    """With the writer concerned, who is cold from there until it begins anew. The last of a subject hides its end."""
    told = a_log(numbers(draw), count)
    gone = told.pop(pick(draw, told))
    folded = Folded().over(read(told))
    behind = [
        position for position, one in enumerate(told, 1) if one.batch.previous == gone.data[-DIGEST_BYTES:]
    ]
    assert [broken.position for broken in folded.breaks] == behind
    assert {broken.writer for broken in folded.breaks} <= {gone.batch.writer}


@given(draws, turns)
def test_swapped_messages_are_told_where_the_first_stands(draw: Any, count: int) -> None:
    """Two of one subject in each other's place; what comes too late is not folded."""
    told = a_log(numbers(draw), count)
    first = pick(draw, told)
    second = next_of(told, told[first].subject, first + 1)
    assume(second is not None)
    assert second is not None
    one_life = told[first].batch.epoch == told[second].batch.epoch
    told[first], told[second] = told[second], told[first]
    folded = Folded().over(read(told))
    assert folded.breaks[0].position == first + 1
    assert {broken.subject for broken in folded.breaks} == {told[first].subject}
    if one_life:
        assert len(folded.breaks) == 1
    else:
        assert [broken.position for broken in folded.breaks] == [first + 1, second + 1]
        assert "had started" in folded.breaks[1].reason


@given(draws, turns)
def test_a_repeated_message_is_folded_once(draw: Any, count: int) -> None:
    """Repeated in its own life: nothing changes and nobody is doubted. Behind a later life: it is told."""
    told = a_log(numbers(draw), count)
    untouched = digest(Folded().over(read(told)).state)
    first = pick(draw, told)
    at = draw.randint(first + 1, len(told))
    again = told[first]
    begun = max(one.batch.epoch for one in told[:at] if one.subject == again.subject)
    folded = Folded().over(read([*told[:at], again, *told[at:]]))
    if begun == again.batch.epoch:
        assert folded.breaks == []
        assert digest(folded.state) == untouched
    else:
        [broken] = folded.breaks
        assert broken.position == at + 1
        assert broken.reason == f"epoch {again.batch.epoch} wrote after epoch {begun} had started"


@given(draws, turns, st.integers(1, 255))
def test_an_altered_message_is_unreadable_and_its_writer_doubted(draw: Any, count: int, flip: int) -> None:
    """Any bit of any byte. The next of the subject is told as well: what stood before it can not be known."""
    told = a_log(numbers(draw), count)
    index = pick(draw, told)
    data = bytearray(told[index].data)
    data[draw.randrange(len(data))] ^= flip
    with pytest.raises(UnreadableBatch):
        decode_batch(bytes(data))
    told[index] = told[index]._replace(data=bytes(data))
    folded = Folded().over(read(told))
    following = next_of(told, told[index].subject, index + 1)
    assert folded.unreadable == [index + 1]
    assert [broken.position for broken in folded.breaks] == ([following + 1] if following else [])
    assert {broken.writer for broken in folded.breaks} <= {told[index].batch.writer}


@given(draws, turns)
def test_a_late_message_of_a_life_that_is_over_is_told_and_not_folded(draw: Any, count: int) -> None:
    """Sound in itself, behind the first message of the next life: what a zombie would write."""
    teller = Teller(numbers(draw))
    for _ in range(count + 1):
        teller.turn()
    writer = sorted(teller.epochs)[0]
    old = teller.epochs[writer]
    late = Teller(numbers(draw))
    late._heads = dict(teller._heads)
    late.tell("kv", writer, BlocksStored(0, packed(99)), epoch=old)
    [zombie] = late.told
    teller.begin(writer)
    behind = len(teller.told)
    rest = Teller(numbers(draw))
    rest._heads, rest.epochs, rest._lives = teller._heads, dict(teller.epochs), teller._lives
    for _ in range(draw.randint(0, 10)):
        rest.turn()
    told = [*teller.told, zombie, *rest.told]
    folded = Folded().over(read(told))
    [broken] = folded.breaks
    assert (broken.position, broken.writer) == (behind + 1, writer)
    assert broken.reason == f"epoch {old} wrote after epoch {teller.epochs[writer]} had started"
    clean = Folded().over(read([*teller.told, *rest.told]))
    folded.state.cold.clear()
    assert digest(folded.state) == digest(clean.state)


@given(draws, turns)
def test_a_fold_from_a_snapshot_finds_what_a_fold_from_the_start_finds(draw: Any, count: int) -> None:
    """The heads are in the snapshot: a message cut right behind it is missed, and so is any later one."""
    told = a_log(numbers(draw), count)
    at = draw.randint(1, len(told) - 1)
    cut = at if draw.random() < 0.5 else draw.randint(at, len(told) - 1)
    del told[cut]
    found = read(told)
    whole = Folded().over(found)
    head = Folded().over(found[:at])
    restored = RouterState.restore(head.state.snapshot())
    assert restored.chains.heads == head.state.chains.heads
    assert restored.chains.whole
    tail = Folded(restored).over(found[at:])
    assert [*head.breaks, *tail.breaks] == whole.breaks
    assert tail.state.digest() == whole.state.digest()


@given(draws, turns)
def test_a_replay_finds_the_same_breaks(draw: Any, count: int) -> None:
    """And stands in the same state."""
    told = a_log(numbers(draw), count)
    del told[pick(draw, told)]
    index = pick(draw, told)
    told[index] = told[index]._replace(data=told[index].data[:-1] + b"\0")
    found = read(told)
    folded = Folded().over(found)
    replay = Replay(RouterState(), [])
    for message in found:
        assert replay.step(message) is None
    assert replay.breaks == folded.breaks
    assert replay.state.digest() == folded.state.digest()


def test_a_log_whose_beginning_was_cut_is_no_break() -> None:
    """Retention took it: the first message of a subject that is seen is taken as it is, the next is held to it."""
    teller = Teller(lambda _: 0)
    teller.begin("w1")
    for block in (1, 2, 3):
        teller.tell("kv", "w1", BlocksStored(0, packed(block)))
    rest = read(teller.told[3:], first=4)
    assert Folded(RouterState(whole=False)).over(rest).breaks == []
    assert [one.position for one in Folded().over(rest).breaks] == [4], "of a whole log something is missing"
    assert [one.position for one in Folded(RouterState(whole=False)).over([rest[0], rest[2]]).breaks] == [6]


def test_a_worker_whose_joining_is_missing_is_cold() -> None:
    """Its present life is not in the fold, the one before still is: nothing may be given to that one's cache."""
    teller = Teller(lambda _: 0)
    teller.begin("w1")
    teller.begin("w1")
    [joining] = [one for one in teller.told if one.batch.epoch == 2 and "fleet" in one.subject]
    teller.told.remove(joining)
    folded = Folded().over(read(teller.told))
    assert folded.breaks == [], "no later message of the subject tells"
    assert folded.state.cold == {"w1"}
    teller.tell("fleet", "w1", joined("w1", 2))
    folded.over(read(teller.told[-1:], first=len(teller.told)))
    assert [one.position for one in folded.breaks] == [len(teller.told)]
    assert folded.state.loads.workers["w1"].epoch == 2


@pytest.mark.parametrize("version", [-1, 0])
def test_no_version_gets_round_the_digest(version: int) -> None:
    """There is none before 1."""
    teller = Teller(lambda _: 0)
    teller.begin("w1")
    sound: Batch[Any] = decode_batch(teller.told[0].data)
    forged = msgspec.structs.replace(sound, version=version)
    with pytest.raises(UnreadableBatch, match="altered"):
        decode_batch(msgspec.msgpack.encode(forged))


def test_chains_are_followed_by_subject() -> None:
    """A message under another writer's subject is out of place there."""
    teller = Teller(lambda _: 0)
    teller.begin("w1")
    teller.begin("w2")
    teller.tell("kv", "w1", BlocksStored(0, packed(1)))
    moved = [*teller.told[:-1], teller.told[-1]._replace(subject=subject("kv", "w2"))]
    chains = Chains()
    found = [chains.follow(record) for record in read(moved) if isinstance(record, Record)]
    assert [broken is not None for _, broken in found] == [False] * (len(found) - 1) + [True]
    assert NO_DIGEST not in {head.digest for head in chains.heads.values()}


def test_a_sound_message_in_another_ones_place_is_told_behind_it() -> None:
    """Of the same writer, life and number, with a digest of its own: the next one was not written behind it."""
    teller, other = Teller(lambda _: 0), Teller(lambda _: 0)
    for one, block in ((teller, 1), (other, 99)):
        one.begin("w1")
        one.tell("kv", "w1", BlocksStored(0, packed(block)))
    teller.tell("kv", "w1", BlocksStored(0, packed(2)))
    forged = [*teller.told[:3], other.told[3], teller.told[4]]
    [broken] = Folded().over(read(forged)).breaks
    assert (broken.position, broken.writer) == (5, "w1")
    assert broken.reason == "the message at position 4 is not the one it names as its predecessor"


FIRST = Head(7, "w1", 2, 3, b"a" * DIGEST_BYTES)
OTHER = b"b" * DIGEST_BYTES

BEHIND_ITS_HEAD = [
    ((2, 4, FIRST.digest), (True, "")),
    ((2, 5, OTHER), (True, "1 messages between position 7 and this one are missing")),
    ((2, 9, OTHER), (True, "5 messages between position 7 and this one are missing")),
    ((2, 4, OTHER), (True, "the message at position 7 is not the one it names as its predecessor")),
    ((2, 3, OTHER), (False, "it has the number of the message at position 7, and is another one")),
    ((2, 2, OTHER), (False, "")),
    ((1, 4, FIRST.digest), (False, "epoch 1 wrote after epoch 2 had started")),
    ((3, 1, FIRST.digest), (True, "")),
    ((3, 1, OTHER), (True, "messages between position 7 and this one are missing")),
    ((3, 2, FIRST.digest), (True, "messages between position 7 and this one are missing")),
]
"""Epoch, number and predecessor of a message of `w1` at position 12, and whether it is folded and why the chain is broken."""


@pytest.mark.parametrize(("message", "expected"), BEHIND_ITS_HEAD)
def test_a_message_is_held_to_the_newest_one_before_it(
    message: tuple[int, int, bytes], expected: tuple[bool, str]
) -> None:
    epoch, seq, previous = message
    chains = Chains({"s": FIRST})
    batch: Batch[Any] = Batch(
        SCHEMA_VERSION, "w1", epoch, seq, 0, (KvGap(1),), previous=previous, digest=b"c" * DIGEST_BYTES
    )
    folds, reason = expected
    assert chains.follow(Record(12, "s", 0, batch)) == (
        folds,
        Break(12, "s", "w1", reason) if reason else None,
    )
    # What is folded is the head from then on.
    assert chains.heads["s"] == (Head(12, "w1", epoch, seq, batch.digest) if folds else FIRST)


def test_another_writer_of_the_same_epoch_has_not_seen_what_is_before_it() -> None:
    batch: Batch[Any] = Batch(
        SCHEMA_VERSION, "w2", 2, 4, 0, (KvGap(1),), previous=FIRST.digest, digest=b"c" * DIGEST_BYTES
    )
    broken = Break(12, "s", "w2", "messages between position 7 and this one are missing")
    assert Chains({"s": FIRST}).follow(Record(12, "s", 0, batch)) == (True, broken)


def test_the_first_message_of_a_whole_log_has_no_predecessor() -> None:
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "w1", 1, 4, 0, (KvGap(1),), previous=OTHER, digest=FIRST.digest)
    broken = Break(12, "s", "w1", "the messages before it are missing")
    assert Chains().follow(Record(12, "s", 0, batch)) == (True, broken)
    assert Chains(whole=False).follow(Record(12, "s", 0, batch)) == (True, None)


def test_what_was_not_sealed_is_folded_and_follows_nothing() -> None:
    chains = Chains()
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "w1", 1, 9, 0, (KvGap(1),), previous=OTHER)
    assert chains.follow(Record(12, "s", 0, batch)) == (True, None)
    assert chains.heads == {}


def test_two_messages_of_one_number_are_no_repetition() -> None:
    """Each is valid by itself and names the same predecessor: the second is told, and not folded."""
    first = seal(Batch(SCHEMA_VERSION, "w1", 1, 1, 0, (KvGap(1),)))
    other = seal(Batch(SCHEMA_VERSION, "w1", 1, 1, 0, (KvGap(2),)))
    chains = Chains()
    records = [
        Record(position, "s", 0, decode_batch(one.data))
        for position, one in enumerate((first, other, first), 1)
    ]
    found = [chains.follow(record) for record in records]
    assert [folds for folds, _ in found] == [True, False, False]
    assert [broken is not None for _, broken in found] == [False, True, False]
