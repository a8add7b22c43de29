"""The codec of the log: every event there and back, older and newer bytes, and bytes that are none of ours."""

import contextlib
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.schemas.encoding import (
    DIGEST_BYTES,
    NO_DIGEST,
    SCHEMA_VERSION,
    Batch,
    UnreadableBatch,
    decode_batch,
    digest_of,
    encode_batch,
    seal,
)
from headwater.schemas.events import BlocksStored, Event
from tests.support.data.examples import EVENT_TYPES, any_event, batch, packed, structs, texts

FIELDS = {kind: msgspec.structs.fields(kind) for kind in EVENT_TYPES}
EVOLVED = [kind for kind in EVENT_TYPES if not FIELDS[kind][-1].required]
EVENT_AT = 5
"""Place of the events in an encoded batch; each event is [tag, field, …]."""


def raw(batch_of_ours: Batch[Any]) -> list[Any]:
    """An encoded batch as plain lists, to be taken apart."""
    decoded: list[Any] = msgspec.msgpack.decode(encode_batch(batch_of_ours))
    return decoded


def resealed(parts: list[Any]) -> bytes:
    """The message that a writer would have made of these parts."""
    data = msgspec.msgpack.encode(parts)
    return data[:-DIGEST_BYTES] + digest_of(data)


def unsealed(read: Batch[Any]) -> Batch[Any]:
    """The batch as it was before it got its digest."""
    return msgspec.structs.replace(read, digest=NO_DIGEST)


@given(st.lists(any_event(), max_size=4), texts, st.integers(0, 2**63), st.integers(1, 2**63))
def test_every_batch_comes_back_as_it_was_written(
    events: list[Event], writer: str, epoch: int, seq: int
) -> None:
    """Values, types and order of events survive the log."""
    written = batch(*events, writer=writer, epoch=epoch, seq=seq)
    read = decode_batch(encode_batch(written))
    assert unsealed(read) == written
    assert read.digest == seal(written).digest
    assert [type(event) for event in read.events] == [type(event) for event in events]


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_every_event_type_can_be_told_from_all_others(kind: type[Event]) -> None:
    """The tag alone names the type; no two types share one, and no event is without."""
    tags = [one.__struct_config__.tag for one in EVENT_TYPES]
    assert isinstance(kind.__struct_config__.tag, str)
    assert tags.count(kind.__struct_config__.tag) == 1
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.array_like


@given(st.data())
def test_bytes_of_an_older_release_read_with_defaults(data: st.DataObject) -> None:
    """Fields are only appended: what was written before they existed decodes, with their defaults."""
    kind = data.draw(st.sampled_from(EVOLVED))
    event = data.draw(structs(kind))
    optional = [field for field in FIELDS[kind] if not field.required]
    missing = data.draw(st.integers(1, len(optional)))
    old = raw(batch(event))
    del old[EVENT_AT][0][-missing:]
    [read] = decode_batch(resealed(old)).events
    for field in FIELDS[kind]:
        defaulted = field in optional[len(optional) - missing :]
        wanted = field.default if defaulted else getattr(event, field.name)
        assert getattr(read, field.name) == wanted


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_fields_with_defaults_stand_behind_those_without(kind: type[Event]) -> None:
    """Only what is last can be appended; a required field behind an optional one would break old bytes."""
    required = [field.required for field in FIELDS[kind]]
    assert required == sorted(required, reverse=True)
    assert set(get_type_hints(kind)) == {field.name for field in FIELDS[kind]}


@given(any_event())
def test_fields_that_a_later_release_appended_are_passed_over(event: Event) -> None:
    """An older reader of the same schema version reads what it knows of an event."""
    new = raw(batch(event))
    new[EVENT_AT][0] += ["more", 1, {"of": "it"}]
    assert unsealed(decode_batch(resealed(new))) == batch(event)


def test_a_newer_schema_version_is_refused_by_name() -> None:
    """What a newer release meant can not be guessed: the error says who wrote it and what is readable."""
    new = raw(batch(BlocksStored(0, packed(1))))
    new[0] = SCHEMA_VERSION + 1
    with pytest.raises(UnreadableBatch, match=f"newer release.*{SCHEMA_VERSION + 1}.*{SCHEMA_VERSION}"):
        decode_batch(msgspec.msgpack.encode(new))


@pytest.mark.parametrize(
    "change",
    [
        lambda old: old[EVENT_AT][0].__setitem__(0, 3),
        lambda old: old[EVENT_AT][0].__setitem__(1, "no number"),
        lambda old: old[EVENT_AT][0].__delitem__(slice(1, None)),
        lambda old: old.__delitem__(slice(2, None)),
        lambda old: old.__setitem__(EVENT_AT, None),
    ],
)
def test_a_batch_with_a_wrong_part_is_refused(change: Any) -> None:
    """Tags that are none, wrong types and missing required fields raise UnreadableBatch. Of unknown tags see `test_golden`."""
    bad = raw(batch(BlocksStored(0, packed(1))))
    change(bad)
    with pytest.raises(UnreadableBatch, match="not a batch of events"):
        decode_batch(msgspec.msgpack.encode(bad))


@given(st.binary(max_size=80))
def test_garbage_is_unreadable_and_nothing_worse(data: bytes) -> None:
    """Whatever lies in the log, a reader gets an UnreadableBatch, which it counts and skips."""
    with pytest.raises(UnreadableBatch):
        decode_batch(data)


@given(any_event(), st.data())
def test_a_batch_with_one_altered_byte_is_unreadable(event: Event, data: st.DataObject) -> None:
    """Whichever byte a disk gets wrong, and however: the reader does not take the message for sound."""
    written = bytearray(encode_batch(batch(event, writer="worker-1")))
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UnreadableBatch):
        decode_batch(bytes(written))


def test_a_batch_of_another_schema_is_refused_by_name() -> None:
    """Somebody else's messages are not taken for ours."""
    other = raw(batch(BlocksStored(0, packed(1))))
    other[6] = "somebody"
    with pytest.raises(UnreadableBatch, match="schema 'somebody'"):
        decode_batch(resealed(other))


@given(any_event(), st.data())
def test_a_damaged_batch_is_read_or_unreadable_and_nothing_else(event: Event, data: st.DataObject) -> None:
    """Changed or missing bytes never raise anything but UnreadableBatch: readers know no other error."""
    written = bytearray(encode_batch(batch(event, writer="worker-\u00e9")))
    for _ in range(data.draw(st.integers(1, 3))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(written[: data.draw(st.integers(0, len(written)))])
    with contextlib.suppress(UnreadableBatch):
        decode_batch(damaged)


def test_text_that_is_not_utf8_is_unreadable() -> None:
    """A foreign writer's Latin-1 name is damage like any other."""
    written = encode_batch(batch(BlocksStored(0, b""), writer="w1"))
    with pytest.raises(UnreadableBatch):
        decode_batch(written.replace(b"w1", b"w\xe9"))


def test_nesting_without_end_is_unreadable() -> None:
    """A field that is passed over may not bring the reader down either."""
    written = encode_batch(batch(BlocksStored(0, b"")))
    deep = b"\x97" + written[1:] + b"\x91" * 100_000
    with pytest.raises(UnreadableBatch):
        decode_batch(deep)
