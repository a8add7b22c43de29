"""The time limit of a request: a clear error before and after the headers, and the worker stops."""

import asyncio

import pytest

from headwater.actors.edge.admit.limiter import TimeLimit
from headwater.actors.http.errors import ApiError
from tests.support.worlds.edge import EdgeWorld

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends(stream: bool) -> None:
    """As 504 that is not to be retried; in a stream that has begun, as an event. The worker is told to stop."""
    # Long enough for the stream to begin on a busy machine.
    with EdgeWorld(request_timeout_s=1.5) as world:
        world.silent = True
        response = world.ask("/v1/chat/completions", {**CHAT, "stream": stream})
        if stream:
            assert response.status == 200
            assert b'"code":"request_timeout"' in response.body
            assert b"[DONE]" not in response.body
        else:
            assert response.status == 504
            assert response.document["error"]["code"] == "request_timeout"
            assert "1.5 s" in response.document["error"]["message"]
            assert response.headers[b"x-should-retry"] == b"false"
        assert len(world.cancelled) == 1
        world.silent = False
        assert world.ask("/v1/chat/completions", CHAT).status == 200
        assert len(world.cancelled) == 1


def test_vectors_have_a_time_limit_too() -> None:
    """The request is cancelled at the worker."""
    with EdgeWorld(request_timeout_s=0.2) as world:
        world.serve("v", capabilities=frozenset({"embed"}), tasks=("embed",))
        world.silent = True
        response = world.ask("/v1/embeddings", {"model": "v", "input": "a text"})
        assert response.status == 504
        assert response.document["error"]["code"] == "request_timeout"


async def test_a_block_that_ends_in_time_is_not_aborted_later() -> None:
    """Its timer ends with it, however the block ends."""
    errors: list[ApiError] = []
    with TimeLimit(0.01, errors.append):
        pass
    with pytest.raises(ValueError, match="own"), TimeLimit(0.01, errors.append):
        raise ValueError("own")
    with TimeLimit(0.01, errors.append):
        while not errors:
            await asyncio.sleep(0.005)
    assert [error.status for error in errors] == [504]
