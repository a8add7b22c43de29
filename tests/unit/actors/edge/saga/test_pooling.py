"""Vectors through a whole fleet of production actors: split, placed by the router, retried, cancelled, counted."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.answer.jobs import MESSAGE_TOKENS_MAX, REPLY_BYTES, messages
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from headwater.engines.engine import EngineError
from headwater.engines.model_files import byte_tokenizer
from headwater.events.ports import Record
from headwater.ops.sim.checks import messages as all_messages
from headwater.ops.sim.fleet import MODEL
from headwater.schemas.events import LoadReported, RequestAccepted, RequestEnded, RequestRouted
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.routing import Decision
from tests.support.data.vectors import SIZE, Edge, VectorEngine, answer_of, vector
from tests.support.worlds.virtual import Stage, events_of, staged, until

TEXTS = [f"text number {number}" for number in range(40)]


def expected(text: str, size: int = SIZE) -> bytes:
    """The vector of a text."""
    return vector(pack_tokens(byte_tokenizer().encode(text).ids), size)


async def fleet(stage: Stage, *workers: str) -> tuple[Edge, dict[str, VectorEngine]]:
    """A router r1, an edge, and workers that embed."""
    engines = {}
    for name in workers:
        made = (await stage.engine(name, VectorEngine)).engine
        assert isinstance(made, VectorEngine)
        engines[name] = made
    await stage.router("r1")
    edge = Edge(stage)
    await edge.start()
    return edge, engines


async def request_log(stage: Stage) -> list[Record]:
    """The request log's messages."""
    return [one for one in await all_messages(stage.fleet.store.requests) if isinstance(one, Record)]


def right(document: Any, texts: list[str]) -> bool:
    """Is it the answer to these texts?"""
    data = document["data"]
    return [entry["index"] for entry in data] == list(range(len(texts))) and all(
        np.asarray(entry["embedding"], "<f4").tobytes() == expected(text)
        for entry, text in zip(data, texts, strict=True)
    )


@staged
async def test_vectors_come_in_order_whatever_way_they_went(stage: Stage) -> None:
    """Many inputs are several messages, each a decision of the router for workers that embed."""
    edge, engines = await fleet(stage, "w1", "w2")
    status, document = await edge.ask("/v1/embeddings", {"model": MODEL, "input": TEXTS})
    assert status == 200
    assert right(document, TEXTS)
    assert document["model"] == MODEL
    tokens = sum(len(byte_tokenizer().encode(text).ids) for text in TEXTS)
    assert document["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    asked = [request for engine in engines.values() for request in engine.asked]
    # Nobody knew how large a vector is: the first message is careful, the second has the rest.
    assert sorted(len(request.prompts) for request in asked) == [8, 32]
    await edge.ask("/v1/embeddings", {"model": MODEL, "input": TEXTS})
    asked = [request for engine in engines.values() for request in engine.asked]
    assert sorted(len(request.prompts) for request in asked) == [8, 32, 40]
    decisions = events_of(await stage.records(), Decision)
    assert {decision.request for decision in decisions} == {request.request for request in asked}
    assert {decision.constraints.needs for decision in decisions} == {("embed",)}


@staged
async def test_a_request_counts_as_load_until_it_ends(stage: Stage) -> None:
    """For the router, and in what the worker tells the log."""
    edge, engines = await fleet(stage, "w1")
    engines["w1"].seconds = 2.0
    connection = edge.send("/v1/embeddings", {"model": MODEL, "input": [1]})
    await until(lambda: engines["w1"].asked)
    [request] = engines["w1"].asked
    state = stage.routers["r1"].state
    await until(lambda: list(state.loads.workers["w1"].requests) == [request.request])
    assert state.loads.workers["w1"].prefill_tokens == 1
    status, _ = await answer_of(connection)
    assert status == 200
    await until(lambda: not state.loads.workers["w1"].requests)
    assert state.loads.workers["w1"].prefill_tokens == 0
    reports = events_of(await stage.records(), LoadReported)
    assert [one for report in reports for one in report.accepted] == [request.request]
    assert [one for report in reports for one in report.finished] == [request.request]


@staged
async def test_the_request_log_has_one_end_for_each(stage: Stage) -> None:
    """Accepted with its tokens, routed per message, ended once."""
    edge, _ = await fleet(stage, "w1")
    await edge.ask("/v1/embeddings", {"model": MODEL, "input": TEXTS})
    await edge.ask("/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": SIZE + 1})
    await asyncio.sleep(1.0)
    records = await request_log(stage)
    accepted = events_of(records, RequestAccepted)
    assert [(one.endpoint, one.choices, one.max_tokens) for one in accepted] == [
        ("embeddings", 40, 0),
        ("embeddings", 1, 0),
    ]
    routed = events_of(records, RequestRouted)
    assert [(one.request, one.choice, one.worker) for one in routed] == [
        (accepted[0].request, 0, "w1"),
        (accepted[0].request, 1, "w1"),
        (accepted[1].request, 0, "w1"),
    ]
    ended = events_of(records, RequestEnded)
    assert [(one.request, one.reason) for one in ended] == [
        (accepted[0].request, "stop"),
        (accepted[1].request, "error"),
    ]


@staged
async def test_a_worker_that_is_killed_is_known_by_its_lease_and_another_does_the_work(stage: Stage) -> None:
    """Long before the message's own time is over. The log has the move."""
    edge, engines = await fleet(stage, "w1", "w2")
    for engine in engines.values():
        engine.seconds = 1.0
    connection = edge.send("/v1/embeddings", {"model": MODEL, "input": TEXTS[:3]})
    await until(lambda: any(engine.asked for engine in engines.values()))
    first, other = sorted(engines, key=lambda name: not engines[name].asked)
    began = stage.clock.time()
    await stage.kill(first)
    status, document = await answer_of(connection)
    assert status == 200
    assert right(document, TEXTS[:3])
    assert engines[other].asked
    assert stage.clock.time() - began < 10.0
    await asyncio.sleep(1.0)
    [ended] = events_of(await request_log(stage), RequestEnded)
    assert (ended.reason, ended.migrations) == ("stop", 1)


@staged
async def test_an_engine_that_fails_costs_a_try(stage: Stage) -> None:
    """Ten requests while one of two engines is out of memory: all are answered by the other, once it was tried."""
    edge, engines = await fleet(stage, "w1", "w2")
    engines["w1"].failure = EngineError("out of memory")
    for text in TEXTS[:10]:
        status, document = await edge.ask("/v1/embeddings", {"model": MODEL, "input": text})
        assert status == 200
        assert right(document, [text])
    assert engines["w1"].asked, "it was never tried: the test shows nothing"
    assert len(engines["w2"].asked) == 10


@staged
async def test_an_engine_that_breaks_in_any_way_does_not_take_its_worker_down(stage: Stage) -> None:
    """A mistake in an adapter: the client is told after a while, and the next request is served."""
    edge, engines = await fleet(stage, "w1")
    engines["w1"].failure = KeyError("x")
    status, document = await edge.ask("/v1/embeddings", {"model": MODEL, "input": "one"})
    assert status == 503
    assert "the engine failed" in document["error"]["message"]
    engines["w1"].failure = None
    assert (await edge.ask("/v1/embeddings", {"model": MODEL, "input": "one"}))[0] == 200


@staged
async def test_a_client_that_hangs_up_ends_the_work(stage: Stage) -> None:
    """The engine is told, and the log has the end."""
    edge, engines = await fleet(stage, "w1")
    engines["w1"].seconds = 30.0
    connection = edge.send("/v1/embeddings", {"model": MODEL, "input": "one"})
    await until(lambda: engines["w1"].asked)
    connection.hang_up()
    await until(lambda: engines["w1"].cancelled, within_s=1.0)
    await asyncio.sleep(1.0)
    [ended] = events_of(await request_log(stage), RequestEnded)
    assert ended.reason == "cancelled"


@staged
async def test_a_worker_that_stops_finishes_what_it_has(stage: Stage) -> None:
    """A drain waits for vectors as it does for answers; what comes meanwhile is refused."""
    edge, engines = await fleet(stage, "w1")
    engines["w1"].seconds = 0.8
    connection = edge.send("/v1/embeddings", {"model": MODEL, "input": "one"})
    await until(lambda: engines["w1"].asked)
    stage.workers["w1"].stop()
    status, document = await answer_of(connection)
    assert status == 200
    assert right(document, ["one"])


@staged
async def test_a_worker_that_does_not_get_done_in_time_gives_up(stage: Stage) -> None:
    """The client is told once there is no other."""
    edge, engines = await fleet(stage, "w1")
    engines["w1"].seconds = 50.0
    connection = edge.send("/v1/embeddings", {"model": MODEL, "input": "one"})
    await until(lambda: engines["w1"].asked)
    stage.workers["w1"].stop()
    status, document = await answer_of(connection)
    assert status == 503
    assert document["error"]["code"] == "overloaded"
    assert engines["w1"].cancelled


@staged
async def test_what_no_worker_would_do_is_refused_at_once(stage: Stage) -> None:
    """The engine's own reason, as a 400."""
    edge, engines = await fleet(stage, "w1", "w2")
    body = {"model": MODEL, "input": "one", "dimensions": 4}
    status, document = await edge.ask("/v1/embeddings", body | {"encoding_format": "base64"})
    assert status == 200
    assert base64.b64decode(document["data"][0]["embedding"]) == expected("one", 4)
    status, document = await edge.ask("/v1/embeddings", body | {"dimensions": 9})
    assert status == 400
    assert "8 dimensions, not 9" in document["error"]["message"]
    assert sum(len(engine.asked) for engine in engines.values()) == 2


@staged
async def test_without_a_worker_that_embeds_the_client_is_told_to_come_back(stage: Stage) -> None:
    """The router finds nobody: 503, after the time that any request waits for a worker."""
    edge, engines = await fleet(stage, "w1")
    del engines
    await stage.kill("w1")
    status, document = await edge.ask("/v1/embeddings", {"model": MODEL, "input": "one"})
    assert status == 503
    assert document["error"]["type"] == "server_error"


@given(
    lengths=st.lists(st.integers(1, MESSAGE_TOKENS_MAX + 9) | st.integers(1, 50), max_size=300),
    size=st.integers(4, 2 * REPLY_BYTES),
    first=st.integers(0, 10),
)
def test_messages_hold_every_prompt_once_and_keep_their_bounds(
    lengths: list[int], size: int, first: int
) -> None:
    """In order; a message over a bound has one prompt only."""
    first = min(first, len(lengths))
    plan = messages(lengths, size, first)
    assert [number for one in plan for number in one] == list(range(first, len(lengths)))
    for one in plan:
        assert len(one) == 1 or len(one) * size <= REPLY_BYTES
        assert len(one) == 1 or sum(lengths[number] for number in one) <= MESSAGE_TOKENS_MAX
    assert all(len(one) for one in plan)


@staged
async def test_a_message_is_computed_for_as_long_as_its_edge_waits_for_it(stage: Stage) -> None:
    """Longer than a dead edge is waited for; when the edge dies, its workers stop."""
    edge, engines = await fleet(stage, "w1")
    engines["w1"].seconds = 3 * GONE_S
    body = {"model": MODEL, "input": TEXTS[:4]}
    status, document = await edge.ask("/v1/embeddings", body)
    assert (status, right(document, TEXTS[:4])) == (200, True)
    assert len(engines["w1"].asked) == 1
    engines["w1"].seconds = 100.0
    edge.send("/v1/embeddings", body)
    await until(lambda: len(engines["w1"].asked) == 2)
    await stage.kill("e1")
    took_s = await until(lambda: engines["w1"].cancelled, within_s=60.0)
    assert GONE_S <= took_s <= GONE_S + 3 * CHECK_PERIOD_S
    assert engines["w1"].cancelled == [engines["w1"].asked[1].request]
    await until(lambda: not len(stage.workers["w1"].inflight))


@staged
async def test_a_message_whose_cancellation_is_lost_is_aborted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its edge answers that it does not wait for it any more."""
    monkeypatch.setattr(WorkerRegistry, "cancel", lambda *_, **__: None)
    edge, engines = await fleet(stage, "w1")
    engines["w1"].seconds = 100.0
    connection = edge.send("/v1/embeddings", {"model": MODEL, "input": TEXTS[:4]})
    await until(lambda: engines["w1"].asked)
    connection.hang_up()
    assert await until(lambda: engines["w1"].cancelled) <= 2 * CHECK_PERIOD_S
