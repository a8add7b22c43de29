"""Request ids: unique over processes, and with the time at which they were made."""

import pytest

from headwater.schemas.names import SECOND_NS, request_of, time_of, unique_ids
from tests.support.worlds.clock import WALL_NS, ManualClock

NOW_S = WALL_NS // SECOND_NS


def test_ids_have_24_hex_digits_and_begin_with_the_time() -> None:
    """To the second, also after the clock moved, forward and back."""
    clock = ManualClock()
    make = unique_ids(clock.wall_ns)
    for second in (0.0, 0.9, 1.0, 3600.0, 7.0):
        clock.now_s = second
        name = make()
        assert len(name) == 24
        assert int(name[:8], 16) == NOW_S + int(second)
        assert time_of(name, clock.wall_ns()) == (NOW_S + int(second)) * SECOND_NS


def test_ids_are_unique_within_and_across_processes() -> None:
    """Also in the same second, and when the clock goes back."""
    clock = ManualClock()
    makers = [unique_ids(clock.wall_ns) for _ in range(20)]
    names = [make() for make in makers for _ in range(500)]
    clock.now_s = -5.0
    names += [make() for make in makers for _ in range(500)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["chatcmpl-{}", "msg_{}", "resp_{}", "chatcmpl-{}-0-1", "img-{}", "{}"])
def test_the_time_is_read_from_every_form_of_name(name: str) -> None:
    """With the prefix of its API, and with the choice and attempt of a decision behind it."""
    made = unique_ids(ManualClock().wall_ns)()
    assert time_of(name.format(made), WALL_NS) == WALL_NS


@pytest.mark.parametrize(
    "name",
    [
        "",
        "chatcmpl-1-0-1",
        "chatcmpl-w3-17",
        f"{NOW_S:08x}" + "0" * 15,
        f"{NOW_S:08x}" + "0" * 17,
        f"{NOW_S:08X}" + "0" * 16,
        f"{NOW_S + 90_000:08x}" + "0" * 16,
        "00000001" + "0" * 16,
        "ba2352da5871234b1c38bb0a",
    ],
)
def test_other_names_have_no_time(name: str) -> None:
    """Ids of another form, and times before the first release or in the future."""
    assert time_of(name, WALL_NS) is None


@pytest.mark.parametrize("name", ["chatcmpl-{}", "msg_{}", "{}", "audio-1-{}"])
@pytest.mark.parametrize("after", ["", "-0-1", "-12-3", "-0-1-e2-1"])
def test_an_attempt_names_its_request(name: str, after: str) -> None:
    """A leg of it, or the encode leg of one of its images."""
    request = name.format(unique_ids(ManualClock().wall_ns)())
    assert request_of(f"{request}{after}") == request
