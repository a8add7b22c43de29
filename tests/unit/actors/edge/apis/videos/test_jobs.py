"""Video jobs through a whole fleet of production actors: they outlive their client, their worker and their edges."""

import asyncio
from typing import Any

import msgspec

from headwater.actors.edge.answer.jobs import DEATHS_MAX
from headwater.actors.edge.apis.app import DEFAULTS
from headwater.actors.edge.settings import VideoSettings
from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from headwater.actors.worker.jobs import ABANDONED_S
from headwater.engines.engine import EngineError, RequestRejected
from headwater.ops.sim.fleet import MODEL
from headwater.schemas.events import RequestAccepted, RequestEnded
from headwater.schemas.inference import VideoRequest
from tests.support.data.vectors import Edge, answer_of
from tests.support.data.videos import VideoEngine, video
from tests.support.worlds.virtual import Stage, logged_requests, staged, until

PATH = "/v1/videos"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a river at its source", "seed": 7}
WANTED = VideoRequest("", "a river at its source", 64, 64, frames=17, fps=8, steps=4, seed=7)


class Fleet:
    """A router, edges, and workers that generate videos."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.engines: dict[str, VideoEngine] = {}
        self.edges: dict[str, Edge] = {}

    async def worker(self, name: str) -> VideoEngine:
        made = (await self.stage.engine(name, VideoEngine)).engine
        assert isinstance(made, VideoEngine)
        self.engines[name] = made
        return made

    async def edge(self, name: str, **more: Any) -> Edge:
        made = self.edges[name] = Edge(self.stage, name, **more)
        await made.start()
        return made

    def asked(self) -> list[tuple[str, VideoRequest]]:
        return [(name, one) for name, engine in self.engines.items() for one in engine.asked]


async def fleet(stage: Stage, *workers: str, edges: tuple[str, ...] = ("e1",)) -> Fleet:
    made = Fleet(stage)
    for name in workers:
        await made.worker(name)
    await stage.router("r1")
    for name in edges:
        await made.edge(name)
    return made


async def created(edge: Edge, **fields: Any) -> str:
    status, document = await edge.ask(PATH, BODY | fields)
    assert (status, document["object"], document["status"]) == (200, "video", "queued"), document
    return str(document["id"])


async def ended(edge: Edge, id_: str, within_s: float = 60.0) -> dict[str, Any]:
    clock = asyncio.get_running_loop()
    until_s = clock.time() + within_s
    while True:
        status, document = await edge.ask(f"{PATH}/{id_}")
        assert status == 200, document
        if document["status"] in ("completed", "failed"):
            return dict(document)
        assert clock.time() < until_s, document
        await asyncio.sleep(0.2)


async def content(edge: Edge, id_: str) -> bytes:
    connection = edge.send(f"{PATH}/{id_}/content")
    parts = []
    while (part := await connection.part()) is not None:
        parts.append(part)
    assert connection.status == 200, parts
    assert connection.headers[b"content-type"] == b"video/mp4"
    return b"".join(parts)


@staged
async def test_a_job_completes_and_any_edge_has_it(stage: Stage) -> None:
    """Queued, then in progress with a rising percentage, then a file; the log has one request, the worker keeps nothing."""
    made = await fleet(stage, "w1", edges=("e1", "e2"))
    id_ = await created(made.edges["e1"], size="128x64", seconds="1.5", steps=10)
    seen: list[tuple[str, int]] = []
    while not seen or seen[-1][0] != "completed":
        status, document = await made.edges["e2"].ask(f"{PATH}/{id_}")
        assert status == 200
        state = (document["status"], document["progress"])
        if not seen or state != seen[-1]:
            seen.append(state)
        await asyncio.sleep(0.1)
    assert seen[0] == ("queued", 0)
    assert seen[-1] == ("completed", 100)
    assert [status for status, _ in seen[1:-1]] == ["in_progress"] * (len(seen) - 2)
    assert len(seen) > 3
    assert seen == sorted(seen, key=lambda state: state[1])
    assert (document["size"], document["seconds"], document["frames"]) == ("128x64", "1.5", 13)
    assert document["expires_at"] > document["completed_at"] >= document["created_at"]
    wanted = msgspec.structs.replace(WANTED, width=128, frames=13, steps=10)
    assert await content(made.edges["e2"], id_) == video(wanted)
    await until(lambda: not len(stage.workers["w1"].inflight))
    [accepted] = await logged_requests(stage, RequestAccepted)
    assert (accepted.endpoint, accepted.request) == ("videos", f"{id_}-1")
    [end] = await logged_requests(stage, RequestEnded)
    assert (end.request, end.reason) == (accepted.request, "stop")


@staged
async def test_an_edge_that_dies_costs_no_step(stage: Stage) -> None:
    """Another one follows the worker where the job was."""
    made = await fleet(stage, "w1", edges=("e1", "e2"))
    id_ = await created(made.edges["e1"], steps=40)
    await until(lambda: made.engines["w1"].asked)
    await asyncio.sleep(5.0)
    await stage.kill("e1")
    document = await ended(made.edges["e2"], id_)
    assert document["status"] == "completed", document
    assert len(made.asked()) == 1
    assert not made.engines["w1"].cancelled
    assert await content(made.edges["e2"], id_) == video(msgspec.structs.replace(WANTED, steps=40))
    assert [one.request for one in await logged_requests(stage, RequestAccepted)] == [f"{id_}-1", f"{id_}-2"]


@staged
async def test_the_only_edge_dies_and_its_next_incarnation_goes_on(stage: Stage) -> None:
    """In less time than a worker waits for an edge: at the same step, though requests of other kinds are aborted before. Later: from the
    beginning, with the same noise."""
    made = await fleet(stage, "w1")
    id_ = await created(made.edges["e1"], steps=100)
    await until(lambda: made.engines["w1"].asked)
    # It has stored where the job is by then.
    await asyncio.sleep(1.0)
    await stage.kill("e1")
    await asyncio.sleep(GONE_S + 3 * CHECK_PERIOD_S)
    await made.edge("e1")
    assert (await ended(made.edges["e1"], id_, 120.0))["status"] == "completed"
    assert len(made.asked()) == 1
    assert not made.engines["w1"].cancelled
    late = await created(made.edges["e1"], steps=100)
    await until(lambda: len(made.asked()) == 2)
    await stage.kill("e1")
    await until(lambda: made.engines["w1"].cancelled, within_s=ABANDONED_S + 20)
    await made.edge("e1")
    assert (await ended(made.edges["e1"], late, 120.0))["status"] == "completed"
    assert await content(made.edges["e1"], late) == video(msgspec.structs.replace(WANTED, steps=100))
    assert len(made.asked()) == 3


@staged
async def test_an_edge_that_drains_gives_its_jobs_to_another_at_once(stage: Stage) -> None:
    made = await fleet(stage, "w1", edges=("e1", "e2"))
    id_ = await created(made.edges["e1"], steps=40)
    await until(lambda: made.engines["w1"].asked)
    made.edges["e1"].actor.stop()
    document = await ended(made.edges["e2"], id_)
    assert document["status"] == "completed", document
    assert len(made.asked()) == 1
    assert not made.engines["w1"].cancelled
    reasons = [(one.request, one.reason) for one in await logged_requests(stage, RequestEnded)]
    assert reasons == [(f"{id_}-1", "cancelled"), (f"{id_}-2", "stop")]


@staged
async def test_a_worker_that_is_killed_is_replaced(stage: Stage) -> None:
    """The other begins with the same noise."""
    made = await fleet(stage, "w1", "w2")
    id_ = await created(made.edges["e1"], steps=20)
    await until(made.asked)
    first = made.asked()[0][0]
    await asyncio.sleep(3.0)
    await stage.kill(first)
    document = await ended(made.edges["e1"], id_)
    assert document["status"] == "completed", document
    assert {name for name, _ in made.asked()} == {"w1", "w2"}
    assert await content(made.edges["e1"], id_) == video(msgspec.structs.replace(WANTED, steps=20))
    [end] = await logged_requests(stage, RequestEnded)
    assert (end.reason, end.migrations) == ("stop", 1)


@staged
async def test_a_job_that_ends_its_workers_fails(stage: Stage) -> None:
    """With the reason, and no third worker is tried."""
    made = await fleet(stage, "w1", "w2", "w3")
    id_ = await created(made.edges["e1"], steps=20)
    for number in range(1, DEATHS_MAX + 1):
        await until(lambda number=number: len(made.asked()) == number)  # type: ignore[misc]
        busy = next(name for name, _ in made.asked() if stage.fleet.processes[name].alive)
        await stage.kill(busy)
    document = await ended(made.edges["e1"], id_)
    assert (document["status"], document["error"]["code"]) == ("failed", "request_ended_workers")
    assert len(made.asked()) == DEATHS_MAX
    status, refused = await made.edges["e1"].ask(f"{PATH}/{id_}/content")
    assert (status, refused["error"]["code"]) == (400, "video_not_completed")
    [end] = await logged_requests(stage, RequestEnded)
    assert end.reason == "error"


@staged
async def test_what_no_engine_would_do_fails_with_the_engines_reason(stage: Stage) -> None:
    """And an engine that fails costs a try."""
    made = await fleet(stage, "w1", "w2")
    made.engines["w1"].failure = EngineError("out of memory")
    for _ in range(6):
        assert (await ended(made.edges["e1"], await created(made.edges["e1"])))["status"] == "completed"
    assert made.engines["w1"].asked, "it was never tried: the test shows nothing"
    for engine in made.engines.values():
        engine.failure = RequestRejected("it takes no negative prompt", param="negative_prompt")
    asked = len(made.asked())
    document = await ended(made.edges["e1"], await created(made.edges["e1"]))
    assert (document["status"], document["error"]["code"]) == ("failed", "invalid_value")
    assert "it takes no negative prompt" in document["error"]["message"]
    assert len(made.asked()) == asked + 1


@staged
async def test_a_job_waits_for_a_worker(stage: Stage) -> None:
    """For longer than any request would search for one."""
    made = await fleet(stage, "w1")
    await stage.kill("w1")
    id_ = await created(made.edges["e1"])
    await asyncio.sleep(90.0)
    assert (await made.edges["e1"].ask(f"{PATH}/{id_}"))[1]["status"] == "queued"
    await made.worker("w1")
    document = await ended(made.edges["e1"], id_, 120.0)
    assert document["status"] == "completed", document


@staged
async def test_a_deleted_job_frees_its_worker(stage: Stage) -> None:
    """Whichever edge deletes it; there is no sign of it afterwards."""
    made = await fleet(stage, "w1", edges=("e1", "e2"))
    id_ = await created(made.edges["e1"], steps=100)
    await until(lambda: made.engines["w1"].asked)
    await asyncio.sleep(2.0)
    status, document = await made.edges["e2"].ask(f"{PATH}/{id_}", method="DELETE")
    assert (status, document) == (200, {"id": id_, "object": "video.deleted", "deleted": True})
    await until(lambda: made.engines["w1"].cancelled, within_s=3.0)
    await until(lambda: not len(stage.workers["w1"].inflight), within_s=1.0)
    for edge in made.edges.values():
        for path in (f"{PATH}/{id_}", f"{PATH}/{id_}/content"):
            status, document = await edge.ask(path)
            assert (status, document["error"]["code"]) == (404, "video_not_found")
        assert (await edge.ask(PATH))[1]["data"] == []
    [end] = await logged_requests(stage, RequestEnded)
    assert end.reason == "cancelled"
    done = await created(made.edges["e1"])
    await ended(made.edges["e1"], done)
    assert (await made.edges["e2"].ask(f"{PATH}/{done}", method="DELETE"))[0] == 200
    assert not [key for key in stage.fleet.store.stored._entries if ".video." in key], (
        "the file is still there"
    )


@staged
async def test_the_progress_of_a_job_is_a_stream_of_events(stage: Stage) -> None:
    made = await fleet(stage, "w1", edges=("e1", "e2"))
    id_ = await created(made.edges["e1"], steps=10)
    connection = made.edges["e2"].send(f"{PATH}/{id_}?stream=true")
    blocks = b""
    while (part := await connection.part()) is not None:
        blocks += part
    shown = [msgspec.json.decode(block.split(b"data: ")[1]) for block in blocks.split(b"\n\n")[:-1]]
    kinds = [event["type"] for event in shown]
    assert kinds[0] == "video.queued"
    assert kinds[-1] == "video.completed"
    assert set(kinds[1:-1]) == {"video.in_progress"}
    assert len(kinds) > 4
    progress = [event["video"]["progress"] for event in shown]
    assert progress == sorted(progress)
    doomed = await created(made.edges["e1"], steps=100)
    connection = made.edges["e2"].send(f"{PATH}/{doomed}?stream=true")
    await connection.part()
    await made.edges["e1"].ask(f"{PATH}/{doomed}", method="DELETE")
    last = b""
    while (part := await connection.part()) is not None:
        last = part
    assert last.startswith(b"event: video.deleted")


@staged
async def test_a_list_has_pages_and_only_so_many_jobs_are_in_flight(stage: Stage) -> None:
    """The newest first."""
    made = await fleet(stage, "w1", edges=("e1", "e2"))
    ids = []
    for _ in range(16):
        ids.append(await created(made.edges["e1"], steps=100))
        await asyncio.sleep(1.0)
    for edge in made.edges.values():
        status, document = await edge.ask(PATH, BODY)
        assert (status, document["error"]["code"]) == (429, "video_jobs_limit")
    _, page = await made.edges["e2"].ask(f"{PATH}?limit=10")
    assert [one["id"] for one in page["data"]] == ids[::-1][:10]
    assert (page["has_more"], page["last_id"]) == (True, ids[6])
    _, page = await made.edges["e2"].ask(f"{PATH}?after={ids[6]}&limit=10")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[:6][::-1], False)
    _, page = await made.edges["e2"].ask(f"{PATH}?order=asc&limit=1")
    assert [one["id"] for one in page["data"]] == ids[:1]
    assert (await made.edges["e1"].ask(f"{PATH}/{ids[0]}", method="DELETE"))[0] == 200
    await created(made.edges["e1"])


@staged
async def test_a_job_has_a_time_limit_and_expires(stage: Stage) -> None:
    """What is not completed by then fails, and its worker stops; the record goes, too."""
    made = await fleet(stage, "w1", edges=())
    videos = VideoSettings(jobs_max=1, timeout_s=20, ttl_s=30)
    await made.edge("e1", settings=DEFAULTS._replace(videos=videos))
    id_ = await created(made.edges["e1"], steps=100)
    document = await ended(made.edges["e1"], id_)
    assert document["completed_at"] is None
    assert 15 <= document["expires_at"] - document["created_at"] - 30 <= 25
    assert (document["status"], document["error"]["code"]) == ("failed", "video_timeout")
    await until(lambda: made.engines["w1"].cancelled, within_s=5.0)
    # One that has ended does not count as in flight.
    await created(made.edges["e1"])
    await asyncio.sleep(35.0)
    status, gone = await answer_of(made.edges["e1"].send(f"{PATH}/{id_}"))
    assert (status, gone["error"]["code"]) == (404, "video_not_found")
