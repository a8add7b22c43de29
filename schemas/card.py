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


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a lease: what it stands for, for people and for the routers that watch it."""

    kind: str
    name: str
    pool: str = ""
    host: str = ""
    pid: int = 0
