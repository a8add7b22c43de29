"""`headwater why-not`: what kept a worker from being chosen, on the state that the decision was made on."""

import json
from typing import Any

import pytest

from headwater.events.memory import MemoryLog
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug import why_not as module
from headwater.ops.debug.why_not import TEXTS, show
from headwater.router.candidates import FILTERS
from headwater.schemas.events import (
    BlocksStored,
    EnginesWeighted,
    KvGap,
    RequestRouted,
    RequestStepped,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.routing import Decision
from tests.support.data.examples import joined, packed
from tests.support.data.queries import route_query
from tests.support.worlds.told_fleet import ToldFleet, told_fleet

Capture = pytest.CaptureFixture[str]

PROMPT = packed(11, 12, 13, 14)


async def a_fleet(workers: int = 3) -> ToldFleet:
    """Workers of which w1 has a prompt's first three blocks."""
    told = await told_fleet()
    await told.join(*[f"w{number}" for number in range(1, workers + 1)])
    await told.tell("kv", "w1", BlocksStored(0, packed(11, 12, 13)))
    return told


async def decided(told: ToldFleet, request: str = "a", **fields: Any) -> Decision:
    """A decision about that prompt."""
    return await told.decide(route_query(f"{request}-0-1", 70, 10, PROMPT, **fields))


async def told_of(told: ToldFleet, capsys: Capture, worker: str, request: str = "a") -> list[str]:
    """The lines about a worker, without the first."""
    assert await show(told.ports, "p", request, worker) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]


async def data_of(told: ToldFleet, capsys: Capture, worker: str, request: str = "a") -> dict[str, Any]:
    assert await show(told.ports, "p", request, worker, as_json=True) == 0
    [one] = json.loads(capsys.readouterr().out)
    return dict(one)


async def test_cost(capsys: Capture) -> None:
    """By how much it lost, and what it had of the prompt."""
    told = await a_fleet()
    made = await decided(told)
    assert made.worker == "w1"
    lines = await told_of(told, capsys, "w2")
    own = next(one for one in made.candidates if one.worker == "w2")
    lost = own.score - made.chosen.score
    assert lines[0] == (
        f"it would have cost {own.score:.2f} blocks, {lost:.2f} blocks more than w1 ({made.chosen.score:.2f} blocks)"
    )
    assert lines[1].startswith("it had 0 of the prompt's 4 blocks cached, w1 3; 0 tokens queued against 0;")
    assert (await data_of(told, capsys, "w2"))["cost"]["lost_by"] == pytest.approx(lost)


async def test_cost_in_milliseconds_is_told_part_by_part(capsys: Capture) -> None:
    """The parts add up, and those that alone made the difference are named."""
    told = await a_fleet()
    for _ in range(20):
        for worker in ("w1", "w2", "w3"):
            await told.report(worker, prefills=((32, 4_000), (64, 6_000), (256, 20_000), (1024, 80_000)))
    await told.decide(route_query("before-0-1", 60, pinned="w1"))
    made = await decided(told)
    assert made.worker != "w1"
    data = await data_of(told, capsys, "w1")
    cost = data["cost"]
    assert cost["unit"] == "ms"
    for which in ("worker", "chosen"):
        total = cost["candidate" if which == "worker" else "chosen"]["score"]
        assert sum(term[which] for term in cost["terms"]) == pytest.approx(total)
    queue = next(term for term in cost["terms"] if term["name"] == "queue")
    assert queue["worker"] - queue["chosen"] > cost["lost_by"] > 0
    assert "queue" in cost["decisive"]
    lines = await told_of(told, capsys, "w1")
    assert lines[1].startswith("in ms: queue ")
    assert lines[-1].startswith("it would have cost less had its queue")


async def test_filters(capsys: Capture) -> None:
    """Each that kept the worker out, in its own words."""
    told = await a_fleet()
    await told.tell("fleet", "w1", WorkerDraining("w1", 1))
    await told.tell("fleet", "w2", WorkerChanged("w2", 1, "ready", "both", (), ("batch", "gpu")))
    await decided(told, "a", tolerates=("gpu",))
    assert (await told_of(told, capsys, "w1"))[0] == "w1 was no candidate: it was draining"
    assert (await told_of(told, capsys, "w2"))[0] == "w2 was no candidate: the request did not tolerate batch"
    await decided(told, "b", pinned="w3")
    assert (await told_of(told, capsys, "w2", "b"))[
        0
    ] == "w2 was no candidate: the request was for worker w3 only"
    # What it was at the decision counts, and not what it is now.
    await told.tell("fleet", "w1", WorkerChanged("w1", 1, "ready", "both"))
    assert (await told_of(told, capsys, "w1"))[0] == "w1 was no candidate: it was draining"


async def test_filters_by_properties(capsys: Capture) -> None:
    """Tier, engine, capabilities, adapters; several at once are all told."""
    told = await a_fleet(1)
    capable = ("generate", "images", "kv_events")
    await told.tell(
        "fleet", "w9", WorkerJoined("w9", 1, "m", "vllm", "both", 16, 1000, 8, "", capable, 0, "", "gold")
    )
    await decided(told, "a", tier="gold", engine="vllm", needs=("images",))
    data = await data_of(told, capsys, "w1")
    assert [one["name"] for one in data["obstacles"]] == ["tier", "engine"]
    assert data["obstacles"][0]["text"] == "it is of tier (none), and the request was for tier gold"
    assert data["obstacles"][1]["text"] == "it runs sim, and the request was for engine vllm"
    await told.tell(
        "fleet",
        "w8",
        WorkerJoined(
            "w8", 1, "m", "sim", "both", 16, 1000, 8, "", ("generate", "audio", "lora_on_demand"), 2
        ),
    )
    await decided(told, "b", needs=("generate", "audio"), lora_name="ad")
    assert [one["text"] for one in (await data_of(told, capsys, "w9", "b"))["obstacles"]] == [
        "its engine lacks audio",
        "it does not hold adapter ad and loads none on demand",
    ]


def test_every_filter_has_words() -> None:
    assert TEXTS.keys() == {one.name for one in FILTERS}


async def test_left_out_by_name(capsys: Capture) -> None:
    """Saturated, unless the request log has that the request had failed there."""
    told = await a_fleet()
    await decided(told, "a", exclude=("w1.1",))
    assert (await told_of(told, capsys, "w1"))[0] == (
        "w1 was no candidate: it was saturated (limits of --busy), and another worker was not"
    )
    again = await a_fleet()
    await again.tell_request(RequestRouted("a", 0, "a-0-1", "w1", 1, 0))
    await again.tell_request(RequestStepped("a", 0, "decode", "lost", "routing", "w2", 1, "another worker's"))
    await again.tell_request(RequestStepped("a", 0, "decode", "lost", "routing", "w1", 1, "its lease lapsed"))
    await decided(again, "a", exclude=("w1.1",))
    assert (await data_of(again, capsys, "w1"))["obstacles"][0]["name"] == "failed before"
    # Another incarnation of it has not failed.
    await again.tell("fleet", "w1", joined("w1", 2), epoch=2)
    await decided(again, "b", exclude=("w1.1",))
    assert (await data_of(again, capsys, "w1", "b"))["obstacles"] == []


async def test_engine_weights(capsys: Capture) -> None:
    """An engine without a weight, and one that was not drawn."""
    told = await a_fleet(1)
    await told.tell("fleet", "w9", WorkerJoined("w9", 1, "m", "vllm", "both", 16, 1000, 8))
    await told.tell("fleet", "r1", EnginesWeighted({"vllm": 1.0}))
    await decided(told)
    assert "give its engine sim no new request" in (await told_of(told, capsys, "w1"))[0]
    await told.tell("fleet", "r1", EnginesWeighted({"vllm": 1.0, "sim": 1.0}))
    requests = [f"b{number}" for number in range(9)]
    drawn = {request: await decided(told, request) for request in requests}
    request = next(name for name, made in drawn.items() if made.worker == "w9")
    lines = await told_of(told, capsys, "w1", request)
    assert lines[0].startswith(
        "w1 was a candidate and not chosen: the engine weights (sim=1 vllm=1) drew vllm"
    )
    assert lines[1].startswith("it would have cost ")


async def test_other_policies(capsys: Capture) -> None:
    """The cost does not explain what they choose."""
    told = await a_fleet()
    made = await decided(told, "a", policy="round_robin")
    other = next(name for name in ("w1", "w2", "w3") if name != made.worker)
    assert (await told_of(told, capsys, other))[0].endswith(
        "policy round_robin chose, which does not go by the cost alone"
    )
    made = await decided(told, "b", temperature=5.0)
    other = next(name for name in ("w1", "w2", "w3") if name != made.worker)
    assert "drawn at temperature 5" in (await told_of(told, capsys, other, "b"))[0]


async def test_equal_costs_are_drawn(capsys: Capture) -> None:
    told = await told_fleet()
    await told.join("w1", "w2")
    made = await decided(told)
    other = "w2" if made.worker == "w1" else "w1"
    assert (await told_of(told, capsys, other))[0].endswith(
        "it cost the same: the request's seed drew among them"
    )


async def test_a_worker_that_was_not_there(capsys: Capture) -> None:
    """It left before, or joined later."""
    told = await a_fleet()
    await told.tell("fleet", "r1", WorkerLeft("w1", 1, "lease lapsed"))
    left = told.state.position
    await decided(told)
    await told.join("w7")
    assert (await told_of(told, capsys, "w1"))[0] == (
        f"w1 was not in the pool: epoch 1 had left at position {left}: lease lapsed"
    )
    assert (await told_of(told, capsys, "w7"))[
        0
    ] == "w7 was not in the pool: it joined as epoch 1 at position 10, later"


async def test_blocks_of_a_cold_worker_do_not_count(capsys: Capture) -> None:
    told = await a_fleet()
    await told.tell("kv", "w1", KvGap(1))
    made = await decided(told)
    for worker in {"w1", "w2", "w3"} - {made.worker}:
        lines = await told_of(told, capsys, worker)
        assert any(line.startswith("it had 0 of the prompt's 4 blocks cached") for line in lines)
        assert ("(cold)" in lines[-1]) == (worker == "w1")


async def test_the_one_that_was_chosen(capsys: Capture) -> None:
    told = await a_fleet()
    await decided(told)
    assert await show(told.ports, "p", "a", "w1") == 0
    assert capsys.readouterr().out == "a-0-1: decided at log position 7, went to w1, the worker asked about\n"


@pytest.mark.parametrize("near", [1, 1_000])
async def test_candidates_that_the_record_lacks_are_recomputed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, near: int
) -> None:
    """From a snapshot near the decision, or, where decisions of its router are missing after that, from the start."""
    monkeypatch.setattr(module, "NEAR", near)
    told = await a_fleet(30)
    await SnapshotStore(told.ports.blobs, "p").save(told.state.snapshot())
    await decided(told, "before")
    made = await decided(told)
    kept = {one.worker for one in made.candidates}
    missing = sorted({f"w{number}" for number in range(1, 31)} - kept)
    assert missing
    data = await data_of(told, capsys, missing[0])
    assert data["problem"] == ""
    assert data["cost"]["candidate"]["worker"] == missing[0]
    assert data["cost"]["lost_by"] > 0


async def test_without_the_state_only_the_record_counts(capsys: Capture) -> None:
    """What it has of the candidates is told, and of others why it cannot be known."""
    told = await a_fleet(30)
    await decided(told, "before")
    made = await decided(told)
    missing = sorted({f"w{number}" for number in range(1, 31)} - {one.worker for one in made.candidates})[0]
    kept = next(one.worker for one in made.candidates if one.worker != made.worker)
    assert isinstance(told.log, MemoryLog)
    told.log.alter(told.state.position - 1, b"garbage")
    assert "blocks more than" in (await told_of(told, capsys, kept))[0]
    lines = await told_of(told, capsys, missing)
    [line] = lines
    assert line.startswith(f"whether {missing} could have been chosen cannot be recomputed: ")


async def test_wrong_names_are_told(capsys: Capture) -> None:
    told = await a_fleet()
    await decided(told)
    with pytest.raises(
        ConfigError, match="WORKER w9: no such worker ever joined pool p; there were: w1, w2, w3"
    ):
        await show(told.ports, "p", "a", "w9")
    with pytest.raises(ConfigError, match="REQUEST is empty"):
        await show(told.ports, "p", " ", "w1")
    assert await show(told.ports, "p", "x", "w1") == 1
    assert "no decision for x in this log" in capsys.readouterr().err
