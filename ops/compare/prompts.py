"""The prompts of a comparison: from a file, or as the request log recorded them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headwater.events.log import Log
from headwater.ops.config.errors import ConfigError
from headwater.schemas.events.request import RequestAccepted

PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""By endpoint, as the request log names it."""

DROPPED: Final = frozenset(
    (
        *("best_of", "echo", "min_p", "priority", "prompt_logprobs", "seed", "stream_options", "suffix"),
        *("top_k", "top_p", "user", "prompt_cache_key", "logprobs", "top_logprobs", "return_token_ids"),
        "max_completion_tokens",
    )
)
"""Fields of a recorded request that are not sent again: they mean nothing at temperature 0, or are set by the comparison."""


class PromptRequest(NamedTuple):
    """A request to compare: `fields` go to `path` as they are, with what the comparison adds. `name` is for people."""

    name: str
    path: str
    fields: Mapping[str, Any]


async def recorded_prompts(log: Log, names: frozenset[str], limit: int) -> list[PromptRequest]:
    """The newest `limit` different requests to a model under any of its names. Raises `ConfigError` if there is none."""
    found: dict[bytes, PromptRequest] = {}
    hidden = 0
    async for piece in log.read(0, follow=False):
        for record in piece.records:
            for event in record.batch.events:
                if not isinstance(event, RequestAccepted) or event.model not in names:
                    continue
                prompt = prompt_of(event)
                hidden += event.payload != "full"
                if prompt is None:
                    continue
                # The newest one counts, in the order of the log.
                found.pop(event.body, None)
                found[event.body] = prompt
                if len(found) > limit:
                    del found[next(iter(found))]
    if not found:
        raise ConfigError(
            f"the request log has no prompt of this model that can be sent again ({hidden} requests without their "
            "payload): start edges with --record-payloads full, or give --prompts FILE"
        )
    return list(found.values())


def prompt_of(event: RequestAccepted) -> PromptRequest | None:
    """A recorded request as a prompt; None if its payload is not recorded, or it is not one chat or completion."""
    path = PATHS.get(event.endpoint)
    if event.payload != "full" or path is None:
        return None
    try:
        fields = msgspec.json.decode(event.body, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return PromptRequest(event.request, path, fields) if _is_one(fields) else None


def read_prompts(file: Path, limit: int) -> list[PromptRequest]:
    """The first `limit` lines of a JSONL file: strings, or requests with `prompt` or `messages`. Raises `ConfigError`."""
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file}: {error}") from error
    prompts = [
        _parse(line, f"--prompts {file}: line {number}") for number, line in enumerate(lines[:limit], 1)
    ]
    if not prompts:
        raise ConfigError(f"--prompts {file}: it is empty")
    return prompts


def _parse(line: str, place: str) -> PromptRequest:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: {error}") from error
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not _is_one(fields):
        raise ConfigError(f'{place}: write a string, {{"prompt": …}} or {{"messages": […]}}, with one prompt')
    chat = "messages" in fields
    name = place.rpartition(": ")[2]
    return PromptRequest(name, PATHS["chat" if chat else "completions"], fields)


def _is_one(fields: Mapping[str, Any]) -> bool:
    """Is it a chat, or a completion of one prompt, as text or as token ids?"""
    if "messages" in fields:
        return isinstance(fields["messages"], list)
    prompt = fields.get("prompt")
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    )


def request_body(prompt: PromptRequest, model: str, max_tokens: int, logprobs: int) -> dict[str, Any]:
    """The body that asks for a greedy answer: streamed, with token ids, and the `logprobs` likeliest tokens (0: none)."""
    kept = {name: value for name, value in prompt.fields.items() if name not in DROPPED}
    wanted: dict[str, Any] = {}
    if logprobs:
        chat = prompt.path == PATHS["chat"]
        wanted = {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
    asked = prompt.fields.get("max_completion_tokens") or prompt.fields.get("max_tokens")
    tokens = min(asked, max_tokens) if isinstance(asked, int) and asked > 0 else max_tokens
    return {
        **kept,
        **wanted,
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "n": 1,
        "stream": True,
        "return_token_ids": True,
    }
