"""Model cards: what an edge must know to serve a model. KV bucket, one key per pool."""

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. Stored as JSON, so that people can read it with the stock `nats` tool.

    `tokenizer` and `chat_template` are SHA-256 digests of artifacts in the object store: an edge needs no
    file system shared with the engines. `eos_token_ids` end an answer and are not part of its text.
    """

    name: str
    pool: str
    block_size: int
    context_length: int
    tokenizer: str
    chat_template: str
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    engine: str
    capabilities: tuple[str, ...]
    created_s: int
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""
    engine_version: str = ""
    total_blocks: int = 0
    max_running: int = 0
    """Runtime limits of one worker: KV blocks, and requests that run at once."""
    tool_parser: str = ""
    reasoning_parser: str = ""
    logits_processors: tuple[str, ...] = ()
    """Names that requests may use."""
    pooling_tasks: tuple[str, ...] = ()
    """What an embedding model does: embed, classify, score, token_embed."""
    lora_slots: int = 0
    lora_rank_max: int = 0
    vocabulary: int = 0
    """Token ids in sampling parameters are below this; 0: below the tokenizer's size."""
    logprobs_max: int = 20
    default_sampling: dict[str, float] = {}
    """The model's own values of sampling fields that a request leaves out (its generation_config.json)."""


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that is served as a model of its own, on top of the pool's base model. Stored as JSON.

    `source` is where any worker of the pool can load it from (a folder, file://, http(s)://, s3:// or hf://);
    `digest` is SHA-256 over its files, so that all workers serve the same weights.
    """

    name: str
    pool: str
    source: str
    digest: str
    rank: int
    created_s: int

    @property
    def identity(self) -> str:
        """What engines, workers and block hashes know it by: its name with its weights.

        Forgotten and made anew with other weights it is another adapter, and no block of the old one fits it.
        """
        return f"{self.name}@{self.digest[:12]}"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a lease, for people and for whoever watches leases. Stored as JSON.

    `epoch` is that of the holder's incarnation. It stays the same through renewals and through a renewal that comes
    too late but finds the lease free; 0 while the holder still determines it, before it serves anything.
    `incarnation` is unique to the holder. `stalled` says that the log does not take what the holder appends.
    """

    kind: str
    name: str
    pool: str = ""
    host: str = ""
    pid: int = 0
    epoch: int = 0
    incarnation: str = ""
    stalled: bool = False
