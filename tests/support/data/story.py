"""A made-up life of a small fleet as its pool log tells it: the same for the same seed, on any machine.

Also a program: `python -m tests.support.data.story SEED RECORDS` prints digests of the fold, for tests that compare interpreters.
"""

import random
import sys

import numpy as np

from headwater.events.ports import Record
from headwater.router.decide import DecisionContext, decide, prompt_of
from headwater.router.policies import POLICIES
from headwater.router.state import RouterState
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    KvGap,
    LoadReported,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.hashing import U64, chain_plain, pack_hashes, seed
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused, Weights
from tests.support.data.examples import joined, record
from tests.support.data.queries import route_query
from tests.support.worlds.clock import WALL_NS

BLOCK_SIZE = 16
WORKERS = ("w1", "w2", "w3", "w4")
WEIGHTS = Weights()
ROOTS = (0, 0, seed("", "tenant"), seed("adapter"))


def prompt(number: int) -> U64:
    """Block names of one of some 40 prompts. Groups of them begin alike."""
    root = ROOTS[number % len(ROOTS)]
    tokens = [number % 8] * (number % 5) + [number] * (3 + number % 7)
    return np.array(chain_plain(tokens, 1, root), np.uint64)


def query(draw: random.Random, request: str, *, wild: bool = True) -> RouteQuery:
    """A request for some prompt, now and then pinned or with a worker excluded. `wild`: and by any policy."""
    names = prompt(draw.randrange(40))
    return route_query(
        request,
        len(names) * BLOCK_SIZE + draw.choice((0, 0, 1, 15)),
        draw.randrange(1, 500),
        pack_hashes(names),
        pinned=draw.choice(WORKERS) if draw.random() < 0.1 else "",
        exclude=(f"{draw.choice(WORKERS)}.{draw.randrange(1, 4)}",) if draw.random() < 0.2 else (),
        policy=draw.choice(("", "", *POLICIES)) if wild else "",
        temperature=draw.choice((-1.0, 0.0, 0.5)) if wild else 0.0,
        session=draw.choice(("", "a", "b", "c")),
    )


def reply_on(
    state: RouterState, asked: RouteQuery, *, number: int = 1, wall_ns: int = 0, weights: Weights = WEIGHTS
) -> Decision | RouteRefused:
    """What a router with these weights answers on this state, as its decision `number`."""
    standing = DecisionContext(number, state.position, number - 1, wall_ns, weights, False)
    return decide(state.index, state.loads, state.cold, prompt_of(asked), asked, standing)


def decided(state: RouterState, asked: RouteQuery, number: int, wall_ns: int) -> Decision | None:
    """What a router would decide on this state, None where it refuses."""
    reply = reply_on(state, asked, number=number, wall_ns=wall_ns)
    return reply if isinstance(reply, Decision) else None


def tell(
    state: RouterState, *events: Event, writer: str = "w1", epoch: int = 1, wall_ns: int = WALL_NS
) -> None:
    """Fold one more message."""
    state.apply(record(state.position + 1, *events, writer=writer, epoch=epoch, wall_ns=wall_ns))


def fleet_of(*joined: WorkerJoined) -> RouterState:
    """The state after these workers have joined."""
    state = RouterState()
    for event in joined:
        tell(state, event, writer=event.worker)
    return state


class Story:
    """Tells one record after the other; `state` is the fold of what was told."""

    def __init__(self, number: int, *, wild: bool = True) -> None:
        self.wild = wild
        self.draw = random.Random(number)
        self.state = RouterState()
        self.wall_ns = WALL_NS
        self.epoch = 0
        self.decisions = 0
        self.given: list[tuple[str, str]] = []

    def next(self) -> Record:
        """The next log message."""
        draw = self.draw
        self.wall_ns += draw.randrange(2_000_000_000)
        writer, epoch, event = self._event()
        if draw.random() < 0.05:
            # Somebody whose life is over, or who was never known, speaks up.
            epoch += draw.choice((-1, 1, 1000))
        told = record(self.state.position + 1, event, writer=writer, epoch=epoch, wall_ns=self.wall_ns)
        self.state.apply(told)
        return told

    def _event(self) -> tuple[str, int, Event]:
        draw, loads = self.draw, self.state.loads
        worker = draw.choice(WORKERS)
        known = loads.workers.get(worker)
        if known is None or draw.random() < 0.02:
            self.epoch += 1
            return worker, self.epoch, joined(worker, self.epoch, block_size=BLOCK_SIZE)
        chance = draw.random()
        if chance < 0.35:
            return worker, known.epoch, self._cache()
        if chance < 0.6:
            self.decisions += 1
            made = decided(
                self.state,
                query(draw, f"req-{self.decisions}-0-1", wild=self.wild),
                self.decisions,
                self.wall_ns,
            )
            if made is not None:
                self.given.append((made.worker, made.request))
                return "r1", 500, made
        if chance < 0.96:
            return worker, known.epoch, self._report(worker)
        if chance < 0.98:
            return worker, known.epoch, WorkerDraining(worker, known.epoch)
        return "r1", 500, WorkerLeft(worker, known.epoch, "lease lapsed")

    def _cache(self) -> Event:
        draw, names = self.draw, prompt(self.draw.randrange(40))
        start = draw.randrange(len(names))
        chance, tier = draw.random(), draw.choice((0, 0, 0, 1, 2))
        if chance < 0.65:
            start = start if draw.random() < 0.3 else 0
            parent = int(names[start - 1]) if start else 0
            return BlocksStored(parent, pack_hashes(names[start:]), tier)
        if chance < 0.88:
            return BlocksRemoved(pack_hashes(names[start:]), tier)
        return BlocksCleared() if chance < 0.93 else KvGap(draw.randrange(1, 9))

    def _report(self, worker: str) -> LoadReported:
        draw = self.draw
        mine = [request for name, request in self.given if name == worker]
        accepted, prefilled, finished = (
            tuple(request for request in mine if draw.random() < 0.4) for _ in range(3)
        )
        self.given = [one for one in self.given if one[1] not in finished]
        prefills = tuple((1 << draw.randrange(14), draw.randrange(90_000)) for _ in range(draw.randrange(4)))
        return LoadReported(
            draw.randrange(9),
            draw.randrange(9),
            draw.randrange(900),
            1000,
            accepted,
            prefilled,
            finished,
            tuple(draw.randrange(-1, 99) for _ in prefilled),
            prefills,
            draw.randrange(9_000),
        )


def story(number: int, records: int, *, wild: bool = True) -> list[Record]:
    """The first records of story `number`."""
    telling = Story(number, wild=wild)
    return [telling.next() for _ in range(records)]


def fold(records: list[Record], state: RouterState | None = None) -> RouterState:
    """The state after these records."""
    state = state or RouterState()
    for one in records:
        state.apply(one)
    return state


def digests(number: int, records: int) -> str:
    """Digests of the state after a story at whose end every worker has a hole in its announcements."""
    state = fold(story(number, records))
    for worker in list(state.loads.workers.values()):
        state.apply(record(state.position + 1, KvGap(1), writer=worker.name, epoch=worker.epoch))
    return f"{state.digest()} {state.index.digest()} {len(state.cold)} {len(state.loads.early)}"


if __name__ == "__main__":
    print(digests(int(sys.argv[1]), int(sys.argv[2])))
