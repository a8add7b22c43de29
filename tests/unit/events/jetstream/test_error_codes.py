"""What JetStream's error codes mean: every code of the server's list is classified, unknown ones pass."""

import pytest

from headwater.events.jetstream.api import FULL, NEWEST_KNOWN, PASSES, STAYS, error_of, meaning_of
from headwater.events.ports import LogError, LogFull, LogRefused, LogUnavailable, StreamMissing


def answer(err_code: int, code: int) -> LogError:
    """The server's error answer as one of ours."""
    return error_of("subject", {"err_code": err_code, "code": code, "description": "text"})


@pytest.mark.parametrize(
    ("err_code", "code", "kind"),
    [
        (10158, 409, LogUnavailable),  # duplicate message id is in process
        (10176, 400, LogUnavailable),  # atomic publish batch is incomplete
        (10163, 503, LogUnavailable),  # expected last sequence per subject temporarily unavailable
        (10167, 429, LogUnavailable),  # too many requests
        (10210, 429, LogUnavailable),  # atomic publish too many in flight
        (10008, 503, LogUnavailable),  # JetStream system temporarily unavailable
        (10009, 500, LogUnavailable),  # cluster can not handle request
        (10118, 500, LogUnavailable),  # stream is offline
        (10005, 400, LogUnavailable),  # no suitable peers
        (10077, 503, LogFull),
        (10047, 500, LogFull),
        (10059, 404, StreamMissing),
        (10071, 400, LogRefused),  # wrong last sequence: the caller looks
        (10164, 400, LogRefused),
        (10037, 404, LogRefused),  # no message found
        (10052, 500, LogRefused),  # invalid stream configuration
        (10054, 400, LogRefused),  # message size exceeds maximum allowed
        (10025, 400, LogRefused),
    ],
)
def test_a_known_code_has_its_meaning(err_code: int, code: int, kind: type[LogError]) -> None:
    """An error that passes is retryable; one that stays is not, and keeps its code."""
    error = answer(err_code, code)
    assert type(error) is kind
    assert error.retryable == issubclass(kind, LogUnavailable)
    if isinstance(error, LogRefused):
        assert error.code == err_code


@pytest.mark.parametrize("code", [400, 404, 412, 429, 500, 503])
def test_a_code_that_is_not_in_the_list_is_retryable(code: int) -> None:
    """A newer server's error does not stop an actor for good."""
    assert meaning_of(NEWEST_KNOWN + 1, code) == "retryable"
    assert meaning_of(0, code) == "retryable"


def test_no_code_has_two_meanings() -> None:
    """Each exception stands in one set."""
    assert not FULL & PASSES
    assert not FULL & STAYS
    assert not PASSES & STAYS
