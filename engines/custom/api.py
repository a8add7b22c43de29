"""What an engine in one file is given and returns. See `headwater.engines.custom` for an example."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from headwater.engines.engine import EngineInfo, Step, Transfer
from headwater.engines.model_files import ModelFiles
from headwater.schemas.events.fleet import Role
from headwater.schemas.messages.inference import Leg, Sampling

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
        """What `start` returns: sizes from the settings, with `changes` to fields of `EngineInfo`."""
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
    """The two required methods. `METHODS` of `headwater.engines.custom.declared` lists the optional ones."""

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
