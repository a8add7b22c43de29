"""For which workers an edge asks encode workers at all: those that take what one of them computes."""

from typing import Any

import msgspec
import pytest

from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.schemas.tables import Lease
from tests.support.worlds.clock import ManualClock, running, settle
from tests.support.worlds.edge import NoTasks
from tests.support.worlds.memory import memory_world

READER = Lease(
    kind="worker",
    name="w",
    pool="p",
    epoch=1,
    serves="whole",
    reads_embeddings=True,
    embedding_format="vllm",
)


def encoder(name: str, embedding_format: str, **fields: Any) -> Lease:
    """An encode worker, by default of images."""
    made = Lease(
        kind="worker", name=name, pool="p", epoch=1, serves="encode", embedding_format=embedding_format
    )
    return msgspec.structs.replace(made, **fields)


@pytest.mark.parametrize(
    ("leases", "found"),
    [
        ([READER], ""),
        ([READER, encoder("e", "sglang")], ""),
        ([READER, encoder("e", "sglang"), encoder("f", "vllm")], "vllm"),
        ([READER, encoder("e", "vllm", pool="other")], ""),
        ([READER, encoder("e", "vllm", serves="")], ""),
        ([msgspec.structs.replace(READER, reads_embeddings=False), encoder("e", "vllm")], ""),
        ([msgspec.structs.replace(READER, embedding_format=""), encoder("e", "")], ""),
        ([encoder("e", "vllm")], ""),
        ([READER, encoder("e", "vllm", encodes=("image", "video"))], "vllm"),
        ([READER, encoder("e", "vllm", encodes=())], ""),
    ],
)
async def test_the_format_that_reader_and_encode_worker_have_in_common(
    leases: list[Lease], found: str
) -> None:
    """Of the same pool, ready, and named: a worker of a release without the name gets no embeddings."""
    world = memory_world(ManualClock())
    for lease in leases:
        await world.leases.create(f"worker.{lease.name}", msgspec.json.encode(lease), ttl_s=60)
    fleet = WorkerRegistry(world, "e1", NoTasks().spawn)
    async with running(fleet.watch_leases()):
        await fleet.leases_known.wait()
        await settle()
        assert fleet.embedding_format("p", "w", {"image"}) == found
        both = any(set(lease.encodes) == {"image", "video"} for lease in leases)
        assert fleet.embedding_format("p", "w", {"image", "video"}) == (found if both else "")
