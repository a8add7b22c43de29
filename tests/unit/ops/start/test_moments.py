"""Times on a command line."""

from datetime import UTC, datetime

import pytest

from headwater.ops.terminal import iso_time, time_ns, utc_time

NOW = datetime(2026, 11, 26, 21, 4, 7, 500_000, tzinfo=UTC)
NOW_NS = round(NOW.timestamp() * 1_000_000) * 1_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-26T20:00:00Z", "2026-11-26 20:00:00.000 UTC"),
        ("2026-11-26T21:00:00.25+01:00", "2026-11-26 20:00:00.250 UTC"),
        ("2026-11-26 20:00", "2026-11-26 20:00:00.000 UTC"),
        ("2026-11-26 20:00:01.125 UTC", "2026-11-26 20:00:01.125 UTC"),
        ("2026-11-26", "2026-11-26 00:00:00.000 UTC"),
        ("20:15", "2026-11-26 20:15:00.000 UTC"),
        ("7:15:30", "2026-11-26 07:15:30.000 UTC"),
        ("23:00", "2026-11-25 23:00:00.000 UTC"),
        ("1795722907", "2026-11-26 19:55:07.000 UTC"),
        ("1795722907.5", "2026-11-26 19:55:07.500 UTC"),
        ("1795722907250", "2026-11-26 19:55:07.250 UTC"),
        ("2026-11-26T20:00:00", "2026-11-26 20:00:00.000 UTC"),
        ("-5m", "2026-11-26 20:59:07.500 UTC"),
        ("-90s", "2026-11-26 21:02:37.500 UTC"),
        ("-1.5h", "2026-11-26 19:34:07.500 UTC"),
        ("-2d", "2026-11-24 21:04:07.500 UTC"),
    ],
)
def test_every_form_of_a_time_is_read(text: str, shown: str) -> None:
    """As is what other commands print; a time of day that is still to come is of yesterday."""
    found = time_ns(text, NOW_NS)
    assert found is not None
    assert utc_time(found) == shown
    assert time_ns(iso_time(found), NOW_NS) == found


def test_a_time_is_written_to_the_millisecond() -> None:
    """In a document as ISO 8601 has it."""
    assert iso_time(NOW_NS + 1_500_000) == "2026-11-26T21:04:07.501Z"


@pytest.mark.parametrize(
    "text", ["", "5m", "-5", "-5x", "25:00", "20261126", "42", "chatcmpl-6b02994be464627264f94510", "now"]
)
def test_other_texts_are_no_times(text: str) -> None:
    """Among them positions and requests."""
    assert time_ns(text, NOW_NS) is None
