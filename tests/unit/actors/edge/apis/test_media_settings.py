"""The settings with which a model's workers process media, through the whole edge: in ids, and in what routers are asked."""

from collections.abc import Iterator

import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.engines.model_files import byte_model_files
from headwater.engines.sim.model import media_support
from headwater.schemas.routing import Constraints
from tests.support.clients.media_chat import content
from tests.support.clients.pictures import picture_url
from tests.support.media.recordings import tone, wav
from tests.support.worlds.edge import EVERYTHING, EdgeWorld
from tests.unit.actors.edge.apis.audio.test_requests import ask as transcribe
from tests.unit.actors.edge.apis.audio.test_requests import serve as serve_whisper


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """Two models that differ in these settings, and one that transcribes."""
    with EdgeWorld(intake=MediaIntake()) as world:
        for name in ("one", "two"):
            files = byte_model_files(name)._replace(media_processor=name)
            media = media_support()
            world.serve(name, files, media=media, capabilities=EVERYTHING | media.capabilities)
        serve_whisper(world)
        yield world


def asked(edge: EdgeWorld, model: str, *parts: str) -> tuple[Constraints, tuple[str, ...]]:
    """What the router was asked for a chat, and the ids of its media."""
    edge.queries.clear()
    edge.given.clear()
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": content(*parts)}]}
    answer = edge.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    [query], [given] = edge.queries, edge.given
    return query.constraints, tuple(item.id for item in given.media)


def digest(edge: EdgeWorld, model: str) -> str:
    [card] = [one for one in edge.models.cards() if one.name == model]
    return card.media_processor


def test_requests_with_media_go_to_workers_with_the_settings_of_their_ids(edge: EdgeWorld) -> None:
    """The same pixels have other ids for a model with other settings. Requests of text go to any worker."""
    picture = (picture_url(1), "What is this?")
    (one, first), (two, second) = asked(edge, "one", *picture), asked(edge, "two", *picture)
    assert one.media_processor == digest(edge, "one") != ""
    assert two.media_processor == digest(edge, "two") != one.media_processor
    assert first == asked(edge, "one", *picture)[1]
    assert len({*first, *second}) == 2
    assert asked(edge, "one", "What is this?") == (Constraints(needs=one.needs[:0]), ())


def test_so_do_recordings(edge: EdgeWorld) -> None:
    """Whose samples a transcribing model's settings turn into its input."""
    edge.queries.clear()
    assert transcribe(edge, wav(tone(1.0))).status == 200
    assert edge.queries[0].constraints.media_processor == digest(edge, "whisper") != ""
