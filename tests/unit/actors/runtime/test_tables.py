"""Leases and cards as typed changes: what is written comes out, what is unreadable is skipped, and watches end."""

import msgspec

from headwater.actors.runtime.tables import (
    CardTable,
    LeaseChange,
    LeaseTable,
    LoraCardChange,
    ModelCardChange,
)
from headwater.events.memory import MemoryTable
from headwater.schemas import subjects
from headwater.schemas.tables import Lease, LoraCard, ModelCard
from tests.support.worlds.clock import ManualClock

LORA = LoraCard(name="org/tuned", pool="p", source="/a", digest="ab" * 32, rank=8, created_s=1)


def model(pool: str) -> ModelCard:
    """A card with what is mandatory."""
    return ModelCard(
        name="m",
        pool=pool,
        block_size=16,
        context_length=64,
        tokenizer="t",
        chat_template="",
        special_tokens={},
        eos_token_ids=(1,),
        engine="sim",
        capabilities=(),
        created_s=1,
    )


async def test_leases_come_with_kind_and_name_and_end_as_none() -> None:
    table = MemoryTable(ManualClock())
    lease = Lease(kind="worker", name="w1", pool="p", epoch=4)
    await table.put(subjects.lease_key("worker", "w1"), msgspec.json.encode(lease))
    leases = LeaseTable(table)
    watch = leases.watch()
    assert await anext(watch) == [LeaseChange("worker", "w1", lease)]
    await leases.delete("worker", "w1")
    assert await anext(watch) == [LeaseChange("worker", "w1", None)]
    assert await leases.get("worker", "w1") is None


async def test_all_leases_are_read_in_order_and_a_watch_of_an_empty_table_begins() -> None:
    table = MemoryTable(ManualClock())
    leases = LeaseTable(table)
    assert await leases.read_all() == []
    held = [Lease(kind=kind, name=name) for kind, name in (("worker", "b"), ("edge", "z"), ("worker", "a"))]
    for lease in held:
        await table.put(f"{lease.kind}.{lease.name}", msgspec.json.encode(lease))
    assert [(one.kind, one.name) for one in await leases.read_all()] == [
        ("edge", "z"),
        ("worker", "a"),
        ("worker", "b"),
    ]
    assert await leases.get("worker", "b") == held[0]


async def test_an_unreadable_value_hides_no_other() -> None:
    """It is no change: what was known under its key stays known."""
    leases, cards = MemoryTable(ManualClock()), MemoryTable(ManualClock())
    await leases.put("worker.bad", b"not JSON")
    await leases.put("worker.good", msgspec.json.encode(Lease(kind="worker", name="good")))
    assert [change.name for change in await anext(LeaseTable(leases).watch())] == ["good"]
    await cards.put("bad", b'{"name": "x"}')
    await cards.put("p.lora.bad", b"{}")
    await cards.put("good", msgspec.json.encode(model("good")))
    assert await anext(CardTable(cards).watch()) == [ModelCardChange("good", model("good"))]
    assert [card.pool for card in await CardTable(cards).models()] == ["good"]


async def test_cards_of_models_and_of_loras_are_told_apart() -> None:
    table = MemoryTable(ManualClock())
    cards = CardTable(table)
    await cards.put_model(model("p"))
    assert await cards.create_lora(LORA)
    assert not await cards.create_lora(LORA), "there is one already"
    key = subjects.lora_key("p", "org/tuned")
    watch = cards.watch()
    assert sorted(await anext(watch), key=str) == [
        LoraCardChange(key, LORA),
        ModelCardChange("p", model("p")),
    ]
    assert await cards.get_model("p") == model("p")
    assert await cards.get_lora("p", "org/tuned") == LORA
    assert await cards.pools() == ["p"]
    await cards.delete_lora("p", "org/tuned")
    assert await anext(watch) == [LoraCardChange(key, None)]
    assert await cards.get_lora("p", "org/tuned") is None
    await table.delete(subjects.card_key("p"))
    assert await anext(watch) == [ModelCardChange("p", None)]
    assert await cards.get_model("p") is None
    assert await cards.pools() == []


async def test_pools_are_known_by_their_key_even_if_the_card_is_of_another_release() -> None:
    """Their streams must exist, whatever this release can read."""
    table = MemoryTable(ManualClock())
    await table.put("b", b"{}")
    await table.put("a", msgspec.json.encode(model("a")))
    await table.put("a.lora.x", b"{}")
    assert await CardTable(table).pools() == ["a", "b"]
