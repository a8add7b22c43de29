"""Settings of the TensorRT-LLM adapter."""

from typing import Any, Literal, NamedTuple

from headwater.engines.traces import EngineTraces
from headwater.schemas.events.fleet import Role

HandoffMode = Literal["context-first", "generation-first", "opaque"]
"""How prefill and decode legs are joined.

context-first: the decode leg starts with the parameters that the prefill leg returned. generation-first: both legs start
at once, and the decode leg fetches from the prefill leg's endpoint. opaque: as context-first, with the first tokens that
the prefill generated handed over apart from the opaque state.
"""


class TensorRtSettings(NamedTuple):
    """`context_length` and `vocabulary` (tokens, 0 if unknown) are the model's own; `tokenizer` is its `tokenizer.json`.
    `file` and `overrides` are TensorRT-LLM's own arguments: a YAML file, and values that replace its own.

    `processors` are logits processors that requests may name: NAME to MODULE:CLASS. `allow_faults` starts combinations of
    arguments that are known to hang or to end the engine.
    """

    model: str
    name: str
    worker: str
    role: Role = "both"
    block_size: int = 0
    max_model_len: int = 0
    context_length: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: int = 0
    tokenizer: bytes = b""
    file: str = ""
    overrides: dict[str, Any] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    handoff: HandoffMode = "context-first"
    processors: dict[str, str] = {}  # noqa: RUF012 (likewise)
    allow_faults: bool = False
    traces: EngineTraces = EngineTraces()
