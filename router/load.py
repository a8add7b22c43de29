"""The load of each worker as the log tells it: who is there, what they were given and what they finished.

Decisions and engine reports are written by different actors, so a report may come before the decision it
speaks of. Stages that come early are kept until their decision arrives; with that, a router that applies its
own decisions at once and a replay that reads them from the log reach the same state.
"""

import msgspec

from headwater.router.assumed import Assumed, Belief
from headwater.router.step_model import StepModel
from headwater.router.worker import ACCEPTED, DECIDED, FINISHED, PREFILLED, Active, Worker
from headwater.schemas.fleet import WorkerChanged, WorkerDraining, WorkerJoined, WorkerLeft
from headwater.schemas.load import LoadReported, RequestsHeld
from headwater.schemas.route import Decision, DecisionVoided

EARLY_MAX = 10_000
"""Early stages kept. Beyond, the oldest is dropped: it costs a request counted until its worker's next life."""
LEFT_MAX = 4_096
"""Workers remembered after they left. One that joins again later counts decisions from before it left."""


STEP_MEMORY = 8
"""About so many reports of the time between tokens count."""


class Loads(msgspec.Struct):
    """All workers, and the stages that came before their decision, by 'worker.epoch/request'.

    `steps` are the step times of all workers of an engine together, for those that did little yet. `left` holds the
    epoch that left last, by worker: a worker whose lease lapsed and was reclaimed joins again under the same epoch.
    """

    workers: dict[str, Worker] = {}
    early: dict[str, int] = {}
    steps: dict[str, StepModel] = {}
    assumed: Assumed = msgspec.field(default_factory=Assumed)
    left: dict[str, int] = {}

    def join(self, event: WorkerJoined, position: int = 0) -> bool:
        """A worker (re)starts empty at a log position. False for an epoch that is not newer than the one known."""
        known = self.workers.get(event.worker)
        if known is not None and known.epoch >= event.epoch:
            return False
        self._forget_early(event.worker)
        if known is not None:
            self._assume_nothing(known)
        self.workers[event.worker] = Worker(
            name=event.worker,
            epoch=event.epoch,
            engine=event.engine,
            role=event.role,
            block_size=event.block_size,
            total_blocks=event.total_blocks,
            max_running=event.max_running,
            lora_slots=event.lora_slots,
            capabilities=event.capabilities,
            pairs_with=event.pairs_with,
            instance=event.instance,
            tier=event.tier,
            taints=event.taints,
            rejoined=position if self.left.pop(event.worker, 0) == event.epoch else 0,
        )
        return True

    def change(self, event: WorkerChanged) -> None:
        """A worker stands otherwise from now on."""
        worker = self.current(event.worker, event.epoch)
        if worker is not None:
            worker.state, worker.role, worker.loras = event.state, event.role, event.loras
            worker.taints = event.taints

    def drain(self, event: WorkerDraining) -> None:
        """A worker takes nothing new."""
        worker = self.current(event.worker, event.epoch)
        if worker is not None:
            worker.draining = True

    def leave(self, event: WorkerLeft) -> bool:
        """A worker is gone. False if that life of it was not known."""
        worker = self.current(event.worker, event.epoch)
        if worker is None:
            return False
        self._assume_nothing(worker)
        self._forget_early(event.worker)
        del self.workers[event.worker]
        self.left[event.worker] = event.epoch
        if len(self.left) > LEFT_MAX:
            del self.left[next(iter(self.left))]
        return True

    def _forget_early(self, worker: str) -> None:
        """Of lives that are over; their decisions will find no worker."""
        for key in [key for key in self.early if key.startswith(f"{worker}.")]:
            del self.early[key]

    def _assume_nothing(self, worker: Worker) -> None:
        for active in worker.requests.values():
            self.assumed.drop(worker.name, active.assumed)
        for belief in worker.beliefs.prompts.values():
            self.assumed.drop(worker.name, belief.hashes)

    def current(self, name: str, epoch: int) -> Worker | None:
        """The worker, if `epoch` is its present life."""
        worker = self.workers.get(name)
        return worker if worker is not None and worker.epoch == epoch else None

    def decide(self, decision: Decision) -> None:
        """A request was given to a worker."""
        worker = self.current(decision.worker, decision.epoch)
        if worker is not None and decision.position < worker.rejoined:
            # Made before the worker left: who made it has dropped it with the worker.
            return
        stage = self.early.pop(f"{decision.worker}.{decision.epoch}/{decision.request}", DECIDED)
        if worker is None or decision.request in worker.requests:
            return
        if decision.assumed and not worker.announces:
            self._believe(worker, decision)
        if stage == FINISHED:
            return
        cached = decision.chosen.cached_blocks * worker.block_size
        computed = stage == PREFILLED or decision.leg == "decode"
        uncached = 0 if computed else max(0, decision.prompt_tokens - cached)
        blocks = -(-decision.prompt_tokens // worker.block_size)
        assumed = decision.assumed if worker.announces else b""
        worker.requests[decision.request] = Active(uncached, blocks, decision.wall_ns, stage, assumed)
        self.assumed.add(worker.name, assumed)
        worker.prefill_tokens += uncached
        worker.decode_blocks += blocks
        if uncached:
            worker.computing[decision.request] = None
        if stage == DECIDED:
            worker.unaccepted[decision.request] = None

    def _believe(self, worker: Worker, decision: Decision) -> None:
        if decision.request in worker.beliefs.prompts:
            return
        new = decision.blocks - min(decision.chosen.cached_blocks, decision.blocks)
        belief = Belief(decision.wall_ns, new, decision.assumed)
        self.assumed.add(worker.name, belief.hashes)
        for fallen in worker.beliefs.add(decision.request, belief, worker.total_blocks):
            self.assumed.drop(worker.name, fallen.hashes)

    def void(self, event: DecisionVoided) -> None:
        """A decision stops counting, if its worker has not accepted it after all."""
        worker = self.current(event.worker, event.epoch)
        if worker is None or event.request not in worker.unaccepted:
            return
        active = worker.requests.pop(event.request)
        del worker.unaccepted[event.request]
        worker.computing.pop(event.request, None)
        worker.prefill_tokens -= active.uncached_tokens
        worker.decode_blocks -= active.blocks
        self.assumed.drop(worker.name, active.assumed)
        belief = worker.beliefs.remove(event.request)
        if belief is not None:
            self.assumed.drop(worker.name, belief.hashes)

    def report(self, name: str, epoch: int, event: LoadReported, wall_ns: int = 0) -> None:
        """An engine told its load and the progress of its requests, by its clock at `wall_ns`."""
        worker = self.current(name, epoch)
        if worker is None:
            return
        if event.prefilled:
            worker.told_ns = max(worker.told_ns, wall_ns)
        together = self.steps.setdefault(worker.engine, StepModel()) if event.prefills else worker.steps
        for tokens, micros in event.prefills:
            worker.steps.observe(tokens, micros / 1000)
            together.observe(tokens, micros / 1000)
        if event.step_us:
            step_ms = event.step_us / 1000
            worker.step_ms += (step_ms - worker.step_ms) / (STEP_MEMORY if worker.step_ms else 1)
        worker.running, worker.waiting = event.running, event.waiting
        worker.used_blocks, worker.total_blocks = event.used_blocks, event.total_blocks
        for request in event.accepted:
            self._advance(worker, request, ACCEPTED)
        for request in event.prefilled:
            self._advance(worker, request, PREFILLED)
        for request in event.finished:
            self._advance(worker, request, FINISHED)

    def hold(self, name: str, epoch: int, event: RequestsHeld) -> None:
        """An engine told all its requests: what it had accepted before and does not name has ended."""
        worker = self.current(name, epoch)
        if worker is None:
            return
        held = set(event.requests)
        for request, active in list(worker.requests.items()):
            if active.stage != DECIDED and request not in held:
                self._advance(worker, request, FINISHED)
        life = f"{name}.{epoch}/"
        for key in self.early:
            # Their decisions are still on their way to the log; here they came first.
            if key.startswith(life) and key[len(life) :] not in held:
                self.early[key] = FINISHED
        for request in event.requests:
            self._advance(worker, request, ACCEPTED)

    def _advance(self, worker: Worker, request: str, stage: int) -> None:
        active = worker.requests.get(request)
        if active is None:
            key = f"{worker.name}.{worker.epoch}/{request}"
            self.early[key] = max(stage, self.early.get(key, 0))
            if len(self.early) > EARLY_MAX:
                del self.early[next(iter(self.early))]
            return
        worker.unaccepted.pop(request, None)
        if stage >= PREFILLED:
            worker.prefill_tokens -= active.uncached_tokens
            active.uncached_tokens = 0
            worker.computing.pop(request, None)
        if stage == FINISHED:
            worker.decode_blocks -= active.blocks
            self.assumed.drop(worker.name, active.assumed)
            del worker.requests[request]
        else:
            active.stage = max(active.stage, stage)
