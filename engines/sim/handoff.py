"""KV hand-off between simulated engines, including the errors of a real one when a hand-off is misused.

A `SimFabric` is the memory shared by the engines of one process: KV pinned in it can be fetched once. Engines in separate
processes have none; they check only that the parameters name their prompt, and their worker calls `release` once their KV was fetched.

When a hand-off is used twice, or for another prompt, real engines generate tokens of another prompt with HTTP 200. With a
fabric so does this one: the fetched KV is `spoiled`, and the engine generates wrong tokens, which tests detect. Without a
fabric such a hand-off is rejected, as by the vLLM engine.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headwater.engines.engine import Pinned, Transfer
from headwater.engines.sim import KV_BYTES_PER_TOKEN, TRANSFER_GB_PER_S
from headwater.schemas.clock import Clock
from headwater.schemas.inference import Choreography, GenerateRequest, prompt_digest

LEASE_S = 30.0
ROOM_S_MAX = 60.0
"""How long a decode leg waits in a room for the prompt's KV."""

GIGABYTE = 1e9


class SimParams(msgspec.Struct, frozen=True):
    """Parameters for the decode leg: the pin in the fabric, the prompt's digest, and the number of computed tokens."""

    pin: str
    prompt: bytes
    tokens: int


class KvGone(Exception):
    """The KV no longer exists: its lease expired, or its engine ended."""


class Fetched(NamedTuple):
    """Number of tokens whose KV was fetched. `spoiled`: it belongs to another prompt.

    `cached`: how many of them the other engine had not had to compute; -1: it did not say.
    """

    tokens: int
    spoiled: bool
    cached: int = -1


class _Pin(msgspec.Struct):
    engine: str
    free: Callable[[], None]
    until_s: float
    cached: int = -1
    ready: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class SimFabric:
    """KV pinned by the engines of one process, and which of it was fetched."""

    def __init__(self) -> None:
        self.pins: dict[str, _Pin] = {}
        self.fetched: set[str] = set()
        self.spoiled = 0

    def drop_engine(self, engine: str) -> None:
        """Remove an engine that died, with its pinned KV."""
        for name in [name for name, pin in self.pins.items() if pin.engine == engine]:
            self.pins.pop(name).ready.set()


class SimHandoff:
    """One engine's side of hand-offs. `engine` is its unique name in the fabric."""

    def __init__(
        self,
        engine: str,
        clock: Clock,
        fabric: SimFabric | None = None,
        choreography: Choreography = "returned",
    ) -> None:
        self.choreography: Choreography = choreography
        self._engine = engine
        self._clock = clock
        self.is_shared = fabric is not None
        self._fabric = fabric or SimFabric()

    def pin(
        self, request: GenerateRequest, free: Callable[[], None], first_tokens: tuple[int, ...]
    ) -> Pinned:
        """Pin a prompt's KV; `free` is called once, when it is fetched or released, or its lease expires."""
        digest = prompt_digest(request.lora_name, request.cache_salt, request.tokens, request.media)
        params = SimParams(self._name(request), digest, len(request.tokens) // 4)
        self._fabric.pins[params.pin] = _Pin(self._engine, free, self._clock.monotonic_s() + LEASE_S)
        return Pinned(msgspec.msgpack.encode(params), LEASE_S, first_tokens)

    def computed(self, request: GenerateRequest, cached: int) -> bool:
        """The prompt of a prefill leg is computed, `cached` tokens of it before: its KV can be fetched.

        False: no engine will fetch it.
        """
        pin = self._fabric.pins.get(self._name(request))
        if pin is not None:
            pin.cached = cached
            pin.ready.set()
        return pin is not None

    def withdraw(self, request: GenerateRequest) -> None:
        """A prefill leg ended before its prompt was computed."""
        self._free(self._name(request))

    def _name(self, request: GenerateRequest) -> str:
        return f"{self._engine}/{request.request}"

    def release(self, params: bytes) -> None:
        """Release KV that no engine will fetch."""
        self._free(_decode(params).pin)

    def expire(self) -> None:
        """End the leases that expired."""
        now = self._clock.monotonic_s()
        for name in [name for name, pin in self._fabric.pins.items() if pin.until_s <= now]:
            self._free(name)

    def stop(self) -> None:
        """End all leases of this engine."""
        for name in [name for name, pin in self._fabric.pins.items() if pin.engine == self._engine]:
            self._free(name)

    async def fetch(self, request: GenerateRequest, transfer: Transfer) -> Fetched:
        """Fetch a prompt's KV. Raises `KvGone`."""
        try:
            params = _decode(transfer.params)
        except ValueError as error:
            raise KvGone(str(error)) from error
        tokens = len(request.tokens) // 4
        other = params.prompt != prompt_digest(
            request.lora_name, request.cache_salt, request.tokens, request.media
        )
        twice = params.pin in self._fabric.fetched
        if not self.is_shared and (other or twice):
            raise KvGone("it was already used" if twice else "it is another prompt's")
        if self.is_shared and not twice:
            await self._wait(params.pin)
        pin = self._fabric.pins.get(params.pin)
        cached = pin.cached if pin is not None and self.choreography == "room" else -1
        self._fabric.fetched.add(params.pin)
        self._fabric.spoiled += other or twice
        await self._clock.sleep(tokens * KV_BYTES_PER_TOKEN / GIGABYTE / TRANSFER_GB_PER_S)
        self._free(params.pin)
        return Fetched(tokens, other or twice, cached)

    async def _wait(self, name: str) -> None:
        pin = self._fabric.pins.get(name)
        if pin is not None:
            try:
                async with asyncio.timeout(ROOM_S_MAX):
                    await pin.ready.wait()
            except TimeoutError:
                raise KvGone(f"the KV of {name} did not arrive within {ROOM_S_MAX} s") from None
        if name not in self._fabric.pins:
            raise KvGone(f"{name} has no KV any more")

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
