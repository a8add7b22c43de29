"""KV hand-off from one SGLang to another: both legs run at once and meet in a room, over NIXL.

The prefill leg opens a room on the bootstrap server of its own engine. The decode leg enters it, names its free
blocks to the prefill engine, and that engine writes the prompt's KV there, with the first token and the number of tokens it
had cached. An SGLang in prefill or decode mode serves no whole request.

SGLang does not check that both legs have the same prompt: of two prompts of equal length the answer would begin with the
other one's first token, with HTTP 200. Nor is a room used twice without harm: in 0.5.23 one of four legs then
hangs. So rooms never repeat, parameters are sealed to their prompt, and a decode engine enters each room once.
"""

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headwater.engines.engine import Pinned
from headwater.engines.handoff_params import Unusable, seal, unseal
from headwater.engines.model_files import model_digest
from headwater.engines.sglang.config import Mode
from headwater.schemas.addresses import host_port
from headwater.schemas.messages.inference import GenerateRequest

ROOMS: Final = 1 << 63
"""Rooms are numbered below this: SGLang stores them as signed 64-bit integers, and 0 as "none"."""

LEASE_S: Final = 60.0
"""How long a room waits for its decode leg: as long as an edge searches for a decode worker."""

REMEMBERED: Final = 65_536
"""Bound on recorded rooms that were entered."""

NOWHERE: Final = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST: a leg of this host has no partner and transfers nothing. For probes only."""


class Room(msgspec.Struct, frozen=True):
    """What a decode leg needs to meet its prefill leg."""

    host: str
    port: int
    room: int


class Rooms:
    """Numbers of rooms: drawn at random, and none twice in the lifetime of an engine.

    An arithmetic sequence modulo 2^63 with an odd step meets every number once before it repeats. Start and step are
    random, so that two engines, or two lives of one, meet only by chance: 1 in 10^9 after 10^5 rooms of each.
    """

    def __init__(self) -> None:
        self._next = secrets.randbelow(ROOMS)
        self._step = secrets.randbelow(ROOMS) | 1

    def open(self) -> int:
        """A room that was never open before."""
        room = self._next
        self._next = (room + self._step) % ROOMS
        return room or self.open()


class SglangHandoffs:
    """Opens rooms on this engine's bootstrap server, or enters those of others, according to its mode."""

    def __init__(self, mode: Mode, host: str = "", port: int = 0) -> None:
        self.mode: Mode = mode
        self._host = host
        self._port = port
        self._rooms = Rooms()
        self._entered: OrderedDict[tuple[str, int, int], None] = OrderedDict()

    def open(self, request: GenerateRequest) -> tuple[dict[str, Any], Pinned]:
        """Fields of a prefill leg, and what its decode leg needs."""
        room = Room(self._host, self._port, self._rooms.open())
        return _fields(room), Pinned(
            seal(msgspec.msgpack.encode(room), request), LEASE_S, place=host_port(self._host, self._port)
        )

    def enter(self, request: GenerateRequest, params: bytes) -> dict[str, Any]:
        """Fields of a decode leg. Raises `Unusable`: damaged, another prompt's, or entered before."""
        try:
            room = msgspec.msgpack.decode(unseal(params, request), type=Room)
        except msgspec.DecodeError as error:
            raise Unusable(f"it names no room: {error}") from error
        if not room.host or room.host == NOWHERE or not room.port or not 0 < room.room < ROOMS:
            raise Unusable("it names no room")
        key = (room.host, room.port, room.room)
        if key in self._entered:
            raise Unusable("it was already used")
        self._entered[key] = None
        if len(self._entered) > REMEMBERED:
            self._entered.popitem(last=False)
        return _fields(room)

    def rehearse(self) -> dict[str, Any]:
        """Fields of a leg without a partner. A decode leg answers from blocks that were never written: only for probes."""
        return _fields(Room(NOWHERE, 0, self._rooms.open()))


def _fields(room: Room) -> dict[str, Any]:
    """The fields of SGLang's GenerateReqInput."""
    return {
        "bootstrap_host": room.host,
        "bootstrap_port": room.port or None,
        "bootstrap_room": room.room,
    }


def pairs_with(mode: Mode | None, version: str, name: str, config: Mapping[str, Any]) -> str:
    """See `EngineInfo.pairs_with`. Empty without a mode. `config` are SGLang's resolved arguments."""
    if mode is None:
        return ""
    layout = f"{config.get('kv_cache_dtype', 'auto')}/page{config['page_size']}"
    return f"sglang/{version}/{name}-{model_digest(str(config['model_path']))}/{config['dtype']}/{layout}"
