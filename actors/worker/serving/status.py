"""The status of a worker over all its incarnations: what it publishes of itself, and whether it accepts requests."""

import asyncio
from typing import NamedTuple, Protocol

from headwater.schemas.events.fleet import Role, WorkerState
from headwater.schemas.messages.inference import Refused
from headwater.schemas.tables.capability import Capability
from headwater.schemas.tables.lease import ServedPart


class WorkerProfile(NamedTuple):
    """What a worker is started as. `instance` names the engine instance; the ranks of one engine share it.

    `embedding_format` names the image embeddings that it exchanges with other workers; "": its engine's.
    """

    role: Role = "both"
    instance: str = ""
    tier: str = ""
    taints: tuple[str, ...] = ()
    embedding_format: str = ""


class StatusPublisher(Protocol):
    """Appends the present status to the pool log."""

    def publish_status(self) -> None:
        """Publish it. Does not wait."""
        ...


class WorkerStatus:
    """Role, state, LoRA adapters and taints. Each change is published by the present incarnation, if there is one.

    `stopping` is set once the actor shuts down; `failure_reason` is set once the worker has failed.
    """

    def __init__(self, worker: str, profile: WorkerProfile, stopping: asyncio.Event) -> None:
        self.worker = worker
        self.instance = profile.instance
        self.tier = profile.tier
        self.embedding_format = profile.embedding_format
        self.role: Role = profile.role
        self.state: WorkerState = "ready"
        self.taints = profile.taints
        self.loras: tuple[str, ...] = ()
        self.lora_on_demand = False
        self.tokenizer = ""
        """The digest of its model's tokenizer; set once the model card is published."""
        self.media_processor = ""
        """The digest of the settings of its processor of media; set once the engine has started."""
        self.failure_reason = ""
        self.engine_death = ""
        """What the engine died of, from the moment that anything shows it; `engine_died` is then set."""
        self.engine_died = asyncio.Event()
        self.refused = 0
        """Requests that were refused because of the worker's state."""
        self.publisher: StatusPublisher | None = None
        """The present incarnation; None between two. A new incarnation publishes the whole status when it joins."""
        self._stopping = stopping

    @property
    def stopping(self) -> bool:
        """True once the actor shuts down."""
        return self._stopping.is_set()

    @property
    def is_serving(self) -> bool:
        """Is the engine expected to make progress on its requests?"""
        return not self.stopping and self.state in ("ready", "draining")

    def served_part(self, capabilities: frozenset[Capability]) -> ServedPart:
        """What the worker takes at present, with an engine of these capabilities."""
        if self.refusal():
            return ""
        if self.role == "encode":
            return "encode"
        if "split_only" not in capabilities:
            return "whole"
        return "decode" if self.role == "decode" else "prefill"

    @property
    def is_gone(self) -> bool:
        """Does this incarnation accept no request any more, whatever happens?"""
        return bool(self.failure_reason or self.engine_death or self.stopping)

    def refusal(self) -> str:
        """Why the worker accepts no request at present; "" if it does."""
        if self.failure_reason:
            return self.failure_reason
        if self.engine_death:
            return f"worker {self.worker}: {self.engine_death}"
        if self.stopping:
            return f"worker {self.worker} is shutting down"
        return "" if self.state == "ready" else f"worker {self.worker} is {self.state}"

    def refuse(self, reason: str, *, spent: bool = False) -> Refused:
        """The reply to a request that the worker does not take: another one may."""
        self.refused += 1
        return Refused(reason, True, spent, gone=self.is_gone)

    def note_engine_death(self, reason: str) -> None:
        """The engine has died: refuse requests from now on. `EngineHealth.run` then ends the worker."""
        if not self.engine_death:
            self.engine_death = reason or "its engine died"
            self.engine_died.set()

    def set_state(self, state: WorkerState) -> None:
        """Change the state."""
        if state != self.state:
            self.state = state
            self._publish()

    def set_role(self, role: Role) -> None:
        """Change the role."""
        if role != self.role:
            self.role = role
            self._publish()

    def set_taints(self, taints: tuple[str, ...]) -> None:
        """Change the taints."""
        if taints != self.taints:
            self.taints = taints
            self._publish()

    def set_loras(self, loras: tuple[str, ...]) -> None:
        """Change which LoRA adapters are loaded, by identity."""
        if loras != self.loras:
            self.loras = loras
            self._publish()

    def _publish(self) -> None:
        if self.publisher is not None:
            self.publisher.publish_status()
