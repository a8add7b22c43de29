"""Error responses are small, whatever a client sent, and whoever makes them."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.admit.limiter import time_limit_reached
from headwater.actors.http import errors
from headwater.actors.http.errors import MESSAGE_BYTES_MAX, ApiError, cut
from headwater.schemas.routing import RouteRefused

RESPONSE_BYTES_MAX = 2048

texts = st.one_of(
    st.text(max_size=50),
    st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=5), st.integers(1, 20_000)),
    st.sampled_from(["\x00", '"', "\\", "é", "漢", "🙂", "\ud800"]).map(lambda one: one * 30_000),
)

CONSTRUCTORS: dict[str, st.SearchStrategy[ApiError]] = {
    "ApiError": st.builds(ApiError, st.just(400), texts, param=texts),
    "bad_request": st.builds(errors.bad_request, texts, param=texts),
    "bad_field": st.builds(errors.bad_field, texts, texts),
    "rejected": st.builds(errors.rejected, texts, texts),
    "no_model": st.builds(errors.no_model, texts, st.lists(texts, max_size=50)),
    "overloaded": st.builds(errors.overloaded, texts),
    "refused_by_router": st.builds(
        errors.refused_by_router,
        st.builds(RouteRefused, texts, st.just(1.0), st.sampled_from([400, 429, 503])),
    ),
    "ended_workers": st.builds(errors.ended_workers, st.integers(1, 10**9), texts),
    "not_migrated": st.builds(
        errors.not_migrated, texts, st.builds(errors.overloaded, texts), has_begun=st.booleans()
    ),
    "migrated_too_often": st.builds(errors.migrated_too_often, st.integers(1, 10**9), texts),
    "upstream_failed": st.builds(errors.upstream_failed, texts),
    "method_not_allowed": st.builds(errors.method_not_allowed, st.sampled_from(["GET", "DELETE"])),
    "unauthenticated": st.builds(errors.unauthenticated, texts),
    "forbidden": st.builds(errors.forbidden, texts, param=texts),
    "time_limit_reached": st.builds(time_limit_reached, st.floats(0.001, 1e9)),
}


@given(st.data())
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_an_error_response_has_at_most_2_kb(name: str, data: Any) -> None:
    """And is valid JSON that says what is wrong."""
    error = data.draw(CONSTRUCTORS[name])
    body = error.body()
    assert len(body) <= RESPONSE_BYTES_MAX
    assert msgspec.json.decode(body)["error"]["message"] == str(error)


def test_no_constructor_is_forgotten() -> None:
    """All functions that return an `ApiError`."""
    found = {
        name
        for name, function in inspect.getmembers(errors, inspect.isfunction)
        if function.__annotations__.get("return") is ApiError
    }
    assert found <= set(CONSTRUCTORS)


@given(texts, st.integers(10, 2_000))
def test_a_text_is_cut_to_fit(text: str, bytes_max: int) -> None:
    """Not more than necessary; what fits is left as it is."""
    found = cut(text, bytes_max)
    assert len(msgspec.json.encode(found)) <= bytes_max
    if not any("\ud800" <= one <= "\udfff" for one in text):
        if len(msgspec.json.encode(text)) <= bytes_max:
            assert found == text
        else:
            assert found.endswith("…")
            assert text.startswith(found[:-1])
            assert len(msgspec.json.encode(found)) > bytes_max // 2 or bytes_max < 100


@pytest.mark.parametrize("make", [lambda: ApiError(400, "x" * MESSAGE_BYTES_MAX)])
def test_a_message_is_not_cut_for_nothing(make: Callable[[], ApiError]) -> None:
    """The end of a sentence is worth more than a mark."""
    assert str(cut("y" * 100, 102)) == "y" * 100
    assert str(make()).endswith("…")
