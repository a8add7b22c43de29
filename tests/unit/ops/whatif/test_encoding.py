"""Images on virtual time: what encode workers, their embeddings and who chooses them change."""

import json
import random
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from headwater.engines.sim import ZERO, StepTime, read_step_time, write_step_time
from headwater.engines.sim.scheduler import MediaSpan
from headwater.ops.bench.trace import TRACE_BLOCK, Trace, TraceRequest, read
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.report import as_table, report_of
from headwater.ops.whatif.run import RunResult, run
from headwater.ops.whatif.setup import Setup

TOKENS = 1_225
TIMES = StepTime((0.0, 0.0, 10.0), (0.0, 0.0, 5.0), (0.0, 0.0, 40.0))
"""A prompt takes 10 ms, a token 5, images of one step 40."""


def asked(number: int, *images: str, at_ms: float = 0.0, words: int = 100) -> TraceRequest:
    """A request with words that nobody else has before its images."""
    spans = tuple(MediaSpan(image, words + TOKENS * at, TOKENS) for at, image in enumerate(images))
    tokens = words + TOKENS * len(images) + 50
    ids = tuple(range(number * 100, number * 100 + -(-tokens // TRACE_BLOCK)))
    return TraceRequest(f"r{number}", round(at_ms * 1e6), tokens, 2, ids, media=spans)


def many(count: int, different: int, gap_ms: float) -> Trace:
    """Requests with one of some images each."""
    draw = random.Random(1)
    times = sorted(draw.uniform(0, count * gap_ms) for _ in range(count))
    requests = [asked(number, f"i{draw.randrange(different)}", at_ms=at) for number, at in enumerate(times)]
    return Trace("images", tuple(requests))


def first_ms(ran: RunResult) -> list[float]:
    """When each request had its first token, by name."""
    return [one.first_ns / 1e6 for one in sorted(ran.served, key=lambda one: one.request.name)]


def test_a_worker_encodes_in_the_step_that_reaches_the_image() -> None:
    """Once, as long as it keeps the embedding; an encode worker's embedding takes its own time and way instead."""
    trace = Trace("one", (asked(0, "a"), asked(1, "a", at_ms=200)))
    alone = run(trace, Setup(workers=1, step_time=TIMES))
    assert first_ms(alone) == pytest.approx([55, 215])
    apart = run(trace, Setup(workers=1, encode_workers=1, step_time=TIMES))
    way_ms = TOKENS * 7_168 / 20e6
    assert first_ms(apart) == pytest.approx([40 + way_ms + 15, 200 + way_ms + 15])
    found = report_of(apart).media
    assert (found.items, found.encoded_apart, found.encoded_here, found.left, found.saved) == (2, 1, 0, 0, 1)
    assert found.wait_ms.mean == pytest.approx(20 + way_ms)


def test_an_image_is_left_to_an_idle_worker_while_others_are_ahead_of_it() -> None:
    """As by the production rule: with nobody to delay, a serving worker does not wait for another's image."""
    trace = Trace("two", (asked(0, "a"), asked(1, "b", at_ms=1)))
    ran = run(trace, Setup(workers=2, encode_workers=1, step_time=TIMES))
    found = report_of(ran).media
    assert (found.encoded_apart, found.encoded_here, found.left) == (1, 1, 1)
    assert first_ms(ran)[1] == pytest.approx(1 + 55)


def test_images_are_encoded_where_that_is_expected_to_be_sooner() -> None:
    """Learned from the log: an idle encode worker is not asked where reading what it computes takes longer than encoding."""
    trace = many(400, 400, 30.0)
    setup = Setup(workers=3, encode_workers=3, step_time=TIMES, transfer_gb_per_s=0.1)
    found = report_of(run(trace, setup))
    assert found.media.left > 300, "88 ms to read against 40 to encode"
    assert found.media.encoded_apart < 60, "as many as it took to learn that"
    quick = report_of(run(trace, msgspec.structs.replace(setup, transfer_gb_per_s=25.0)))
    assert quick.media.encoded_apart > 60, "as soon as requests that run would be delayed"


def test_the_router_sends_an_image_to_where_it_is_encoded() -> None:
    """Each in turn encodes more; both are simulated the same way each time, and nothing stays counted at a router."""
    trace = many(120, 30, 60.0)
    setup = Setup(workers=2, encode_workers=3, step_time=TIMES)
    aware = run(trace, setup)
    turn = run(trace, msgspec.structs.replace(setup, encode_routing="round_robin"))
    saved = [report_of(ran).media.saved for ran in (aware, turn)]
    assert report_of(aware).media.encoded_apart <= 48 < report_of(turn).media.encoded_apart
    assert saved[0] > saved[1] + 20
    again = run(trace, setup)
    assert report_of(again).digest == report_of(aware).digest
    workers = aware.routers.state.loads.workers
    assert sorted(workers) == ["e000", "e001", "e002", "w000", "w001"]
    assert not any(worker.requests for worker in workers.values())
    assert not aware.routers.state.loads.early
    table = as_table([report_of(aware), report_of(turn)])
    assert "encodes saved" in table
    assert "encode routing" in table


def test_small_caches_save_less() -> None:
    """Embeddings that were dropped are computed again, and the index follows."""
    trace = many(120, 30, 60.0)
    setup = Setup(workers=2, encode_workers=1, step_time=TIMES)
    small = run(trace, msgspec.structs.replace(setup, embeddings_mib=60))
    assert report_of(small).media.saved < report_of(run(trace, setup)).media.saved
    index = small.routers.state.index
    assert index.blocks["e000"] == small.encoding.encoders["e000"].report().used_blocks > 0


def test_prefill_workers_wait_for_embeddings_and_decode_workers_do_not() -> None:
    """A prompt that was handed off has its images' KV with it."""
    trace = many(20, 5, 80.0)
    setup = Setup(workers=0, prefill_workers=1, decode_workers=1, encode_workers=1, step_time=TIMES)
    ran = run(trace, setup)
    handed = [one for one in ran.served if one.prefill_worker]
    assert len(ran.served) == 20
    assert any(one.encoding_ns for one in handed)
    without = run(trace, msgspec.structs.replace(setup, encode_workers=0))
    [encoded] = [worker.encoded for worker in without.workers if worker.shape.role == "prefill"]
    handed = [one for one in without.served if one.prefill_worker]
    assert encoded == len({one.request.media[0].id for one in handed}) > 1


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_media_of_every_kind_are_encoded_apart(kind: Literal["image", "video", "audio"]) -> None:
    """Each once."""
    item = MediaSpan("v", 100 + TOKENS, TOKENS, kind)
    requests = [asked(number, "a", "v", at_ms=200 * number) for number in range(2)]
    mixed = [one._replace(media=(one.media[0], item)) for one in requests]
    found = report_of(run(Trace("mixed", tuple(mixed)), Setup(workers=1, encode_workers=1, step_time=TIMES)))
    assert (found.media.items, found.media.encoded_apart, found.media.encoded_here) == (4, 2, 0)
    assert found.media.wait_ms.mean > 0


def written(path: Path, media: list[dict[str, object]], name: str = "media") -> Path:
    """A trace of one line."""
    line = {
        "timestamp": 0,
        "input_length": 600,
        "output_length": 3,
        "hash_ids": [0, 1],
        name: media,
    }
    path.write_text(json.dumps(line))
    return path


def test_media_of_a_trace_have_tokens_or_a_size(tmp_path: Path) -> None:
    """By the simulated model's rules: pixels, frames of two each, tokens of 40 ms."""
    media: list[dict[str, object]] = [
        {"id": "cat", "start": 0, "tokens": 300, "kind": "audio"},
        {"id": "film", "start": 300, "kind": "video", "frames": 5, "width": 280, "height": 140},
        {"id": 7, "start": 450, "width": 280, "height": 140},
        {"id": "sound", "start": 500, "kind": "audio", "seconds": 2},
    ]
    [found] = read(written(tmp_path / "t", media)).requests
    assert found.media == (
        MediaSpan("cat", 0, 300, "audio"),
        MediaSpan("film", 300, 150, "video"),
        MediaSpan("7", 450, 50, "image"),
        MediaSpan("sound", 500, 50, "audio"),
    )


def test_traces_with_images_only_name_them_so(tmp_path: Path) -> None:
    """The field of traces that were written before there were other kinds."""
    images: list[dict[str, object]] = [
        {"id": "cat", "start": 10, "tokens": 300},
        {"id": 7, "start": 310, "width": 280, "height": 140},
    ]
    path = written(tmp_path / "t", images, "images")
    [found] = read(path).requests
    assert found.media == (MediaSpan("cat", 10, 300), MediaSpan("7", 310, 50))
    path.write_text(path.read_text().replace("}]", '}], "media": [{"id": 1, "start": 400, "tokens": 2}]'))
    with pytest.raises(ConfigError, match="list all of them as media"):
        read(path)


@pytest.mark.parametrize(
    ("media", "reason"),
    [
        ([{"id": 1, "start": 0}], "needs its tokens, or width and height"),
        ([{"id": 1, "start": 400, "tokens": 201}], "within the prompt"),
        ([{"id": 1, "start": 9, "tokens": 2}, {"id": 2, "start": 10, "tokens": 2}], "do not overlap"),
        ([{"id": 1, "start": 9, "width": 30_000, "height": 30}], "too narrow"),
        ([{"id": 1, "start": 9, "token": 2}], "unknown field"),
        (
            [{"id": 1, "start": 9, "kind": "video", "width": 9, "height": 9}],
            "video 1 needs its tokens, or frames",
        ),
        ([{"id": 1, "start": 9, "kind": "audio"}], "audio 1 needs its tokens, or seconds"),
        ([{"id": 1, "start": 9, "kind": "audio", "seconds": 99}], "too long"),
        ([{"id": 1, "start": 9, "kind": "smell"}], "Invalid enum value"),
    ],
)
def test_wrong_media_are_named(tmp_path: Path, media: list[dict[str, object]], reason: str) -> None:
    """With file and line."""
    with pytest.raises(ConfigError, match=rf"t, line 1: .*{reason}"):
        read(written(tmp_path / "t", media))


def test_step_times_may_have_those_of_images(tmp_path: Path) -> None:
    """Nine numbers, or a third part of the file; else the defaults."""
    assert read_step_time("1,2,3,4,5,6,7,8,9") == StepTime((1, 2, 3), (4, 5, 6), (7, 8, 9))
    assert read_step_time("1,2,3,4,5,6").encode_ms == StepTime().encode_ms
    path = tmp_path / "times.json"
    path.write_text('{"prefill_ms":[1,2,3],"decode_ms":[4,5,6],"encode_ms":[7,8,9]}')
    assert read_step_time(str(path)).encode_ms == (7, 8, 9)
    for value in (StepTime(), ZERO, StepTime((0.1, 2e-9, 3), (4, 5, 6))):
        assert read_step_time(write_step_time(value)) == value
    with pytest.raises(ValueError, match="finite"):
        read_step_time("1,2,3,4,5,inf")
    with pytest.raises(ValueError, match="six or nine numbers"):
        read_step_time("1,2,3")
