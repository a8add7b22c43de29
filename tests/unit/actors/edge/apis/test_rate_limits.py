"""Rate limits through the application: headers, refusals, and what requests are charged."""

from collections.abc import Iterator
from typing import Any

import pytest

from headwater.actors.edge.admit.limiter import RateLimiter
from headwater.actors.edge.apis.app import App
from headwater.actors.edge.settings import RateLimits
from headwater.schemas.routing import RouteRefused
from tests.support.worlds.edge import EdgeWorld, Response

RATES = RateLimits(requests_per_minute=4, tokens_per_minute=1_000, concurrent_requests=2, context_tokens=600)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}


@pytest.fixture
def world() -> Iterator[EdgeWorld]:
    """An edge with limits, just started."""
    with EdgeWorld(limit=RATES) as made:
        yield made


def chat(world: EdgeWorld, tenant: str = "", **fields: Any) -> Response:
    headers = [(b"x-headwater-tenant", tenant.encode())] if tenant else []
    return world.ask("/v1/chat/completions", {**CHAT, **fields}, headers=headers)


def limit_headers(response: Response) -> dict[str, str]:
    """`x-ratelimit-*`, without the prefix."""
    prefix = b"x-ratelimit-"
    return {
        name.removeprefix(prefix).decode(): value.decode()
        for name, value in response.headers.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("stream", [False, True])
def test_success_shows_the_limits(world: EdgeWorld, stream: bool) -> None:
    """In the headers of whole answers and of streams; a whole one is charged when its headers are sent."""
    shown = limit_headers(chat(world, stream=stream))
    assert shown["limit-requests"] == "4"
    assert shown["remaining-requests"] == "3"
    assert shown["reset-requests"] == "15s"
    assert shown["limit-tokens"] == "1000"
    assert 0 < int(shown["remaining-tokens"]) < 1000


def test_what_was_used_is_charged_and_not_what_was_reserved(world: EdgeWorld) -> None:
    """Prompt and answer as in `usage`."""
    used = chat(world).document["usage"]["total_tokens"]
    shown = limit_headers(chat(world, max_tokens=1))
    second = chat(world, max_tokens=1).document["usage"]["total_tokens"]
    assert int(shown["remaining-tokens"]) == 1000 - used - second


def test_too_many_requests(world: EdgeWorld) -> None:
    """429 with Retry-After in seconds and OpenAI's error; another tenant is not concerned."""
    for _ in range(4):
        assert chat(world, "a", max_tokens=1).status == 200
    response = chat(world, "a")
    assert response.status == 429
    assert response.document["error"]["type"] == "rate_limit_error"
    assert response.document["error"]["code"] == "rate_limit_exceeded"
    assert response.headers[b"retry-after"] == b"15"
    assert limit_headers(response)["remaining-requests"] == "0"
    assert chat(world, "b", max_tokens=1).status == 200
    world.clock.now_s += 15
    assert chat(world, "a", max_tokens=1).status == 200


def test_the_tenant_is_the_digest_of_a_key_where_nothing_else_names_it(world: EdgeWorld) -> None:
    """Without authentication keys are not checked, but tell clients apart."""

    def ask(key: str) -> int:
        headers = [(b"authorization", b"Bearer " + key.encode())]
        return world.ask("/v1/chat/completions", {**CHAT, "max_tokens": 1}, headers=headers).status

    assert [ask("one") for _ in range(5)] == [200] * 4 + [429]
    assert ask("two") == 200


def test_too_many_tokens(world: EdgeWorld) -> None:
    """The reservation counts, not what the answer would have been; nothing reaches a worker."""
    assert chat(world, max_tokens=500).status == 200
    world.given.clear()
    for _ in range(2):
        chat(world, max_tokens=1, n=1)
    world.given.clear()
    response = chat(world, max_tokens=300, n=4)
    assert response.status == 429
    assert "too large" in response.document["error"]["message"]
    assert response.headers[b"x-should-retry"] == b"false"
    assert b"retry-after" not in response.headers
    assert not world.given


def test_a_longer_context_than_the_holders_is_refused(world: EdgeWorld) -> None:
    """Before the prompt is tokenized where that is certain, and by tokens where it is not. An answer is as long as there is room."""
    assert chat(world, max_tokens=599).status == 200
    assert 550 < world.given[-1].sampling.max_tokens < 599
    response = chat(world, messages=[{"role": "user", "content": "word " * 600}])
    assert response.status == 400
    assert response.document["error"]["code"] == "context_length_exceeded"
    assert "Your maximum context length is 600 tokens" in response.document["error"]["message"]
    long = chat(world, messages=[{"role": "user", "content": "x" * 600 * 200}])
    assert long.status == 400
    assert "maximum context length is 600 tokens" in long.document["error"]["message"]


def test_an_answer_without_a_limit_ends_with_the_holders_context(world: EdgeWorld) -> None:
    """As it would end with the model's."""
    assert (
        world.ask("/v1/chat/completions", {k: v for k, v in CHAT.items() if k != "max_tokens"}).status == 200
    )
    given = world.given[-1]
    assert 550 < given.sampling.max_tokens < 600


def test_a_request_that_no_worker_took_is_not_charged_for_tokens(world: EdgeWorld) -> None:
    """It counts as a request."""
    world.refuses = [RouteRefused("the queue is full", 1.0, 429, True, "queue_full")]
    refused = chat(world, max_tokens=500)
    assert refused.status == 429
    shown = limit_headers(chat(world, max_tokens=1))
    assert shown["remaining-requests"] == "2"
    assert int(shown["remaining-tokens"]) > 950


def test_invalid_requests_count_too(world: EdgeWorld) -> None:
    """What is refused after its prompt was tokenized was work. Unknown models are not."""
    assert chat(world, model="nobody").status == 404
    for _ in range(4):
        assert chat(world, min_tokens=101).status == 400
    assert chat(world).status == 429


def test_embeddings_are_under_the_same_limits(world: EdgeWorld) -> None:
    world.serve("v", capabilities=frozenset({"embed"}), tasks=("embed",))
    for _ in range(4):
        world.ask("/v1/embeddings", {"model": "v", "input": "a text"})
    assert chat(world).status == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "m", "prompt": "a text"}),
        ("/tokenize", {"model": "m", "messages": CHAT["messages"]}),
        ("/detokenize", {"model": "m", "tokens": [1, 2]}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": CHAT["messages"]}),
        ("/v1/responses/input_tokens", {"model": "m", "input": "a text"}),
    ],
)
def test_work_on_tokens_counts_as_requests(world: EdgeWorld, path: str, body: dict[str, Any]) -> None:
    """No engine takes part, so no tokens are charged; the account is that of all other endpoints."""
    for left in (3, 2, 1, 0):
        response = world.ask(path, body)
        assert response.status == 200
        shown = limit_headers(response)
        assert shown["remaining-requests"] == str(left)
        assert shown["remaining-tokens"] == "1000"
    assert world.ask(path, body).status == 429
    assert chat(world).status == 429
    world.clock.now_s += 15
    assert world.ask(path, body).status == 200


def test_a_text_to_tokenize_is_no_longer_than_the_holders_context(world: EdgeWorld) -> None:
    """It would be tokenized for nothing."""
    assert world.ask("/tokenize", {"model": "m", "prompt": "a text"}).document["max_model_len"] == 600
    assert world.ask("/tokenize", {"model": "m", "prompt": "x" * 600 * 200}).status == 400


def test_an_edge_counts_in_the_limiter_that_it_shares(world: EdgeWorld) -> None:
    """It is empty at first, and so false: `or` would put one in its place that no other edge hears of."""
    limiter = RateLimiter(world.clock)
    assert not limiter
    app = App(world.app._workers, world.models, world.ledger, world, limiter=limiter)
    assert app._limiter is limiter


def test_without_limits_there_are_no_headers() -> None:
    """An edge that counts nothing says nothing."""
    with EdgeWorld() as world:
        assert limit_headers(chat(world)) == {}
