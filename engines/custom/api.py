"""The interface of an engine in one file: what it is given, and what it returns. See `headwater.engines.custom` for an example."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, get_args

from headwater.engines.engine import Aborts, EngineInfo, EngineUnavailable, Step, Transfer
from headwater.engines.model_files import ModelFiles
from headwater.schemas.events import Role
from headwater.schemas.inference import Choreography, Leg, Sampling
from headwater.schemas.tables import HINTS, NEEDS, Capability

BLOCK_SIZE: Final = 16
TOTAL_BLOCKS: Final = 4_096
MAX_RUNNING: Final = 64


class EngineSetup(NamedTuple):
    """What `start` is given. `folder` is that of `--model`, None without it; `options` are those of `--engine-options`.

    `files` are the model's tokenizer and limits; without `--model` those of a tokenizer with one token per byte.
    """

    worker: str
    role: Role
    folder: Path | None
    files: ModelFiles
    block_size: int = BLOCK_SIZE
    context_length: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)

    def info(self, **changes: Any) -> EngineInfo:
        """Return what `start` returns: sizes from the settings, with `changes` to fields of `EngineInfo`."""
        info = EngineInfo(
            self.files.name,
            self.block_size,
            TOTAL_BLOCKS,
            MAX_RUNNING,
            self.context_length or self.files.context_length,
        )
        return info._replace(**changes)


class EngineRequest(NamedTuple):
    """One prompt. `leg` and `transfer` matter only to engines with `prefill`: see `Engine.submit`."""

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    lora_name: str = ""
    cache_salt: str = ""
    priority: int = 0
    leg: Leg = ""
    transfer: Transfer | None = None


class PoolingRequest(NamedTuple):
    """Prompts to pool into one vector each. Fields as in `EmbedRequest`."""

    id: str
    prompts: tuple[tuple[int, ...], ...]
    task: str = "embed"
    lora_name: str = ""
    dimensions: int = 0


Output = int | Sequence[int] | Step
"""What `generate` yields: one token id, several, or a `Step` for log probabilities, cached tokens or the finish."""


class CustomEngineClass(Protocol):
    """The two required methods. `METHODS` of `headwater.engines.custom.api` lists the optional ones."""

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Load the model. Raises `EngineUnavailable` with what to install or change."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[Output]:
        """An async generator of the answer's tokens, as they come.

        It may yield more than `request.sampling.max_tokens`, stop tokens and the end of the answer: the rest is cut
        off and the generator closed. Raises `RequestRejected` for a request that cannot succeed. Any other exception
        ends the engine.
        """
        ...


# The capabilities of an engine class, computed from its optional methods.

METHODS: Final[dict[tuple[str, ...], tuple[Capability, ...]]] = {
    ("embed",): ("embed",),
    ("generate_images",): ("image_generation",),
    ("generate_video",): ("video_generation",),
    ("load_lora", "unload_lora"): ("lora",),
    ("prefill", "release"): ("handoff",),
    ("sleep", "wake"): ("sleep",),
    ("pause", "resume"): ("pause",),
    ("profile",): ("profile",),
    ("kv_events",): ("kv_events", "kv_dump"),
    ("clear_kv",): ("clear_kv",),
}
"""Optional methods, and what a class that defines them can do. Those of one row belong together."""

EDITS: Final[frozenset[Capability]] = frozenset({"image_edits"})
"""A field of the requests of `generate_images`."""

FEATURES: Final[frozenset[Capability]] = (HINTS | EDITS | {need.capability for need in NEEDS}) - {
    capability for row in METHODS.values() for capability in row
}
"""Capabilities that are fields of a request and not methods: a class lists those it honours as `features`."""


def declared_capabilities(kind: Any) -> frozenset[Capability]:
    """Return what a class with the two methods can do. Raises `EngineUnavailable` for a declaration that is not whole."""
    declared: set[Capability] = {"generate"}
    for methods, capabilities in METHODS.items():
        defined = [method for method in methods if callable(getattr(kind, method, None))]
        if not defined:
            continue
        if len(defined) < len(methods):
            missing = next(method for method in methods if method not in defined)
            raise EngineUnavailable(f"{kind.__name__} defines {defined[0]} but not {missing}: define both")
        declared.update(capabilities)
    features = frozenset(getattr(kind, "features", ()))
    if unknown := sorted(features - FEATURES):
        raise EngineUnavailable(
            f"{kind.__name__}.features: {unknown[0]!r} is none of {', '.join(sorted(FEATURES))}; "
            "other capabilities are declared by defining their methods"
        )
    for field, values, default in (("choreography", Choreography, "returned"), ("aborts", Aborts, "anytime")):
        value = getattr(kind, field, default)
        if value not in get_args(values):
            raise EngineUnavailable(
                f"{kind.__name__}.{field}: {value!r} is none of {', '.join(get_args(values))}"
            )
    return frozenset(declared | features)
