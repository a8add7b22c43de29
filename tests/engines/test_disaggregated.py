"""Encode, prefill and decode apart with real engines and real NIXL: the same tokens as together, whatever is killed or cancelled."""

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
import openai
import pytest
import pytest_asyncio

from headwater.actors.worker.handoffs import CHECK_PERIOD_S, GONE_S
from tests.engines.cases import SGLANG, VLLM, Case, only
from tests.engines.conftest import Mixed
from tests.engines.saga_kills import kill_in_every_state, pause_during_handoff
from tests.support.clients.encoding import encode_legs, until_it_encodes
from tests.support.clients.media_chat import MediaAnswer, ask
from tests.support.clients.pictures import picture_url
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.engines.multimodal.vision_reference import reference_answers
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
    State,
    check_kill,
    epochs,
    has_nothing_left,
    killed_in_state,
    killed_with_a_request,
    kills,
)
from tests.support.processes.fleet import FleetProcess, descendants

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

PROMPTS = {"vllm": 40, "sglang": 16}
HANDED_OVER_MIN = {"vllm": 32, "sglang": 16}
"""Of these prompts, when they are asked the first time: vLLM's decode worker prefills some of those that begin like another itself."""

PROMPTS_OF_SOAK = 200
KILLS = ((6, "prefill-0"), (16, "core of decode-0"), (28, " router "))
WORKER_KILLS = ((6, "prefill-0"), (16, "decode-0"), (28, " router "))
CORE_KILLS = ((6, "core of prefill-0"), (16, "core of decode-0"))
KILLS_OF_SOAK = ((25, "prefill-0"), (60, "decode-0"), (100, " router "), (140, "prefill-0"))
IMAGES_OF_SOAK = 16
IMAGE_VICTIMS = ("encode-0", "prefill-0", "decode-0", "router", "encode-0")
WHILE_ENCODING: dict[str, State] = {"vllm": "encoding", "sglang": "claimed"}
"""The state in which the encode worker is killed. SGLang's encoder computes in the worker's own process, so the state in which it computes
cannot be held."""

STATES_OF_SGLANG: tuple[State, ...] = ("asked", "dispatched", "claimed", "decode")
MEDIA_TOKENS = 12
QUESTION = "What is this?"
SAMPLES = 40
SAMPLE_S = 0.05
BUSY_SHARE = 0.7
IDLE_WITHIN_S = 60
EDGE_GONE_S_MAX = GONE_S + 3 * CHECK_PERIOD_S + 20
"""Until a worker knows that an edge is gone; a busy machine may add 20 s. The lease of its KV is longer."""

COMMON = ("--served-model-name", "tiny", "--max-model-len", "1024", "--encode-legs", "always")
ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--encode-workers", "1")
OWN = {
    "vllm": (
        *(
            "--native=--kv-cache-memory-bytes=134217728",
            "--disaggregate",
            "always",
            "--local-prefill-tokens",
            "31",
        ),
        # Twice vLLM's own, so that no test waits for its end: an engine steps as long as it holds KV that nobody fetches.
        *("--connector-options", '{"nixl": {"kv_lease_duration": 60}}'),
    ),
    "sglang": (),
}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def together(mixed: Mixed, case: Case) -> list[Tokens]:
    """What a worker that does everything answers."""
    await mixed.until_ready()
    return await answers(mixed.up, PROMPTS[case.engine], case.worker)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def apart(
    case: Case, together: list[Tokens], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FleetProcess]:
    """One worker for each of the three. After `together`, which it would delay while it starts."""
    flags = ("--model", str(tiny_vision_model.ensure()), *COMMON, *ROLES, *OWN[case.engine])
    async with case.fleet(tmp_path_factory.mktemp("apart"), *flags) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="package", autouse=True)
async def first(case: Case, apart: FleetProcess) -> tuple[list[Tokens], int]:
    """What the new fleet answers, and how many prompts it handed over to do so.

    Before any test, in whatever order they run: a decode worker that has a prompt in its cache prefills it itself.
    """
    return await answers(apart, PROMPTS[case.engine]), await handed_over(apart)


@pytest_asyncio.fixture(loop_scope="package", autouse=True)
async def whole(apart: FleetProcess, first: object) -> None:
    """Before each test all three workers are there: the test before may have killed one."""
    await apart.until_whole(3)


async def test_prompts_have_the_same_tokens(
    case: Case, first: tuple[list[Tokens], int], together: list[Tokens]
) -> None:
    """Byte for byte; no two are alike, and the beginning of a prompt matters, so another's KV would show."""
    assert len(set(together)) == PROMPTS[case.engine]
    assert all(len(one) == ANSWER_TOKENS for one in together)
    apart, handed_over = first
    assert apart == together
    assert handed_over >= HANDED_OVER_MIN[case.engine]


async def ask_alone(
    up: FleetProcess, *question: str, patient: bool = False, max_tokens: int = MEDIA_TOKENS, **more: Any
) -> MediaAnswer:
    """The answer by a client of its own. Raises `httpx.TransportError` where the connection breaks.

    `patient`: sent away by a 503 for some seconds, the client comes back. While its only prefill or decode worker starts again, a fleet of SGLang
    serves nothing.
    """
    async with up.official_client() as client:
        while True:
            try:
                return await ask(client, *question, max_tokens=max_tokens, **more)
            except openai.APIConnectionError as error:
                raise httpx.TransportError(str(error)) from error
            except openai.InternalServerError as error:
                if not patient or error.status_code != 503 or "retry-after" not in error.response.headers:
                    raise
                await asyncio.sleep(float(error.response.headers["retry-after"]))


async def check_alike(mixed: Mixed, case: Case, apart: FleetProcess, *questions: tuple[str, ...]) -> None:
    """Each has the same answer as together, another one than the others have, and is prefilled by the prefill worker."""
    found = []
    for question in questions:
        whole = await ask_alone(mixed.up, *question, worker=case.worker)
        split = await ask_alone(apart, *question)
        assert split.text == whole.text
        assert split.prefilled == "prefill-0"
        found.append(split.text)
    assert len(set(found)) == len(questions)


async def test_an_image_is_encoded_prefilled_and_decoded_apart(
    apart: FleetProcess, mixed: Mixed, case: Case, tmp_path: Path
) -> None:
    """The same answer as together, which is Hugging Face's; an encode worker computes the embeddings, the prefill engine the KV of the right
    image's tokens, and the decode engine goes on with it.
    """
    one, other, both = (tuple(map(picture_url, seeds)) for seeds in ((41,), (42,), (42, 43)))
    await until_it_encodes(apart)
    before, legs_before = await handed_over(apart), await encode_legs(apart)
    await check_alike(mixed, case, apart, *((*pictures, QUESTION) for pictures in (one, other, both)))
    assert await handed_over(apart) == before + 3
    legs = await encode_legs(apart) - legs_before
    assert legs == Counter(computed=3, cached=1)
    for pictures in (one, other, both):
        [expected] = await reference_answers(tmp_path, (*pictures, QUESTION))
        # By now the prefill engine has it cached.
        assert (await ask_alone(apart, *pictures, QUESTION, max_tokens=8)).text == expected
    # Another tenant's cache: nothing of the first one's is used, and nothing tells that the image was seen before.
    seen = (await encode_legs(apart) - legs_before)["cached"]
    salted = await ask_alone(apart, *one, QUESTION, cache_salt="tenant")
    assert salted.text == (await ask_alone(apart, *one, QUESTION)).text
    assert (await encode_legs(apart) - legs_before)["cached"] == seen


@only(SGLANG)
async def test_usage_counts_what_the_prefill_engine_had_cached_of_an_image(apart: FleetProcess) -> None:
    """Nothing of an image that it has not seen, and whole pages of one that it has."""
    asked = [await ask_alone(apart, picture_url(seed), QUESTION) for seed in (45, 46, 45)]
    assert [one.cached for one in asked] == [0, 0, 64]
    assert asked[0].text == asked[2].text != asked[1].text


async def test_a_video_is_encoded_prefilled_and_decoded_apart(
    apart: FleetProcess, mixed: Mixed, case: Case
) -> None:
    """The same answer as together, also of two, next to an image, and after the embedding is held; another video is another embedding."""
    first, other, short = (
        data_url(film(frames, size=(112, 112), first=first), "video/mp4")
        for frames, first in ((8, 20), (8, 120), (5, 5))
    )
    questions = (
        (first, "What happens?"),
        (other, "What happens?"),
        (short, " and ", first, ": which is longer?"),
        (picture_url(47), short, "Which was first?"),
    )
    await until_it_encodes(apart)
    before = await encode_legs(apart)
    await check_alike(mixed, case, apart, *questions)
    assert await encode_legs(apart) - before == Counter(computed=4, cached=2)


@pytest.mark.parametrize("case", [VLLM.param(), SGLANG.param(marks=(pytest.mark.soak,))], indirect=True)
async def test_an_encode_worker_that_is_killed_costs_no_answer(
    apart: FleetProcess, mixed: Mixed, case: Case, tmp_path: Path
) -> None:
    """While its engine computes an embedding, or the prefill worker waits for the one that it has claimed: the prefill worker encodes instead,
    as it does in a fleet without encode workers (EP/D).
    """
    question = (picture_url(50), QUESTION)
    [expected] = await reference_answers(tmp_path, question)
    # The first image takes seconds on a busy machine: longer than the lease of the worker that is stopped meanwhile.
    await ask_alone(apart, picture_url(49), QUESTION)
    failed = (await encode_legs(apart))["failed"]
    asked = ask_alone(apart, *question)
    found = await killed_in_state(apart, WHILE_ENCODING[case.engine], "encode-0", "prefill-0", asked)
    whole = await ask_alone(mixed.up, *question, worker=case.worker)
    assert (found.text, found.prefilled) == (whole.text, "prefill-0")
    assert (await ask_alone(mixed.up, *question, worker=case.worker, max_tokens=8)).text == expected
    if case is VLLM:
        assert (await encode_legs(apart))["failed"] == failed + 1
    else:
        assert '"embedding_not_read"' in apart.log.read_text()
    await until_it_encodes(apart)


@only(VLLM, pytest.mark.soak)
async def test_an_edge_that_is_killed_leaves_nothing(apart: FleetProcess, mixed: Mixed, case: Case) -> None:
    """While the prefill worker waits for the embedding: the workers stay as they are, have no request any more, and answer the next one.

    In every run this is tested with the simulated engine, in `tests/faults/kills/test_encode_leg.py`.
    """
    question = (picture_url(52), QUESTION)
    workers = epochs(await apart.stats())
    with pytest.raises(httpx.TransportError):
        await killed_in_state(apart, "claimed", EDGE, "prefill-0", ask_alone(apart, *question))
    await apart.until_whole(3)
    await apart.until("nothing is left", has_nothing_left(3), within_s=EDGE_GONE_S_MAX)
    assert '"orphaned_kv_released"' in apart.log.read_text()
    assert epochs(await apart.stats()) == workers
    await check_alike(mixed, case, apart, question)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "kill"),
    [
        case.param(kill, name=str(kill))
        for case, states in ((VLLM, STATES), (SGLANG, STATES_OF_SGLANG))
        for kill in kills(*states)
    ],
    indirect=["case"],
)
async def test_a_kill_in_any_state_of_an_image_costs_no_answer(
    apart: FleetProcess, mixed: Mixed, case: Case, kill: Kill
) -> None:
    """Of each worker, the router and the edge: one right answer, or for the edge's client a broken connection."""

    async def asked(fleet: FleetProcess, number: int, length: int, **more: Any) -> str:
        question = (picture_url(100 + number), QUESTION)
        return str((await ask_alone(fleet, *question, max_tokens=length, **more)).text)

    asking = partial(asked, apart, patient=case is SGLANG)
    await check_kill(apart, kill, asking, partial(asked, mixed.up, worker=case.worker))


@only(VLLM, pytest.mark.soak)
async def test_images_have_the_same_answers_under_kills(
    apart: FleetProcess, mixed: Mixed, case: Case
) -> None:
    """Each worker and the router is killed with a request, under load: one right answer to each request."""

    async def answer(fleet: FleetProcess, number: int, **more: Any) -> str:
        return str((await ask_alone(fleet, picture_url(60 + number), QUESTION, **more)).text)

    expected = [await answer(mixed.up, number, worker=case.worker) for number in range(IMAGES_OF_SOAK)]
    await until_it_encodes(apart)
    places = count()

    async def kill() -> None:
        for victim in IMAGE_VICTIMS:
            await killed_with_a_request(apart, victim)
            # Without a router a worker that is stopped gets no request before its lease expires.
            await apart.until_whole(3, RESTARTED_S_MAX)

    killing = asyncio.create_task(kill())

    async def ask_on() -> None:
        while not killing.done():
            salt, number = divmod(next(places), IMAGES_OF_SOAK)
            assert await answer(apart, number, cache_salt=f"{salt}") == expected[number]

    await asyncio.gather(*(ask_on() for _ in range(4)))
    await killing
    # While it restarts, nothing is encoded apart.
    assert (await encode_legs(apart))["computed"]


@pytest.mark.soak
async def test_two_hundred_prompts_have_the_same_tokens(
    apart: FleetProcess, mixed: Mixed, case: Case
) -> None:
    """The same with more of them, undisturbed and under more kills and cancellations."""
    expected = await answers(mixed.up, PROMPTS_OF_SOAK, case.worker)
    assert await answers(apart, PROMPTS_OF_SOAK) == expected
    assert await under_kills(apart, expected, KILLS_OF_SOAK) == []


@pytest.mark.parametrize(
    ("case", "kills"),
    [
        VLLM.param(KILLS, name="a worker, an engine core and the router"),
        VLLM.param(WORKER_KILLS, name="processes", marks=(pytest.mark.soak,)),
        VLLM.param(CORE_KILLS, name="engine cores", marks=(pytest.mark.soak,)),
        SGLANG.param((), name="clients that leave"),
    ],
    indirect=["case"],
)
async def test_tokens_are_the_same_under_kills_and_cancels(
    apart: FleetProcess, together: list[Tokens], kills: Sequence[tuple[int, str]]
) -> None:
    """One worker, only what computes for the other, and the router are killed under load, while every tenth client leaves.

    Some leave before their first token: neither leg is in the way of the others. SGLang's kills are of the long form.
    """
    assert await under_kills(apart, together, kills) == []
    some = together[:20]
    assert await answers(apart, len(some)) == some


@only(SGLANG, pytest.mark.soak)
async def test_a_kill_in_any_state_costs_no_answer(apart: FleetProcess) -> None:
    """Of the prefill worker, the decode worker and the router; tests/sim has the same table for every choreography."""
    rows = await kill_in_every_state(apart, 100)
    assert [row for row in rows if row[2]] == []


@only(SGLANG, pytest.mark.soak)
@pytest.mark.timeout(1_800)
async def test_a_worker_that_is_stopped_for_longer_than_its_lease_costs_no_answer(
    apart: FleetProcess,
) -> None:
    """In the middle of a hand-off: its request moves, and what it sends or holds when it goes on is of no consequence."""
    rows = await pause_during_handoff(apart, 120)
    assert [row for row in rows if row[2]] == []


@only(SGLANG)
async def test_usage_counts_what_the_prefill_engine_had_cached(apart: FleetProcess) -> None:
    """Whole pages of a prompt that was asked before, but for its last token's; a transfer is no hit."""
    asked = body(0) | {"prompt": [1_000 + number for number in range(100)]}
    told = []
    async with apart.client() as client:
        for _ in range(2):
            usage = (await client.post("/v1/completions", json=asked)).json()["usage"]
            told.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert told == [0, 96]


async def test_references_that_are_not_good_are_refused(apart: FleetProcess, together: list[Tokens]) -> None:
    """Used, stale, unknown, another life's, another prompt's: an error each, and never another prompt's answer."""
    assert await refused_references(apart) == REFUSALS
    assert await answers(apart, 10) == together[:10]


@only(VLLM)
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


@only(VLLM)
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
