"""Rules of control calls that hold for every engine: LoRA slots and ranks, sleep, prompts to pool.

The engines differ in how they load, sleep and pool, and not in what they refuse.
"""

from collections.abc import Collection

from headwater.engines.engine import EngineError, EngineInfo, LoraAdapter, RequestRejected
from headwater.schemas.messages.inference import EmbedRequest


def check_adapter(adapter: LoraAdapter, loaded: Collection[str], slots: int, rank_max: int) -> None:
    """Raises `EngineError` for an adapter of too large a rank, or one more than there are slots."""
    if adapter.rank > rank_max:
        raise EngineError(
            f"adapter {adapter.name!r} has rank {adapter.rank}, this engine supports up to {rank_max}"
        )
    if adapter.name not in loaded and len(loaded) >= slots:
        raise EngineError(f"all {slots} LoRA slots are in use: {', '.join(sorted(loaded))}")


def check_loaded(name: str, loaded: Collection[str]) -> None:
    """Raises `RequestRejected` for a request that names an adapter which is not loaded; "" is the base model."""
    if name and name not in loaded:
        names = ", ".join(sorted(loaded)) or "none"
        raise RequestRejected(f"no LoRA adapter {name!r} is loaded here; loaded are: {names}", param="model")


def check_sleep(level: int, *, asleep: bool, busy: int) -> None:
    """Raises `EngineError` for an unknown level, an engine that sleeps, or one that runs requests."""
    if level not in (1, 2):
        raise EngineError(
            f"there is no sleep level {level}: 1 keeps the weights in host memory, 2 discards them"
        )
    if asleep:
        raise EngineError("it is already asleep")
    if busy:
        raise EngineError(f"{busy} requests are running: drain or abort them before it sleeps")


def check_text_only(request: EmbedRequest) -> None:
    """Raises `RequestRejected` for media in prompts to pool: such an engine would pool their places."""
    if any(request.media):
        raise RequestRejected("this engine pools text only", param="messages")


def check_pooling(info: EngineInfo, task: str, lengths: Collection[int]) -> None:
    """Raises `RequestRejected` for a task that the model does not have, or a prompt that it cannot take."""
    if task not in info.tasks:
        raise RequestRejected(f"{task!r} is not supported by this model; supported: {', '.join(info.tasks)}")
    for length in lengths:
        if not 0 < length <= info.context_length:
            raise RequestRejected(f"{length} tokens; 1 to {info.context_length} are possible")
