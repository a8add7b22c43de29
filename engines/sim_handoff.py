"""Handing KV over between simulated engines, and the mistakes a real one would make if a hand-off were misused.

A `Fabric` stands for the memory that engines of one process can reach: what is pinned in it can be fetched once. An
engine without one (each in a process of its own) trusts the parameters, as far as they go: they name their prompt.

Real engines answer a hand-off used twice, or for another prompt, with tokens of another prompt and HTTP 200. So does
this one, in a fabric: what is fetched is then `spoiled`, and the engine generates other tokens than it would, for
tests to find. Without a fabric such a hand-off is refused, as our adapters of real engines do.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headwater.engines.engine import Pinned, Transfer
from headwater.schemas.clock import Clock
from headwater.schemas.handoff import Choreography, prompt_digest
from headwater.schemas.inference import GenerateRequest

LEASE_S = 30.0
ROOM_S_MAX = 60.0
"""How long a decode leg waits in a room for the prompt's KV."""

GIGABYTE = 1e9
BYTES_A_TOKEN = 131_072
GIGABYTES_A_SECOND = 20.0


class SimParams(msgspec.Struct, frozen=True):
    """What a decode leg is told: the pin in the fabric, whose prompt it is, and how many tokens are computed."""

    pin: str
    prompt: bytes
    tokens: int


class KvGone(Exception):
    """The KV is not there any more: its lease ended, or its engine did."""


class Fetched(NamedTuple):
    """Tokens whose KV is here now. `spoiled`: it is another prompt's."""

    tokens: int
    spoiled: bool


class _Pin:
    __slots__ = ("engine", "free", "ready", "until_s")

    def __init__(self, engine: str, free: Callable[[], None], until_s: float) -> None:
        self.engine = engine
        self.free = free
        self.until_s = until_s
        self.ready = asyncio.Event()


class Fabric:
    """KV pinned by the engines of one process, and what was fetched of it already."""

    def __init__(self) -> None:
        self.pins: dict[str, _Pin] = {}
        self.fetched: set[str] = set()
        self.spoiled = 0

    def drop_engine(self, engine: str) -> None:
        """An engine died, and what it had pinned with it."""
        for name in [name for name, pin in self.pins.items() if pin.engine == engine]:
            self.pins.pop(name).ready.set()


class SimHandoff:
    """One engine's side of it. `engine` names it in the fabric: no two engines ever have the same name."""

    def __init__(
        self, engine: str, clock: Clock, fabric: Fabric | None = None, choreography: Choreography = "returned"
    ) -> None:
        self.choreography: Choreography = choreography
        self._engine = engine
        self._clock = clock
        self._shared = fabric is not None
        self._fabric = fabric or Fabric()

    def pin(
        self, request: GenerateRequest, free: Callable[[], None], first_tokens: tuple[int, ...]
    ) -> Pinned:
        """Keep a prompt's KV; `free` is called once, when it is fetched, released or its lease ends."""
        digest = prompt_digest(request.lora_name, request.cache_salt, request.tokens)
        params = SimParams(self._name(request), digest, len(request.tokens) // 4)
        self._fabric.pins[params.pin] = _Pin(self._engine, free, self._clock.monotonic_s() + LEASE_S)
        return Pinned(msgspec.msgpack.encode(params), LEASE_S, first_tokens)

    def computed(self, request: GenerateRequest) -> bool:
        """The prompt of a prefill leg is computed: whoever waits for its KV can have it. False: nobody will."""
        pin = self._fabric.pins.get(self._name(request))
        if pin is not None:
            pin.ready.set()
        return pin is not None

    def withdraw(self, request: GenerateRequest) -> None:
        """A prefill leg ended without its prompt computed."""
        self._free(self._name(request))

    def _name(self, request: GenerateRequest) -> str:
        return f"{self._engine}/{request.request}"

    def release(self, params: bytes) -> None:
        """Nobody will fetch it."""
        self._free(_decode(params).pin)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock.monotonic_s()
        for name in [name for name, pin in self._fabric.pins.items() if pin.until_s <= now]:
            self._free(name)

    def stop(self) -> None:
        """This engine ends, and so do its leases."""
        for name in [name for name, pin in self._fabric.pins.items() if pin.engine == self._engine]:
            self._free(name)

    async def fetch(self, request: GenerateRequest, transfer: Transfer) -> Fetched:
        """Bring a prompt's KV here. Raises `KvGone`."""
        try:
            params = _decode(transfer.params)
        except ValueError as error:
            raise KvGone(str(error)) from error
        tokens = len(request.tokens) // 4
        other = params.prompt != prompt_digest(request.lora_name, request.cache_salt, request.tokens)
        twice = params.pin in self._fabric.fetched
        if not self._shared and (other or twice):
            raise KvGone("it was used already" if twice else "it is another prompt's")
        if self._shared and not twice:
            await self._wait(params.pin)
        self._fabric.fetched.add(params.pin)
        self._fabric.spoiled += other or twice
        await self._clock.sleep(tokens * BYTES_A_TOKEN / GIGABYTE / GIGABYTES_A_SECOND)
        self._free(params.pin)
        return Fetched(tokens, other or twice)

    async def _wait(self, name: str) -> None:
        pin = self._fabric.pins.get(name)
        if pin is not None:
            try:
                async with asyncio.timeout(ROOM_S_MAX):
                    await pin.ready.wait()
            except TimeoutError:
                raise KvGone(f"the KV of {name} did not come within {ROOM_S_MAX} s") from None
        if name not in self._fabric.pins:
            raise KvGone(f"{name} holds no KV any more")

    def _free(self, name: str) -> None:
        pin = self._fabric.pins.pop(name, None)
        if pin is not None:
            pin.ready.set()
            pin.free()


def _decode(params: bytes) -> SimParams:
    try:
        return msgspec.msgpack.decode(params, type=SimParams)
    except msgspec.DecodeError as error:
        raise ValueError(f"not parameters of a simulated hand-off: {error}") from error
