"""Adapters as models at the edge: listed, asked for by name, routed and hashed apart from their base."""

from collections.abc import Iterator

import msgspec
import pytest

from headwater.actors.runtime.ports import Message
from headwater.schemas import hashing, subjects
from headwater.schemas.events import WorkerChanged
from headwater.schemas.routing import RouteQuery
from headwater.schemas.tables import LoraCard
from tests.support.data.examples import joined, record
from tests.support.data.story import fold
from tests.support.worlds.clock import settle
from tests.support.worlds.edge import EdgeWorld

CARD = LoraCard(
    name="org/tuned",
    pool="m-b16",
    source="s3://bucket/tuned",
    digest="ab" * 32,
    rank=8,
    created_s=1_700_000_000,
)
IDENTITY = "org/tuned@abababababab"
PROMPT = "x" * 64


class AdapterWorld(EdgeWorld):
    """Its one worker holds the adapter; `queries` are what the router was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[RouteQuery] = []
        self._state = fold(
            [record(1, joined("w1")), record(2, WorkerChanged("w1", 1, "ready", "both", (IDENTITY,)))]
        )

    async def _on_route(self, message: Message) -> None:
        self.queries.append(msgspec.msgpack.decode(message.data, type=RouteQuery))
        await super()._on_route(message)

    def publish(self, card: LoraCard) -> None:
        key = subjects.lora_key(card.pool, card.name)
        self.runner.run(self._change(key, msgspec.json.encode(card)))

    def forget(self, card: LoraCard) -> None:
        self.runner.run(self._change(subjects.lora_key(card.pool, card.name), None))

    async def _change(self, key: str, value: bytes | None) -> None:
        if value is None:
            await self.world.cards.delete(key)
        else:
            await self.world.cards.put(key, value)
        await settle()

    def names(self) -> list[str]:
        """Names in the list."""
        return [one["id"] for one in self.ask("/v1/models", b"", method="GET").document["data"]]


@pytest.fixture
def edge() -> Iterator[AdapterWorld]:
    """An edge that serves `m` and its adapter."""
    with AdapterWorld() as world:
        world.publish(CARD)
        yield world


def test_an_adapter_is_listed_behind_its_base(edge: AdapterWorld) -> None:
    """With its parent, and not with its source, which is nobody's business."""
    listed = edge.ask("/v1/models", b"", method="GET").document["data"]
    base, tuned = listed
    assert (base["id"], base["root"], base["parent"]) == ("m", "m", None)
    own = {"id": "org/tuned", "created": 1_700_000_000, "root": "org/tuned", "parent": "m"}
    assert tuned == {**base, **own}
    assert CARD.source not in str(listed)
    assert edge.ask("/v1/models/org/tuned", b"", method="GET").document == tuned
    assert set(edge.ask("/health", b"", method="GET").document["workers"]) == {"m"}, "workers count once"


def test_a_request_for_it_is_routed_and_hashed_as_its_own(edge: AdapterWorld) -> None:
    """Same prompt, other blocks: what the base cached is of no use to it."""
    answers = [
        edge.ask("/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 4})
        for model in ("m", "org/tuned")
    ]
    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.document["model"] for answer in answers] == ["m", "org/tuned"]
    # A router that is slow, as while it compiles, is asked again.
    asked = {query.constraints.lora_name: query for query in edge.queries}
    base, tuned = asked[""], asked[IDENTITY]
    assert [request.lora_name for request in edge.given] == ["", IDENTITY]
    tokens = hashing.unpack_tokens(edge.given[0].tokens)
    assert edge.given[0].tokens == edge.given[1].tokens
    for query, name in ((base, ""), (tuned, IDENTITY)):
        wanted = hashing.sequence_hashes(tokens, 16, parent=hashing.seed(name))
        assert hashing.unpack_hashes(query.hashes).tolist() == wanted.tolist()
    assert not set(hashing.unpack_hashes(base.hashes)) & set(hashing.unpack_hashes(tuned.hashes))


def test_chat_uses_the_base_models_template(edge: AdapterWorld) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for model in ("m", "org/tuned"):
        assert edge.ask("/v1/chat/completions", {"model": model, **body}).status == 200
    assert edge.given[0].tokens == edge.given[1].tokens


def test_a_forgotten_adapter_is_unknown_at_once(edge: AdapterWorld) -> None:
    """With the list of what is served."""
    assert edge.names() == ["m", "org/tuned"]
    edge.forget(CARD)
    assert edge.names() == ["m"]
    refused = edge.ask("/v1/completions", {"model": "org/tuned", "prompt": "x"})
    assert refused.status == 404
    assert "Served: m" in refused.document["error"]["message"]


def test_an_unknown_model_is_told_of_adapters_too(edge: AdapterWorld) -> None:
    refused = edge.ask("/v1/completions", {"model": "other", "prompt": "x"})
    assert refused.status == 404
    assert "Served: m, org/tuned" in refused.document["error"]["message"]


def test_an_adapter_never_hides_a_model(edge: AdapterWorld) -> None:
    """Should both be there by a race, or the base be missing: a name has one meaning."""
    edge.publish(msgspec.structs.replace(CARD, name="m"))
    edge.publish(msgspec.structs.replace(CARD, name="lost", pool="none-b16"))
    edge.runner.run(edge._change("m-b16.lora.broken", b"not JSON"))
    assert edge.names() == ["m", "org/tuned"]
    assert edge.ask("/v1/completions", {"model": "m", "prompt": "x"}).status == 200
    assert edge.given[-1].lora_name == ""
    assert edge.ask("/v1/completions", {"model": "lost", "prompt": "x"}).status == 404


def test_weights_that_changed_are_another_adapter(edge: AdapterWorld) -> None:
    """Forgotten and made anew: workers and blocks of the old one do not count."""
    edge.ask("/v1/completions", {"model": "org/tuned", "prompt": PROMPT})
    edge.publish(msgspec.structs.replace(CARD, digest="cd" * 32))
    assert edge.app._models.get("org/tuned").lora_name == "org/tuned@cdcdcdcdcdcd"
