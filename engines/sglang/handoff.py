"""KV hand-off from one SGLang to another: both legs run at once and meet in a room, over NIXL.

The prefill leg opens a room on the bootstrap server of its own engine. The decode leg enters it, tells the prefill engine
where its free blocks are, and that engine writes the prompt's KV there, with the first token and the number of tokens it
had cached. An SGLang in prefill or decode mode serves no whole request.

SGLang does not check that both legs have the same prompt: of two prompts of equal length the answer would begin with the
other one's first token, with HTTP 200. Nor is a room used twice without harm: in 0.5.23 one of four legs then waits for
ever. So rooms never repeat, parameters are sealed to their prompt, and a decode engine enters each room once.
"""

import secrets
import socket
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from headwater.engines.engine import EngineUnavailable, Pinned
from headwater.engines.handoff_params import Unusable, seal, unseal
from headwater.engines.model_digest import model_digest
from headwater.schemas.events.fleet import Role
from headwater.schemas.messages.inference import GenerateRequest

ROOMS: Final = 1 << 63
"""Rooms are numbered below this: SGLang stores them as signed 64-bit integers, and 0 as "none"."""

LEASE_S: Final = 60.0
"""How long a room waits for its decode leg: as long as an edge searches for a decode worker."""

REMEMBERED: Final = 65_536
"""Bound on recorded rooms that were entered."""

NOWHERE: Final = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST: a leg of this host has no partner and transfers nothing. For probes only."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    # SGLang's default, 5 s, twice: a dead prefill engine is noticed after 10 s. 2 s is the least that it takes.
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"
}
CPU_ENVIRONMENT: Final[Mapping[str, str]] = {
    # It uses CUDA events, also without CUDA.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"
}

Mode = Literal["prefill", "decode"]


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
        return _fields(room), Pinned(seal(msgspec.msgpack.encode(room), request), LEASE_S)

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
        """Fields of a leg without a partner. A decode leg answers from blocks that nobody wrote: only for probes."""
        return _fields(Room(NOWHERE, 0, self._rooms.open()))


def _fields(room: Room) -> dict[str, Any]:
    """The fields of SGLang's GenerateReqInput."""
    return {
        "bootstrap_host": room.host,
        "bootstrap_port": room.port or None,
        "bootstrap_room": room.room,
    }


def mode_of(role: Role, native: Mapping[str, Any]) -> Mode | None:
    """The mode of an engine whose worker has this role, None for whole requests. Raises `EngineUnavailable`."""
    given = native.get("disaggregation_mode")
    wanted = None if role == "both" else role
    if given is not None and given != (wanted or "null"):
        raise EngineUnavailable(
            f"--role {role} and, among SGLang's own arguments, --disaggregation-mode {given} disagree: omit the latter"
        )
    if wanted is not None and int(native.get("dp_size") or 1) > 1:
        raise EngineUnavailable(
            f"--role {role} with --dp-size {native['dp_size']} is not implemented: start one worker for each rank"
        )
    return wanted


def arguments(mode: Mode | None, host: str, port: int, *, cpu: bool) -> dict[str, Any]:
    """Arguments of an engine that prefills or decodes. `host` is where other workers reach it."""
    if mode is None:
        return {}
    found: dict[str, Any] = {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": "nixl",
        "host": host,
        "disaggregation_bootstrap_port": port,
    }
    if cpu and mode == "decode":
        # Where requests go that are retracted for lack of memory; its default needs CUDA.
        found["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return found


def environment(host: str, *, cpu: bool) -> dict[str, str]:
    """Environment variables of an engine that prefills or decodes."""
    return {"SGLANG_HOST_IP": host, **ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {})}


def free_port(host: str) -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def pairs_with(mode: Mode | None, version: str, name: str, config: Mapping[str, Any]) -> str:
    """See `EngineInfo.pairs_with`. Empty without a mode. `config` are SGLang's resolved arguments."""
    if mode is None:
        return ""
    layout = f"{config.get('kv_cache_dtype', 'auto')}/page{config['page_size']}"
    return f"sglang/{version}/{name}-{model_digest(str(config['model_path']))}/{config['dtype']}/{layout}"
