"""Encode, prefill and decode apart with real vLLM and real NIXL: the same tokens as together, whatever is killed or cancelled."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headwater.actors.worker.serving.orphans import CHECK_PERIOD_S, GONE_S
from tests.support.clients.encoding import encode_legs, until_it_encodes
from tests.support.clients.media_chat import content as media_content
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.media.images import data_url
from tests.support.media.recordings import film
from tests.support.processes.disaggregated import (
    ANSWER_TOKENS,
    REFUSALS,
    Tokens,
    answers,
    body,
    handed_over,
    refused_references,
    under_kills,
)
from tests.support.processes.encode_leg import (
    EDGE,
    RESTARTED_S_MAX,
    STATES,
    Kill,
    check_kill,
    epochs,
    has_nothing_left,
    killed_in_state,
    killed_with_a_request,
    kills,
)
from tests.support.processes.fleet import FleetProcess, descendants, fleet

pytestmark = [
    pytest.mark.vllm,
    # With all of vLLM's: two fleets of it at once starve each other on two cores.
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(420),
]

PROMPTS = 40
PROMPTS_OF_SOAK = 200
KILLS = ((6, "prefill-0"), (16, "decode-0"), (28, " router "))
CORE_KILLS = ((6, "core of prefill-0"), (16, "core of decode-0"))
KILLS_OF_SOAK = ((25, "prefill-0"), (60, "decode-0"), (100, " router "), (140, "prefill-0"))
IMAGES_OF_SOAK = 16
IMAGE_VICTIMS = ("encode-0", "prefill-0", "decode-0", "router", "encode-0")
SAMPLES = 40
SAMPLE_S = 0.05
BUSY_SHARE = 0.7
IDLE_WITHIN_S = 60
EDGE_GONE_S_MAX = GONE_S + 3 * CHECK_PERIOD_S + 20
"""Until a worker knows that an edge is gone; a busy machine may add 20 s. The lease of its KV is longer."""
COMMON = ("--served-model-name", "tiny", "--max-model-len", "1024", "--kv-cache-mib", "128")
APART = (
    "--prefill-workers",
    "1",
    "--decode-workers",
    "1",
    "--encode-workers",
    "1",
    "--encode-legs",
    "always",
    "--disaggregate",
    "always",
    "--local-prefill-tokens",
    "31",
    # Twice vLLM's own, so that no test waits for its end: an engine steps as long as it holds KV that nobody fetches.
    "--connector-options",
    '{"nixl": {"kv_lease_duration": 60}}',
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def together(up: FleetProcess) -> list[Tokens]:
    """What workers that do everything answer."""
    return await answers(up, PROMPTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(
    together: list[Tokens], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FleetProcess]:
    """One worker for each of the three. After `together`, which it would delay while it starts."""
    flags = ("--engine", "vllm", "--model", str(tiny_vision_model.ensure()), *APART, *COMMON)
    async with fleet(tmp_path_factory.mktemp("apart"), *flags, ready_s=200, vllm=True) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def first(apart: FleetProcess) -> tuple[list[Tokens], int]:
    """What the new fleet answers, and how many prompts it handed over to do so.

    Before any test, in whatever order they run: a decode worker that has a prompt in its cache prefills it itself.
    """
    return await answers(apart, PROMPTS), await handed_over(apart)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def whole(apart: FleetProcess, first: object) -> None:
    """Before each test all three workers are there: the test before may have killed one."""
    await apart.until_whole(3)


async def test_prompts_have_the_same_tokens(first: tuple[list[Tokens], int], together: list[Tokens]) -> None:
    """Byte for byte; no two are alike, and the beginning of a prompt matters, so another's KV would show."""
    assert len(set(together)) == PROMPTS
    assert all(len(one) == ANSWER_TOKENS for one in together)
    apart, handed_over = first
    assert apart == together
    assert handed_over >= PROMPTS * 0.8


async def ask_about(
    fleet: FleetProcess, *seeds: int, video: bytes | None = None, **more: Any
) -> tuple[str, str]:
    """What a fleet answers about some pictures and a video, and the worker that prefilled the prompt."""
    urls = [*map(picture_url, seeds), *([data_url(video, "video/mp4")] if video is not None else ())]
    content = media_content(*urls, "What is this?")
    request = {"model": "tiny", "temperature": 0, "max_tokens": 12, "ignore_eos": True, **more}
    async with fleet.client() as client:
        answer = await client.post(
            "/v1/chat/completions", json={**request, "messages": [{"role": "user", "content": content}]}
        )
    assert answer.status_code == 200, answer.text
    prefilled = answer.headers.get("x-headwater-prefill-worker", "")
    return answer.json()["choices"][0]["message"]["content"], prefilled


async def test_an_image_is_encoded_prefilled_and_decoded_apart(apart: FleetProcess, up: FleetProcess) -> None:
    """The same answer as together; an encode worker computes the embeddings."""
    await until_it_encodes(apart)
    before = await encode_legs(apart)
    for seeds in ((41,), (42,), (42, 43)):
        (whole, _), (split, prefilled) = await ask_about(up, *seeds), await ask_about(apart, *seeds)
        assert split == whole
        assert prefilled == "prefill-0"
    legs = await encode_legs(apart) - before
    assert legs == Counter(computed=3, cached=1)
    # Another tenant's cache: nothing of the first one's is used, and nothing tells that the image was seen before.
    assert (await ask_about(apart, 41, cache_salt="tenant"))[0] == (await ask_about(apart, 41))[0]
    assert (await encode_legs(apart) - before)["cached"] == legs["cached"]


async def test_a_video_is_encoded_prefilled_and_decoded_apart(apart: FleetProcess, up: FleetProcess) -> None:
    """The same answer as together, also next to an image, and after the embedding is held; another video is another embedding."""
    await until_it_encodes(apart)
    before = await encode_legs(apart)
    for seeds, first in (((), 20), ((), 120), ((47,), 20)):
        video = film(8, size=(112, 112), first=first)
        (whole, _), (split, prefilled) = (
            await ask_about(up, *seeds, video=video),
            await ask_about(apart, *seeds, video=video),
        )
        assert split == whole
        assert prefilled == "prefill-0"
    assert await encode_legs(apart) - before == Counter(computed=3, cached=1)


async def test_an_encode_worker_that_is_killed_costs_no_answer(apart: FleetProcess, up: FleetProcess) -> None:
    """While its engine computes an embedding: the prefill worker encodes instead, as it does in a fleet without encode workers (EP/D)."""
    failed = (await encode_legs(apart))["failed"]
    found = await killed_in_state(apart, "encoding", "encode-0", "prefill-0", ask_about(apart, 50))
    assert found == ((await ask_about(up, 50))[0], "prefill-0")
    assert (await encode_legs(apart))["failed"] == failed + 1
    await until_it_encodes(apart)


async def test_an_edge_that_is_killed_leaves_nothing(apart: FleetProcess, up: FleetProcess) -> None:
    """While the prefill worker waits for the embedding: the workers stay as they are, have no request any more, and answer the next one."""
    workers = epochs(await apart.stats())
    with pytest.raises(httpx.TransportError):
        await killed_in_state(apart, "claimed", EDGE, "prefill-0", ask_about(apart, 52))
    await apart.until_whole(3)
    await apart.until("nothing is left", has_nothing_left(3), within_s=EDGE_GONE_S_MAX)
    assert '"orphaned_kv_released"' in apart.log.read_text()
    assert epochs(await apart.stats()) == workers
    assert (await ask_about(apart, 52))[0] == (await ask_about(up, 52))[0]


@pytest.mark.soak
@pytest.mark.parametrize("kill", kills(*STATES))
async def test_a_kill_in_any_state_of_an_image_costs_no_answer(
    apart: FleetProcess, up: FleetProcess, kill: Kill
) -> None:
    """Of each worker, the router and the edge: one right answer, or for the edge's client a broken connection."""

    async def asked(fleet: FleetProcess, number: int, length: int) -> str:
        return (await ask_about(fleet, 100 + number, max_tokens=length))[0]

    await check_kill(apart, kill, partial(asked, apart), partial(asked, up))


@pytest.mark.soak
async def test_images_have_the_same_answers_under_kills(apart: FleetProcess, up: FleetProcess) -> None:
    """Each worker and the router is killed with a request, under load: one right answer to each request."""
    expected = [(await ask_about(up, seed))[0] for seed in range(60, 60 + IMAGES_OF_SOAK)]
    await until_it_encodes(apart)
    places = count()

    async def kill() -> None:
        for victim in IMAGE_VICTIMS:
            await killed_with_a_request(apart, victim)
            # Without a router a worker that is stopped gets no request before its lease expires.
            await apart.until_whole(3, RESTARTED_S_MAX)

    killing = asyncio.create_task(kill())

    async def ask() -> None:
        while not killing.done():
            place = next(places)
            salt, number = divmod(place, IMAGES_OF_SOAK)
            assert (await ask_about(apart, 60 + number, cache_salt=f"{salt}"))[0] == expected[number]

    await asyncio.gather(*(ask() for _ in range(4)))
    await killing
    # While it restarts, nothing is encoded apart.
    assert (await encode_legs(apart))["computed"]


@pytest.mark.soak
async def test_two_hundred_prompts_have_the_same_tokens(apart: FleetProcess, up: FleetProcess) -> None:
    """The same with more of them, undisturbed and under more kills."""
    expected = await answers(up, PROMPTS_OF_SOAK)
    assert await answers(apart, PROMPTS_OF_SOAK) == expected
    assert await under_kills(apart, expected, KILLS_OF_SOAK) == []


@pytest.mark.parametrize("kills", [KILLS, CORE_KILLS], ids=["processes", "engine cores"])
async def test_tokens_are_the_same_under_kills_and_cancels(
    apart: FleetProcess, together: list[Tokens], kills: Sequence[tuple[int, str]]
) -> None:
    """Both workers and the router, or only what computes for the workers, are killed under load while every tenth client leaves."""
    assert await under_kills(apart, together, kills) == []
    assert await answers(apart, 20) == together[:20]


async def test_references_that_are_not_good_are_refused(apart: FleetProcess, together: list[Tokens]) -> None:
    """Used, stale, unknown, another life's, another prompt's: an error each, and never another prompt's answer."""
    assert await refused_references(apart) == REFUSALS
    assert await answers(apart, 10) == together[:10]


async def test_idle_workers_leave_the_processor_to_others(apart: FleetProcess) -> None:
    """Neither engines that poll each other nor the threads of transfers keep a core busy.

    A thread that does always wants to run, however much of a core it gets on a loaded machine; a worker that has just started does so for a while.
    """
    end_s = time.monotonic() + IDLE_WITHIN_S
    while busy := await busy_threads(apart):
        assert time.monotonic() < end_s, busy


async def busy_threads(fleet: FleetProcess) -> list[tuple[tuple[int, str], int]]:
    """Threads that wanted to run in most samples of two seconds, and in how many."""
    runnable: Counter[tuple[int, str]] = Counter()
    for _ in range(SAMPLES):
        await asyncio.sleep(SAMPLE_S)
        runnable.update(thread for pid in descendants(fleet.process.pid) for thread in runnable_threads(pid))
    return [(thread, times) for thread, times in runnable.items() if times > BUSY_SHARE * SAMPLES]


def runnable_threads(pid: int) -> Iterator[tuple[int, str]]:
    """Process and name with id of each thread that runs or waits for a core."""
    for folder in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, state = (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            if state.startswith("R"):
                yield pid, f"{name} {folder.name}"


async def test_fields_of_a_client_never_reach_the_handoff(
    apart: FleetProcess, together: list[Tokens], tmp_path: Path
) -> None:
    """Whatever a client says of transfers is dropped."""
    async with apart.client() as client:
        poison = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[0, 1]]}
        reply = await client.post(
            "/v1/completions",
            json=body(7)
            | {
                "kv_transfer_params": poison,
                "vllm_xargs": {"kv_transfer_params": poison},
                "extra_args": {"kv_transfer_params": poison},
            },
        )
    assert reply.status_code == 200, reply.text
    assert tuple(reply.json()["choices"][0]["logprobs"]["tokens"]) == together[7]
