"""Images through a whole fleet of production actors: placed, followed, fetched in pieces, retried, cancelled, counted."""

import asyncio
import base64
from functools import partial
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.saga.types import PLACE_S_MAX
from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from headwater.actors.worker.jobs import ABANDONED_S, EXPIRY_PERIOD_S, FileJobs
from headwater.engines.engine import EngineError, RequestRejected
from headwater.ops.sim.fleet import MODEL
from headwater.ops.sim.network import SimConnection
from headwater.schemas.events import RequestAccepted, RequestEnded, RequestRouted
from headwater.schemas.inference import ImageRequest
from headwater.schemas.routing import Decision
from tests.support.data.pictures import PictureEngine, picture, preview
from tests.support.data.vectors import Edge, answer_of
from tests.support.worlds.virtual import Stage, events_of, logged_requests, staged, until

PATH = "/v1/images/generations"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a spring in the hills", "seed": 7}
WANTED = ImageRequest("", "a spring in the hills", 64, 64, steps=4, seed=7)


async def fleet(stage: Stage, *workers: str) -> tuple[Edge, dict[str, PictureEngine]]:
    """A router r1, an edge, and workers that generate images."""
    engines = {}
    for name in workers:
        made = (await stage.engine(name, PictureEngine)).engine
        assert isinstance(made, PictureEngine)
        engines[name] = made
    await stage.router("r1")
    edge = Edge(stage)
    await edge.start()
    return edge, engines


def _asked(engines: dict[str, PictureEngine], number: int) -> bool:
    return sum(len(engine.asked) for engine in engines.values()) == number


async def events(connection: SimConnection) -> list[dict[str, Any]]:
    """The events of a stream, to its end."""
    parts = []
    while (part := await connection.part()) is not None:
        parts.append(part)
    found = []
    for block in b"".join(parts).split(b"\n\n")[:-1]:
        name, data = block.split(b"\n")
        document = msgspec.json.decode(data.removeprefix(b"data: "))
        assert name.decode() == f"event: {document['type']}"
        found.append(document)
    return found


def images_of(document: Any) -> list[bytes]:
    return [base64.b64decode(entry["b64_json"]) for entry in document["data"]]


@staged
async def test_images_are_fetched_in_pieces_and_in_order(stage: Stage) -> None:
    """Each with its own seed; the worker keeps nothing; the log has one decision and one end."""
    edge, engines = await fleet(stage, "w1")
    status, document = await edge.ask(PATH, BODY | {"n": 3, "size": "128x64", "output_format": "webp"})
    assert status == 200, document
    wanted = msgspec.structs.replace(WANTED, width=128, format="webp")
    assert images_of(document) == [picture(wanted, number) for number in range(3)]
    assert len(set(images_of(document))) == 3
    assert (document["size"], document["output_format"], document["seed"]) == ("128x64", "webp", 7)
    [asked] = engines["w1"].asked
    assert (asked.count, asked.first, asked.steps, asked.previews) == (3, 0, 4, 0)
    await until(lambda: not len(stage.workers["w1"].inflight))
    [decision] = events_of(await stage.records(), Decision)
    assert decision.constraints.needs == ("image_generation",)
    [accepted] = await logged_requests(stage, RequestAccepted)
    assert (accepted.endpoint, accepted.choices, accepted.stream) == ("images", 3, False)
    [ended] = await logged_requests(stage, RequestEnded)
    assert (ended.request, ended.reason) == (accepted.request, "stop")


@staged
async def test_a_request_counts_as_load_until_its_files_are_fetched(stage: Stage) -> None:
    edge, engines = await fleet(stage, "w1")
    connection = edge.send(PATH, BODY)
    await until(lambda: engines["w1"].asked)
    loads = stage.routers["r1"].state.loads.workers["w1"]
    await until(lambda: list(loads.requests) == [engines["w1"].asked[0].request])
    assert (await answer_of(connection))[0] == 200
    await until(lambda: not stage.routers["r1"].state.loads.workers["w1"].requests)


@staged
async def test_a_stream_has_previews_and_steps_and_then_the_image(stage: Stage) -> None:
    """Progress only for those who ask for it; the last event is the image."""
    edge, _ = await fleet(stage, "w1")
    body = BODY | {"stream": True, "partial_images": 2}
    found = await events(edge.send(PATH, body | {"progress": True}))
    kinds = [event["type"].removeprefix("image_generation.") for event in found]
    assert kinds[-1] == "completed"
    assert kinds.count("completed") == 1
    shown = [event for event in found if event["type"].endswith("partial_image")]
    assert [event["partial_image_index"] for event in shown] == [0, 1]
    assert [base64.b64decode(event["b64_json"]) for event in shown] == [preview(0, 1), preview(0, 2)]
    steps = [event["step"] for event in found if event["type"].endswith("progress")]
    assert steps == sorted(steps)
    assert {1, 2, 3, 4} <= set(steps)
    assert base64.b64decode(found[-1]["b64_json"]) == picture(WANTED, 0)
    assert found[-1]["usage"]["input_tokens"] > 0
    plain = await events(edge.send(PATH, body))
    assert [event["type"].removeprefix("image_generation.") for event in plain] == [
        "partial_image",
        "partial_image",
        "completed",
    ]


@staged
async def test_a_worker_that_is_killed_is_replaced_and_no_image_comes_twice(stage: Stage) -> None:
    """The other generates only what is missing, from the same noise: the answer is the one without a failure."""
    edge, engines = await fleet(stage, "w1", "w2")
    body = {key: value for key, value in BODY.items() if key != "seed"} | {"n": 3}
    connection = edge.send(PATH, body)
    await until(lambda: any(engine.asked for engine in engines.values()))
    first, other = sorted(engines, key=lambda name: not engines[name].asked)
    # In the middle of the second image.
    await asyncio.sleep(3.2)
    await stage.kill(first)
    status, document = await answer_of(connection)
    assert status == 200, document
    wanted = msgspec.structs.replace(WANTED, seed=engines[first].asked[0].seed)
    assert images_of(document) == [picture(wanted, number) for number in range(3)]
    assert [(one.first, one.seed) for one in engines[other].asked] == [(1, wanted.seed)]
    [ended] = await logged_requests(stage, RequestEnded)
    assert (ended.reason, ended.migrations) == ("stop", 1)


@staged
async def test_a_stream_whose_worker_is_killed_shows_no_preview_twice(stage: Stage) -> None:
    edge, engines = await fleet(stage, "w1", "w2")
    connection = edge.send(PATH, BODY | {"stream": True, "partial_images": 2})
    await until(lambda: any(engine.asked for engine in engines.values()))
    first, other = sorted(engines, key=lambda name: not engines[name].asked)
    await asyncio.sleep(1.8)
    await stage.kill(first)
    found = await events(connection)
    assert [event.get("partial_image_index") for event in found] == [0, 1, None]
    assert base64.b64decode(found[-1]["b64_json"]) == picture(WANTED, 0)
    assert engines[other].asked


@staged
async def test_a_request_that_ends_two_workers_is_not_tried_on_a_third(stage: Stage) -> None:
    """One clear error, and one end in the log."""
    edge, engines = await fleet(stage, "w1", "w2", "w3")
    connection = edge.send(PATH, BODY)
    for number in (1, 2):
        await until(partial(_asked, engines, number))
        busy = next(name for name in engines if engines[name].asked and stage.fleet.processes[name].alive)
        await stage.kill(busy)
    status, document = await answer_of(connection)
    assert (status, document["error"]["code"]) == (502, "request_ended_workers")
    assert sum(len(engine.asked) for engine in engines.values()) == 2
    [ended] = await logged_requests(stage, RequestEnded)
    assert ended.reason == "error"


@staged
async def test_a_stream_that_has_begun_ends_with_an_error_event(stage: Stage) -> None:
    """And one that has not is an error of its own."""
    edge, engines = await fleet(stage, "w1")
    body = BODY | {"stream": True, "partial_images": 1}
    connection = edge.send(PATH, body)
    await until(lambda: engines["w1"].asked)
    await asyncio.sleep(0.9)
    await stage.kill("w1")
    found = await events(connection)
    assert [event["type"] for event in found] == ["image_generation.partial_image", "error"]
    assert found[-1]["error"]["code"] == "overloaded"
    status, document = await edge.ask(PATH, body)
    assert (status, document["error"]["code"]) == (503, "overloaded")


@staged
async def test_an_engine_that_fails_or_gives_too_little_costs_a_try(stage: Stage) -> None:
    edge, engines = await fleet(stage, "w1", "w2")
    engines["w1"].failure = EngineError("out of memory")
    for _ in range(6):
        assert (await edge.ask(PATH, BODY))[0] == 200
    assert engines["w1"].asked, "it was never tried: the test shows nothing"
    engines["w1"].failure, engines["w1"].too_few = None, 1
    engines["w1"].asked.clear()
    for _ in range(6):
        _, document = await edge.ask(PATH, BODY)
        assert images_of(document) == [picture(WANTED, 0)]
    assert engines["w1"].asked, "it was never tried: the test shows nothing"


@staged
async def test_what_no_engine_would_do_is_refused_at_once(stage: Stage) -> None:
    """With the engine's reason and the field."""
    edge, engines = await fleet(stage, "w1", "w2")
    for engine in engines.values():
        engine.failure = RequestRejected("this model takes no negative prompt", param="negative_prompt")
    status, document = await edge.ask(PATH, BODY | {"negative_prompt": "fog"})
    assert (status, document["error"]["param"]) == (400, "negative_prompt")
    assert sum(len(engine.asked) for engine in engines.values()) == 1


@staged
async def test_a_client_that_hangs_up_ends_the_work(stage: Stage) -> None:
    """The engine stops at its next step, and the log has the end."""
    edge, engines = await fleet(stage, "w1")
    connection = edge.send(PATH, BODY | {"steps": 100})
    await until(lambda: engines["w1"].asked)
    await asyncio.sleep(2.0)
    connection.hang_up()
    await until(lambda: engines["w1"].cancelled, within_s=1.0)
    await until(lambda: not len(stage.workers["w1"].inflight), within_s=1.0)
    [ended] = await logged_requests(stage, RequestEnded)
    assert ended.reason == "cancelled"


@staged
async def test_an_image_that_takes_longer_than_a_worker_waits_for_its_edge(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge asks about it all the while, about twice per step: a reply comes when there is something new."""
    replies = []
    reply = FileJobs._reply_when_changed

    async def counted(jobs: FileJobs, *arguments: Any) -> None:
        replies.append(arguments)
        await reply(jobs, *arguments)

    monkeypatch.setattr(FileJobs, "_reply_when_changed", counted)
    edge, _ = await fleet(stage, "w1")
    status, document = await edge.ask(PATH, BODY | {"steps": 100})
    assert (status, images_of(document)) == (200, [picture(WANTED, 0)])
    assert 100 * PictureEngine.step_s > ABANDONED_S + 2 * EXPIRY_PERIOD_S
    assert 50 < len(replies) < 250


@staged
async def test_what_a_worker_computed_before_it_died_is_no_part_of_the_search_for_another(
    stage: Stage,
) -> None:
    """The only one is killed after longer than a search takes, and is there again soon."""
    edge, engines = await fleet(stage, "w1")
    connection = edge.send(PATH, BODY | {"steps": 40})
    await until(lambda: engines["w1"].asked)
    await asyncio.sleep(PLACE_S_MAX + 5.0)
    await stage.kill("w1")
    # The edge has noticed by then, and searches.
    await asyncio.sleep(8.0)
    await stage.engine("w1", PictureEngine)
    status, document = await answer_of(connection)
    assert (status, images_of(document)) == (200, [picture(WANTED, 0)])


@staged
async def test_an_edge_that_dies_leaves_nothing_behind_at_the_worker(stage: Stage) -> None:
    """Nobody waits for the images any more: they are aborted, long before a job that any edge may follow would be."""
    edge, engines = await fleet(stage, "w1")
    edge.send(PATH, BODY | {"steps": 100})
    await until(lambda: engines["w1"].asked)
    await asyncio.sleep(1.0)
    await stage.kill("e1")
    took_s = await until(lambda: engines["w1"].cancelled, within_s=60.0)
    assert GONE_S <= took_s <= GONE_S + 3 * CHECK_PERIOD_S < ABANDONED_S
    assert not len(stage.workers["w1"].inflight)


@staged
async def test_a_worker_that_drains_finishes_its_images_and_one_out_of_time_gives_up(stage: Stage) -> None:
    """The files are fetched before it ends; the client of the other is told to come back."""
    edge, engines = await fleet(stage, "w1", "w2")
    quick = edge.send(PATH, BODY | {"steps": 1})
    await until(lambda: any(engine.asked for engine in engines.values()))
    first = next(name for name in engines if engines[name].asked)
    stage.workers[first].stop()
    status, document = await answer_of(quick)
    assert (status, images_of(document)) == (200, [picture(WANTED, 0)])
    other = next(name for name in engines if not engines[name].asked)
    slow = edge.send(PATH, BODY | {"steps": 100})
    await until(lambda: engines[other].asked)
    stage.workers[other].stop()
    status, document = await answer_of(slow)
    assert (status, document["error"]["code"]) == (503, "overloaded")
    assert engines[other].cancelled
    routed = await logged_requests(stage, RequestRouted)
    assert [one.worker for one in routed[:2]] == [first, other]
