"""Media of requests as they are in logs already: bytes that no later release may change. See `test_golden`."""

from headwater.schemas.encoding.codec import decode_batch, encode_batch
from headwater.schemas.encoding.envelope import Batch
from headwater.schemas.events.request import MediaPlace, RequestAccepted

MEDIA = (
    MediaPlace("image", "0a" * 16, 3, 56),
    MediaPlace("video", "0b" * 16, 60, 8),
    MediaPlace("audio", "0c" * 16, 70, 4),
)
ACCEPTED_WITH_MEDIA = (
    "9a02a277310407cf18fae27693b40000919cac7265712e6163636570746564a172a16da4636861746414c301a36f6666c400909394a5696d616765d920"
    + "3061" * 16
    + "033894a5766964656fd920"
    + "3062" * 16
    + "3c0894a5617564696fd920"
    + "3063" * 16
    + "4604a9686561647761746572a174c4083132333435363738c408498cb0aacc391c2b"
)
ACCEPTED_WITH_IMAGES = (
    "9a02a277310407cf18fae27693b40000919bac7265712e6163636570746564a172a16da4636861746414c301a36f6666c4009293d920"
    + "3061" * 16
    + "033893d920"
    + "3062" * 16
    + "3c04a9686561647761746572a174c4083132333435363738c40884ef0f4ce0ae3bc2"
)
"""By releases that recorded images only."""


def test_media_of_a_request_are_written_with_their_kinds() -> None:
    """These bytes, of a release without trace ids, and the places that were meant."""
    event = RequestAccepted("r", "m", "chat", 100, 20, True, media=MEDIA)
    written = Batch(2, "w1", 4, 7, 1_800_000_000_000_000_000, (event,), trace="t", previous=b"12345678")
    [read_again] = decode_batch(encode_batch(written)).events
    assert read_again == event
    [read] = decode_batch(bytes.fromhex(ACCEPTED_WITH_MEDIA)).events
    assert read == event
    assert event.places == MEDIA


def test_images_of_a_request_are_read_as_media() -> None:
    """Where earlier releases wrote them."""
    [read] = decode_batch(bytes.fromhex(ACCEPTED_WITH_IMAGES)).events
    assert isinstance(read, RequestAccepted)
    assert read.places == (MEDIA[0], MediaPlace("image", "0b" * 16, 60, 4))
    assert not read.media
