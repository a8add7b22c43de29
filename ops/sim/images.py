"""Requests with images on the simulated fleet: pictures, their intake, and transfers of their embeddings."""

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import count
from typing import Final, NamedTuple

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem, media_id
from headwater.actors.media.request import MediaCode, MediaError, MediaLimits, MediaSource, MediaTarget
from headwater.engines.sim.model import content_of, embedding_of, image_support
from headwater.engines.sim.scheduler import image_offset
from headwater.engines.transfer.local import LocalFabric, LocalTransfer, TransferFault
from headwater.engines.transfer.port import HostMemory
from headwater.engines.transfer.slab import TensorTransfer
from headwater.ops.sim.network import Process
from headwater.schemas.clock import Clock
from headwater.schemas.media import LEASE_BYTES, PromptMedia
from headwater.schemas.tables import count_image_tokens

DECODE_S: Final = 0.005


class SimIntake(MediaIntake):
    """Takes what `data_url` makes. See `MediaIntake`."""

    async def _fetch(
        self, source: MediaSource, limits: MediaLimits, target: MediaTarget, tenant: str
    ) -> MediaItem:
        await asyncio.sleep(DECODE_S)
        if source.encoding != "data_url" or not isinstance(source.content, str):
            raise MediaError(MediaCode.BAD_URL, "Simulated edges take pictures in data URLs only.")
        return _decoded(source.content)


@lru_cache(maxsize=64)
def _decoded(url: str) -> MediaItem:
    head, _, pixels = base64.b64decode(url.partition(",")[2]).partition(b"\n")
    _, width, height, _ = head.split()
    shape = (int(height), int(width), 3)
    data = memoryview(pixels)
    return MediaItem("image", media_id("image", "uint8", shape, data, ""), "uint8", shape, data, "ppm")


# The pictures that simulated clients send, and what the simulated engine sees in them.

SIDES: Final = (56, 84, 140)
"""Pixels: of 4, 9 and 25 tokens."""


class Picture(NamedTuple):
    """A square of one colour."""

    colour: int
    side: int


PICTURES: Final = tuple(Picture(40 * number, SIDES[number % len(SIDES)]) for number in range(1, 7))
"""Few, so that embeddings are found in caches."""


@cache
def data_url(picture: Picture) -> str:
    """A picture as clients send it: a portable pixmap, which needs no library."""
    file = b"P6 %d %d 255\n" % (picture.side, picture.side) + pixels_of(picture)
    return "data:image/x-portable-pixmap;base64," + base64.b64encode(file).decode()


def pixels_of(picture: Picture) -> bytes:
    """RGB."""
    return bytes([picture.colour]) * (picture.side * picture.side * 3)


@cache
def _content(picture: Picture) -> int:
    shape = (picture.side, picture.side, 3)
    tokens = count_image_tokens(image_support(), *shape[:2])
    return content_of(embedding_of(PromptMedia("image", "", 0, tokens, shape, pixels_of(picture))))


def answer_shift(pictures: Sequence[Picture]) -> int:
    """Return by how much these pictures, in this order, shift an answer."""
    return image_offset([_content(picture) for picture in pictures])


# Embeddings between simulated workers: slabs that end with their processes, and faults of reads.

SLAB_BYTES: Final = 64 << 10
"""The slab of each worker: room for a few embeddings, so that it is full at times."""

SETTLED_S: Final = 120.0
"""After this time no lease, claim or quarantine is left."""

NEVER_S: Final = 1e9


class SimTransfers:
    """The slabs of all processes of a fleet. `disturbed` is the fault of a read between two processes that are connected."""

    def __init__(self, clock: Clock, disturbed: Callable[[], TransferFault]) -> None:
        self._fabric = LocalFabric(clock)
        self._fabric.faults = self._fault
        self._disturbed = disturbed
        self._processes: dict[str, Process] = {}
        self._slabs: list[tuple[Process, LocalTransfer]] = []
        self._numbers = count(1)

    async def open(self, name: str, process: Process) -> TensorTransfer:
        """A worker's slab. It ends with the process."""
        number = next(self._numbers)
        leases = count(number << 64)
        transfer = LocalTransfer(
            self._fabric,
            name,
            number,
            HostMemory(SLAB_BYTES),
            process,
            partial(_next_lease, leases),
        )
        process.on_kill(transfer.kill)
        self._processes[name] = process
        self._slabs.append((process, transfer))
        return transfer

    def _fault(self, owner: str, reader: str) -> TransferFault:
        """Return the fault of a read that begins now."""
        if not all(self._processes[name].connected for name in (owner, reader)):
            return TransferFault(takes_s=NEVER_S)
        return self._disturbed()

    def leaks(self) -> Iterator[str]:
        """Bytes that are still in use, `SETTLED_S` after the end of a run, in slabs of processes that were not killed."""
        for process, transfer in self._slabs:
            stats = transfer.stats()
            if process.alive and stats.free != stats.capacity:
                yield f"embeddings at {transfer.owner} are still pinned: {stats}"


def _next_lease(numbers: "count[int]") -> bytes:
    return next(numbers).to_bytes(LEASE_BYTES, "big")
