"""A video is its tenant's: with the key of another one, it does not exist."""

import msgspec

from headwater.actors.edge.apis.video_jobs import VideoBoard, VideoJob, key_of
from headwater.actors.edge.settings import AccessSettings, HistorySettings
from headwater.events.memory import MemoryTable
from headwater.ops.operator.keys import WantedKey
from headwater.schemas.inference import VideoRequest
from tests.support.data.videos import SUPPORT
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.edge import EdgeWorld

PATH = "/v1/videos"
BODY = {"model": "films", "prompt": "a river"}


def job(tenant: str, id_: str = "video_1", **fields: object) -> VideoJob:
    values = {
        "id": id_,
        "tenant": tenant,
        "model": "m",
        "pool": "p",
        "request": VideoRequest("", "x", 64, 64, 1, 8, 1, 0),
        "tokens": 1,
        "seconds": "1",
        "created_ns": 0,
        "deadline_s": 10,
    }
    return VideoJob(**values | fields)  # type: ignore[arg-type]


def test_another_tenants_video_does_not_exist() -> None:
    """It is in no list, it cannot be read, downloaded or deleted, and it does not count."""
    with EdgeWorld(access=AccessSettings("keys")) as edge:
        edge.serve("films", capabilities=frozenset({"video_generation"}), video_generation=SUPPORT)
        one, two = (
            [(b"authorization", f"Bearer {edge.create_key(WantedKey(tenant))}".encode())]
            for tenant in ("one", "two")
        )
        made = edge.ask(PATH, BODY, headers=one)
        assert made.status == 200, made.body
        id_ = made.document["id"]
        for path, method in (
            (id_, "GET"),
            (f"{id_}/content", "GET"),
            (id_, "DELETE"),
            (f"{id_}?stream=true", "GET"),
        ):
            response = edge.ask(f"{PATH}/{path}", b"", method=method, headers=two)
            assert (response.status, response.document["error"]["code"]) == (404, "video_not_found")
        assert edge.ask(PATH, b"", method="GET", headers=two).document["data"] == []
        shown = edge.ask(PATH, b"", method="GET", headers=one).document["data"]
        assert [video["id"] for video in shown] == [id_]
        for _ in range(15):
            assert edge.ask(PATH, BODY, headers=one).status == 200
        assert edge.ask(PATH, BODY, headers=one).status == 429
        assert edge.ask(PATH, BODY, headers=two).status == 200
        assert edge.ask(f"{PATH}/{id_}", b"", method="DELETE", headers=one).status == 200
        only = f"Bearer {edge.create_key(WantedKey('one', endpoints=('chat',)))}".encode()
        assert edge.ask(PATH, b"", method="GET", headers=[(b"authorization", only)]).status == 403


def test_an_edge_that_stores_nothing_has_no_videos() -> None:
    with EdgeWorld(history=HistorySettings(store=False)) as edge:
        edge.serve("films", capabilities=frozenset({"video_generation"}), video_generation=SUPPORT)
        for body, method in ((BODY, "POST"), (b"", "GET")):
            response = edge.ask(PATH, body, method=method)
            assert (response.status, "stores no videos" in response.document["error"]["message"]) == (
                400,
                True,
            )


async def test_a_board_shows_the_newest_of_what_it_read() -> None:
    """An entry that cannot be read is skipped; one that the table no longer has is found until its marker comes."""
    clock = ManualClock()
    table = MemoryTable(clock)
    board, other = VideoBoard(table), VideoBoard(table)
    stored = await board.create(job("one"))
    assert await other.get("two", "video_1") is None
    assert await other.get("one", "video_1") == stored
    changed = await other.replace(job("one", progress=50), stored.revision, 0)
    assert changed is not None
    assert await board.replace(job("one", progress=60), stored.revision, 0) is None
    board._take([])
    entry = await table.get(key_of(stored.job))
    assert entry is not None
    board._take([entry, entry._replace(value=b"{", revision=9)])
    assert board.find(key_of(stored.job)) == changed
    board._take([entry._replace(value=msgspec.json.encode(stored.job), revision=stored.revision)])
    assert board.find(key_of(stored.job)) == changed, "an older entry"
    board._take([entry._replace(value=None, revision=stored.revision)])
    assert board.find(key_of(stored.job)) == changed, "an older marker"
    board._take([entry._replace(value=None, revision=changed.revision + 1)])
    assert board.all() == []
