"""LoRA adapters in a fleet on a real server: loaded on workers, routed to them, unloaded under load, forgotten."""

import asyncio
from pathlib import Path

import pytest

from headwater.actors.worker.lora import LoraManager
from headwater.engines.lora_cache import LoraError
from headwater.schemas.events import WorkerChanged
from headwater.schemas.routing import Decision
from tests.support.worlds.lora_fleet import MODEL, Client, serving, until


async def test_requests_go_to_the_worker_that_holds_their_adapter(tmp_path: Path) -> None:
    """Two adapters on two workers, each a model of its own, each with blocks of its own."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].lora
        assert one is not None
        two = await fleet.worker("w2")
        assert await client.models() == [MODEL]
        assert (await client.ask("alpha")).status_code == 404
        await one.load("alpha", fleet.source("alpha"))
        await two.load("beta", fleet.source("beta"))
        await until(lambda: listed(client, [MODEL, "alpha", "beta"]))
        prompt = "the same prompt for everybody " * 4
        for _ in range(4):
            assert await client.answered("alpha", prompt) == "w1"
            assert await client.answered("beta", prompt) == "w2"
        # A worker asks its engine for a few tokens before it joins.
        assert set(fleet.seen("w1")) - {""} == {"alpha"}
        assert set(fleet.seen("w2")) - {""} == {"beta"}
        response = await client.ask(MODEL, prompt)
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
            "adapters' blocks are theirs"
        )
        again = await client.ask("alpha", prompt)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        held = {event.worker: event.loras for event in await fleet.events(WorkerChanged)}
        assert [name.rpartition("@")[0] for name in held["w1"] + held["w2"]] == ["alpha", "beta"]
        decisions = [one for one in await fleet.events(Decision) if one.constraints.lora_name]
        assert {(one.constraints.lora_name, one.worker) for one in decisions} == {
            (held["w1"][0], "w1"),
            (held["w2"][0], "w2"),
        }


async def listed(client: Client, names: list[str]) -> bool:
    """Are these the models?"""
    return await client.models() == names


async def test_unloading_under_load_fails_no_request(tmp_path: Path) -> None:
    """What runs there ends there, what comes later goes to the other holder, and the adapter comes back."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].lora
        assert one is not None
        two = await fleet.worker("w2")
        for adapters in (one, two):
            await adapters.load("alpha", fleet.source("alpha"))
        await until(lambda: listed(client, [MODEL, "alpha"]))
        stop = asyncio.Event()
        answers: list[str] = []

        async def load(number: int) -> None:
            while not stop.is_set():
                answers.append(await client.answered("alpha", f"user {number} " * 20, tokens=20))

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(load(number))
            await until(lambda: both(answers))
            for adapters, other in ((one, "w2"), (two, "w1")):
                await adapters.unload("alpha")
                assert await adapters.list() == []
                seen = len(answers)
                await until(lambda seen=seen: more(answers, seen + 24))  # type: ignore[misc]
                assert set(answers[seen + 12 :]) == {other}, "the log tells routers, and they were told"
                await adapters.load("alpha", fleet.source("alpha"))
            stop.set()
        assert len(answers) > 40


async def both(answers: list[str]) -> bool:
    """Have both workers answered?"""
    return set(answers) == {"w1", "w2"}


async def more(answers: list[str], count: int) -> bool:
    """Are there so many answers?"""
    return len(answers) >= count


async def test_an_adapter_is_loaded_when_a_request_names_it(tmp_path: Path) -> None:
    """By a worker that may, from where its card says; with its slots full another one goes."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].lora
        assert one is not None
        for name in ("alpha", "beta"):
            await one.load(name, fleet.source(name))
            await one.unload(name)
        await until(lambda: listed(client, [MODEL, "alpha", "beta"]))
        refused = await client.ask("alpha")
        assert refused.status_code == 503
        assert "has LoRA adapter alpha@" in refused.json()["error"]["message"]
        two = await fleet.worker("w2", on_demand=True, slots=1)
        assert await client.answered("alpha") == "w2"
        assert [(one["name"], one["on_demand"]) for one in await two.list()] == [("alpha", True)]
        assert await client.answered("beta") == "w2"
        assert [one["name"] for one in await two.list()] == ["beta"]
        answers = await asyncio.gather(*(client.answered(name) for name in ("alpha", "beta", MODEL) * 3))
        assert {"w2"} <= set(answers) <= {"w1", "w2"}
        decisions = [one for one in await fleet.events(Decision) if one.constraints.lora_name]
        assert any(one.chosen.loads_lora for one in decisions)


async def test_a_forgotten_adapter_is_gone_everywhere(tmp_path: Path) -> None:
    """From the models at once, from all workers as soon as nobody uses it; then the name is free."""
    async with serving(tmp_path) as (fleet, client):
        one = fleet.workers["w1"].lora
        assert one is not None
        two = await fleet.worker("w2")
        for adapters in (one, two):
            await adapters.load("alpha", fleet.source("alpha"))
        with pytest.raises(LoraError, match="sim is a model"):
            await one.load(MODEL, fleet.source("alpha"))
        await until(lambda: listed(client, [MODEL, "alpha"]))
        await one.unload("alpha", forget=True)
        await until(lambda: listed(client, [MODEL]))
        refused = await client.ask("alpha")
        assert refused.status_code == 404
        assert "Served: sim" in refused.json()["error"]["message"]
        await until(lambda: holds_nothing(two))
        await two.load("alpha", fleet.source("other"))
        await until(lambda: listed(client, [MODEL, "alpha"]))
        assert await client.answered("alpha") == "w2"


async def holds_nothing(adapters: LoraManager) -> bool:
    """No adapter at all?"""
    return await adapters.list() == []
