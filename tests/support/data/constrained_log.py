"""A pool log whose decisions use every constraint and policy, as the bytes that its writers would append.

Also a program: `python -m tests.support.data.constrained_log SEED MESSAGES PATH` writes one, as in `tests/golden`.
"""

import gzip
import random
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.events.ports import Record
from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.state import RouterState
from headwater.schemas.encoding import NO_DIGEST, SCHEMA_VERSION, Batch, decode_batch, seal
from headwater.schemas.events import (
    LORA_ON_DEMAND,
    BlocksStored,
    Event,
    LoadReported,
    WorkerChanged,
    WorkerJoined,
)
from headwater.schemas.hashing import pack_hashes, tenant_digest
from headwater.schemas.routing import Decision, RouteQuery, Weights
from headwater.schemas.subjects import pool_subject
from tests.support.data.queries import route_query
from tests.support.data.story import BLOCK_SIZE, prompt
from tests.support.worlds.clock import WALL_NS

Message = tuple[int, str, int, bytes]
"""Position, subject, nanoseconds when it was stored, data."""

PAIR: Final = "sim/kv"
CAPABILITIES: Final = ("kv_events", "logprobs", LORA_ON_DEMAND)
POLICIES: Final = ("kv", "round_robin", "random", "power_of_two", "least_loaded", "session")
"""Of the log of `tests/golden`: the same seed must draw the same ones."""

ROUTER, ROUTER_EPOCH = "r1", 500
FLEET: Final[dict[str, dict[str, Any]]] = {
    "p1": {"role": "prefill", "pairs_with": PAIR},
    "d1": {"role": "decode", "pairs_with": PAIR, "tier": "gold"},
    "d2": {"role": "decode", "pairs_with": PAIR},
    "b1": {"capabilities": CAPABILITIES, "lora_slots": 2, "tier": "gold", "pairs_with": PAIR},
    "b2": {"capabilities": CAPABILITIES, "lora_slots": 1, "taints": ("spot",)},
    "b3": {"capabilities": ("logprobs",)},
}

TENANTS: Final = ("", "blue", "red")
LATE_NS = 150_000_000
"""From the clock of a worker's message until it is stored: late enough for decisions to take account of it."""


class ConstrainedLog:
    """Appends messages with sound chains; `state` is their fold."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.answers = random.Random(seed)
        self.tenants = random.Random(seed)
        self.state = RouterState()
        self.messages: list[Message] = []
        self.wall_ns = WALL_NS
        self.decisions = 0
        self.given: list[tuple[str, str]] = []
        self._heads: dict[str, tuple[int, bytes]] = {}
        for epoch, (name, facts) in enumerate(FLEET.items(), 1):
            role = facts.get("role", "both")
            rest = {key: value for key, value in facts.items() if key != "role"}
            self.append(
                "fleet", name, WorkerJoined(name, epoch, "m", "sim", role, BLOCK_SIZE, 900, 64, **rest)
            )
            if "lora_slots" in facts:
                changed = WorkerChanged(name, epoch, "ready", role, ("one",), facts.get("taints", ()))
                self.append("fleet", name, changed)

    def append(self, kind: Any, writer: str, event: Event) -> None:
        """One more message."""
        subject = pool_subject("ns", "p", kind, writer)
        seq, previous = self._heads.get(subject, (0, NO_DIGEST))
        epoch = ROUTER_EPOCH if writer == ROUTER else list(FLEET).index(writer) + 1
        sealed = seal(
            Batch(SCHEMA_VERSION, writer, epoch, seq + 1, self.wall_ns, (event,), previous=previous)
        )
        self._heads[subject] = (seq + 1, sealed.digest)
        position = self.state.position + 1
        stored_ns = self.wall_ns + (0 if writer == ROUTER else LATE_NS)
        self.messages.append((position, subject, stored_ns, sealed.data))
        broken = self.state.apply(Record(position, subject, stored_ns, decode_batch(sealed.data)))
        assert broken is None, broken

    def turn(self) -> None:
        """One thing happens: blocks stored, load reported, or a decision."""
        draw = self.draw
        self.wall_ns += draw.randrange(400_000_000)
        chance, worker = draw.random(), draw.choice(list(FLEET))
        if chance < 0.2:
            names = prompt(draw.randrange(40))
            self.append("kv", worker, BlocksStored(0, pack_hashes(names), draw.choice((0, 0, 1))))
        elif chance < 0.55:
            self.append("load", worker, self._report(worker))
        else:
            self._decide()

    def _decide(self) -> None:
        query = self._query()
        self.decisions += 1
        context = DecisionContext(
            self.decisions, self.state.position, self.decisions - 1, self.wall_ns, Weights(), False
        )
        state = self.state
        reply = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        if not isinstance(reply, Decision):
            self.decisions -= 1
            return
        self.given.append((reply.worker, reply.request))
        self.append("route", ROUTER, reply)

    def _query(self) -> RouteQuery:
        draw = self.draw
        names = prompt(draw.randrange(40))
        leg = "decode" if draw.random() < 0.15 else ""
        pinned = draw.choice(list(FLEET)) if not leg and draw.random() < 0.1 else ""
        policy = draw.choice(("", "", "", *POLICIES))
        return route_query(
            f"req-{self.state.position}-0-1",
            len(names) * BLOCK_SIZE + draw.choice((0, 1, 15)),
            draw.randrange(1, 500),
            pack_hashes(names),
            pinned=pinned,
            exclude=(f"{draw.choice(list(FLEET))}.{draw.randrange(1, 6)}",) if draw.random() < 0.3 else (),
            lora_name=draw.choice(("", "", "", "one", "two")) if not leg else "",
            needs=("logprobs",) if draw.random() < 0.2 else (),
            tier="gold" if draw.random() < 0.2 else "",
            tolerates=("spot",) if draw.random() < 0.5 else (),
            policy="direct" if pinned else policy,
            temperature=draw.choice((-1.0, 0.0, 0.5)),
            session=draw.choice(("", "a", "b")),
            tenant=self.tenants.choice(TENANTS),
            **({"leg": "decode", "pairs_with": PAIR} if leg else {}),
        )

    def _report(self, worker: str) -> LoadReported:
        draw = self.draw
        own = [request for name, request in self.given if name == worker]
        accepted, prefilled, finished = (
            tuple(request for request in own if draw.random() < 0.5) for _ in range(3)
        )
        self.given = [one for one in self.given if one[1] not in finished]
        prefills = tuple((1 << draw.randrange(4, 12), draw.randrange(1, 90_000)) for _ in range(4))
        return LoadReported(
            draw.randrange(9),
            draw.randrange(3),
            draw.randrange(900),
            900,
            accepted,
            prefilled,
            finished,
            tuple(draw.randrange(-1, 99) for _ in prefilled),
            prefills,
            draw.randrange(9_000),
            self.answers.randrange(600),
            tuple((self.answers.randrange(1, 500), self.answers.randrange(500)) for _ in finished),
            answered=tuple(self._answered() for _ in finished),
        )

    def _answered(self) -> tuple[int, int]:
        return self.tenants.randrange(1, 300), tenant_digest(self.tenants.choice(TENANTS))


def constrained_log(seed: int, messages: int) -> list[Message]:
    """At least so many messages of log `seed`."""
    log = ConstrainedLog(seed)
    while len(log.messages) < messages:
        log.turn()
    return log.messages


if __name__ == "__main__":
    found = constrained_log(int(sys.argv[1]), int(sys.argv[2]))
    Path(sys.argv[3]).write_bytes(gzip.compress(msgspec.msgpack.encode(found), mtime=0))
