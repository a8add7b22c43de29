"""Open requests that make no progress, by the logs: what each waits for, since when, and the remedy. Pure.

A request whose first token has come has an event every `CHECKPOINT_TOKENS` tokens, so a slow one is quiet for longer than
others: it gets twice the time that so many tokens take by the worker's reports.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from headwater.events.ports import Record
from headwater.router.worker import ACCEPTED, DECIDED, Worker, state_of
from headwater.schemas.events import (
    RequestAccepted,
    RequestCheckpoint,
    RequestEncoded,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestsOpen,
    RequestStarted,
    RequestStepped,
    SagaState,
)
from headwater.schemas.routing import Decision
from headwater.schemas.tables import Lease

CHECKPOINT_TOKENS: Final = 64
"""Tokens between two events of a request that generates."""

SILENT_NS: Final = 5_000_000_000
"""A worker reports its load every second; after so long without a report something is wrong with it."""


class ChoiceProgress(msgspec.Struct):
    """One choice of an open request: the state of its saga since a time, on which worker, as which attempt, and its tokens so far."""

    index: int
    state: SagaState
    since_ns: int
    last_ns: int
    worker: str = ""
    epoch: int = 0
    attempt: str = ""
    started: bool = False
    tokens: int = 0


class OpenRequest(msgspec.Struct):
    """A request that was accepted by an edge's incarnation and has not ended; `last_ns` is when a log had an event of it last."""

    id: str
    edge: str
    edge_epoch: int
    accepted_ns: int
    last_ns: int
    model: str
    endpoint: str
    prompt_tokens: int
    choices: dict[int, ChoiceProgress]


class OpenRequests:
    """The open requests of a request log, message by message. `since` are the edges' own marks: `RequestsOpen`."""

    def __init__(self) -> None:
        self.open: dict[str, OpenRequest] = {}
        self.since: dict[str, int] = {}

    def fold(self, record: Record) -> None:
        """Take one message of the request log."""
        for event in record.batch.events:
            match event:
                case RequestsOpen(since=since):
                    self.since[record.batch.writer] = since
                case RequestAccepted():
                    self._accept(event, record)
                case RequestEnded(request=request):
                    self.open.pop(request, None)
                case (
                    RequestRouted()
                    | RequestPrefilled()
                    | RequestStarted()
                    | RequestCheckpoint()
                    | RequestStepped()
                    | RequestEncoded()
                ):
                    open_request = self.open.get(event.request)
                    if open_request is not None:
                        open_request.last_ns = record.stored_ns
                        _advance(open_request, event, record.stored_ns)
                case _:
                    pass

    def _accept(self, event: RequestAccepted, record: Record) -> None:
        now_ns = record.stored_ns
        choices = {index: ChoiceProgress(index, "routing", now_ns, now_ns) for index in range(event.choices)}
        self.open[event.request] = OpenRequest(
            event.request,
            record.batch.writer,
            record.batch.epoch,
            now_ns,
            now_ns,
            event.model,
            event.endpoint,
            event.prompt_tokens,
            choices,
        )


_Step = (
    RequestRouted | RequestPrefilled | RequestStarted | RequestCheckpoint | RequestStepped | RequestEncoded
)


def _advance(request: OpenRequest, event: _Step, now_ns: int) -> None:
    progress = request.choices.setdefault(
        event.choice, ChoiceProgress(event.choice, "routing", now_ns, now_ns)
    )
    progress.last_ns = now_ns
    match event:
        case RequestRouted():
            progress.state, progress.since_ns = ("prefill" if event.leg == "prefill" else "decode"), now_ns
            progress.worker, progress.epoch, progress.attempt = event.worker, event.epoch, event.attempt
            progress.tokens, progress.started = event.emitted_tokens, event.emitted_tokens > 0
        case RequestPrefilled():
            progress.state, progress.since_ns = "handoff", now_ns
        case RequestStarted():
            progress.state, progress.since_ns, progress.started = "decode", now_ns, True
            progress.worker, progress.epoch = event.worker, event.epoch
        case RequestCheckpoint():
            progress.tokens = event.emitted_tokens
        case RequestStepped():
            progress.state, progress.since_ns = event.after, now_ns
        case _:
            pass


class Surroundings(NamedTuple):
    """What is known of a pool at `now_ns`: its workers by the fold, and where they are known the leases of all processes.

    `reported_ns` is when each worker's last load report was stored, `decisions` the newest decision for each request, and
    `decided_ns` when that was stored.
    """

    pool: str
    now_ns: int
    workers: Mapping[str, Worker]
    cold: frozenset[str] = frozenset()
    leases: tuple[Lease, ...] | None = None
    reported_ns: Mapping[str, int] = {}
    decisions: Mapping[str, Decision] = {}
    decided_ns: Mapping[str, int] = {}

    def lease(self, kind: str, name: str) -> Lease | None:
        """The present lease of a process."""
        return next((lease for lease in self.leases or () if (lease.kind, lease.name) == (kind, name)), None)


class Waiting(msgspec.Struct, frozen=True):
    """What a choice waits for, on which worker ("" for none), what is known of that, and what to do."""

    choice: int
    state: SagaState
    since_ns: int
    quiet_ns: int
    worker: str
    waits_for: str
    facts: tuple[str, ...]
    remedy: str


class Stuck(msgspec.Struct, frozen=True):
    """An open request without progress. `facts` are about its edge."""

    request: str
    edge: str
    endpoint: str
    prompt_tokens: int
    accepted_ns: int
    quiet_ns: int
    facts: tuple[str, ...]
    waiting: tuple[Waiting, ...]


def stuck_requests(requests: Iterable[OpenRequest], around: Surroundings, quiet_ns: int) -> list[Stuck]:
    """The requests of which every choice has been quiet for too long, the longest first."""
    stuck = []
    for request in requests:
        choices = [choice for choice in request.choices.values() if choice.state != "ended"]
        if any(not is_quiet(request, choice, around, quiet_ns) for choice in choices):
            continue
        waiting = tuple(waits_for(request, choice, around) for choice in choices)
        quiet = around.now_ns - _last_ns(request, around)
        stuck.append(
            Stuck(
                request.id,
                request.edge,
                request.endpoint,
                request.prompt_tokens,
                request.accepted_ns,
                quiet,
                _edge_facts(request, around),
                waiting,
            )
        )
    return sorted(stuck, key=lambda request: -request.quiet_ns)


def _last_ns(request: OpenRequest, around: Surroundings) -> int:
    return max(request.last_ns, around.decided_ns.get(request.id, 0))


def is_quiet(request: OpenRequest, choice: ChoiceProgress, around: Surroundings, quiet_ns: int) -> bool:
    """Has nothing been heard of a choice for too long?"""
    worker = around.workers.get(choice.worker)
    allowed_ns = quiet_ns
    if choice.state == "decode" and choice.started and worker is not None:
        allowed_ns = max(quiet_ns, int(2e6 * CHECKPOINT_TOKENS * worker.step_ms))
    last_ns = choice.last_ns
    if choice.state in ("routing", "handoff"):
        last_ns = max(last_ns, around.decided_ns.get(request.id, 0))
    return around.now_ns - last_ns > allowed_ns


def _edge_facts(request: OpenRequest, around: Surroundings) -> tuple[str, ...]:
    if around.leases is None:
        return ()
    lease = around.lease("edge", request.edge)
    if lease is None:
        return (
            f"edge {request.edge} is gone: the next edge of that name ends this request; its client has no connection",
        )
    if lease.epoch != request.edge_epoch:
        return (f"edge {request.edge} has restarted, as epoch {lease.epoch}, and will end this request",)
    if lease.stalled:
        return (
            f"edge {request.edge} cannot write to its log: free disk space on the NATS server, or restore its peers",
        )
    return ()


def waits_for(request: OpenRequest, choice: ChoiceProgress, around: Surroundings) -> Waiting:
    """What a choice waits for."""
    decision = around.decisions.get(request.id)
    newer = decision is not None and around.decided_ns.get(request.id, 0) > choice.since_ns
    if choice.state == "routing" and decision is not None and newer:
        awaited = f"{decision.worker} to accept it, as decided at log position {decision.position}"
        return _on_worker(choice, around, decision.worker, decision.epoch, decision.request, awaited)
    if choice.state == "routing":
        facts, remedy = _router(around)
        return _waiting(choice, around, "", "a router to choose a worker", facts, remedy)
    if choice.state == "handoff":
        if decision is not None and newer and decision.leg == "decode":
            awaited = f"{decision.worker} to take over its KV from {choice.worker}"
            return _on_worker(choice, around, decision.worker, decision.epoch, decision.request, awaited)
        facts, remedy = _router(around)
        awaited = f"a router to choose a decode worker for its KV on {choice.worker}"
        return _waiting(choice, around, choice.worker, awaited, facts, remedy)
    awaited = f"the prefill of {choice.worker}"
    if choice.state == "decode":
        awaited = f"{'further tokens' if choice.started else 'the first token'} of {choice.worker}"
        awaited += f", after {choice.tokens} tokens" if choice.tokens else ""
    return _on_worker(choice, around, choice.worker, choice.epoch, choice.attempt, awaited)


def _waiting(
    choice: ChoiceProgress, around: Surroundings, worker: str, awaited: str, facts: Iterable[str], remedy: str
) -> Waiting:
    quiet_ns = around.now_ns - choice.last_ns
    return Waiting(
        choice.index, choice.state, choice.since_ns, quiet_ns, worker, awaited, tuple(facts), remedy
    )


def _router(around: Surroundings) -> tuple[list[str], str]:
    """What is known about the routers of the pool and the workers that they could choose, and the remedy."""
    leases = [
        process for process in around.leases or () if process.kind == "router" and process.pool == around.pool
    ]
    if around.leases is not None and not leases:
        return [
            f"no router of pool {around.pool} holds a lease"
        ], f"start one: headwater router --pool {around.pool}"
    facts = [f"router {process.name} cannot write to its log" for process in leases if process.stalled]
    if facts:
        return facts, "free disk space on the NATS server, or restore its peers"
    if not around.workers:
        return ["no worker is in the pool"], "start workers: headwater engine"
    ready = [worker for worker in around.workers.values() if worker.takes_requests]
    if not ready:
        states = ", ".join(f"{worker.name} is {state_of(worker)}" for worker in around.workers.values())
        return [states], "resume or wake one of them (headwater ctl WORKER resume), or start another"
    waiting = sum(worker.waiting for worker in ready)
    queued = sum(worker.prefill_tokens for worker in ready)
    facts = [
        f"{len(ready)} workers take requests; {waiting} requests wait in their engines, {queued} prompt tokens are queued"
    ]
    return (
        facts,
        "it is in a router's queue if all of them are saturated: add workers, or raise the limits of --busy",
    )


def _on_worker(
    choice: ChoiceProgress, around: Surroundings, name: str, epoch: int, attempt: str, awaited: str
) -> Waiting:
    """A choice that waits for a worker: the worst thing that is known of it decides the remedy."""
    worker = around.workers.get(name)
    if worker is None or worker.epoch != epoch:
        fact = f"{name} has left the pool"
        if worker is not None:
            fact = f"{name} has restarted: epoch {epoch} has ended, {worker.epoch} serves"
        remedy = "its edge moves the request when it notices; if it does not, look at the edge's log and restart it"
        return _waiting(choice, around, name, awaited, [fact], remedy)
    facts, remedy = _health(worker, around)
    facts += _place(worker, attempt)
    remedy = remedy or f"look at {name}: headwater ctl {name} status, and its log"
    return _waiting(choice, around, name, awaited, facts, remedy)


def _health(worker: Worker, around: Surroundings) -> tuple[list[str], str]:
    """What is unusual about a worker, and the remedy for the worst of it; "" if nothing is known to help."""
    name = worker.name
    facts: list[str] = []
    remedies: list[str] = []
    if around.leases is not None:
        lease = around.lease("worker", name)
        if lease is None:
            facts.append(f"{name} holds no lease: a router is about to remove it from the pool")
            remedies.append(f"restart {name} if its process still runs")
        elif lease.stalled:
            facts.append(f"{name} cannot write to its log")
            remedies.append("free disk space on the NATS server, or restore its peers")
    reported_ns = around.reported_ns.get(name, 0)
    if reported_ns and around.now_ns - reported_ns > SILENT_NS:
        facts.append(f"{name} has not reported its load for {(around.now_ns - reported_ns) / 1e9:.0f} s")
        remedies.append(f"its process may hang: kill -USR1 prints where it stands; restart {name}")
    if worker.state == "paused":
        facts.append(f"{name} is paused")
        remedies.append(f"headwater ctl {name} resume")
    elif worker.state == "sleeping":
        facts.append(f"{name} is asleep")
        remedies.append(f"headwater ctl {name} wake")
    elif worker.draining or worker.state == "draining":
        facts.append(f"{name} is draining: it finishes what it has, and takes nothing new")
    if name in around.cold:
        facts.append(f"{name} is cold: KV events of it are missing")
    if worker.waiting:
        full = worker.used_blocks >= 0.95 * worker.total_blocks
        room = f", with {worker.used_blocks} of {worker.total_blocks} KV blocks in use"
        facts.append(
            f"{worker.waiting} requests wait in its engine, {worker.running} run{room if full else ''}"
        )
        remedies.append("add workers, or limit the context or the number of concurrent requests")
    return facts, remedies[0] if remedies else ""


def _place(worker: Worker, attempt: str) -> list[str]:
    """Where the request stands at a worker, by its reports."""
    active = worker.requests.get(attempt)
    if active is None:
        return (
            [f"{worker.name} has reported that it has ended, and its edge has not noted that"]
            if attempt
            else []
        )
    if active.stage == DECIDED:
        return [f"{worker.name} has not reported that it accepted it"]
    if active.stage == ACCEPTED:
        before = list(worker.computing).index(attempt) if attempt in worker.computing else 0
        return [f"{worker.name} has accepted it; {before} prompts are to be computed before it"]
    return [f"{worker.name} has computed its prompt"]
