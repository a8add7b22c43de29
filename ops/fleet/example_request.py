"""The request that `up` shows once the fleet is ready: one that its model answers. Pure."""

from typing import Any

import msgspec

from headwater.schemas.tables.card import ModelCard


def example_request(card: ModelCard, key: str) -> str:
    """The path after /v1/ and further arguments of curl; `key` are those for authentication."""
    if card.speech is not None:
        return f"audio/transcriptions{key} -F model={card.name} -F file=@speech.wav"
    path = "chat/completions"
    example: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    if card.image_generation is not None:
        path, example = "images/generations", {"prompt": "a river at its source"}
    elif card.video_generation is not None:
        path, example = "videos", {"prompt": "a river at its source"}
    elif "generate" not in card.capabilities:
        path, example = "embeddings", {"input": "Hello!"}
    body = msgspec.json.encode({"model": card.name, **example}).decode()
    return f"{path} -H 'content-type: application/json'{key} -d '{body}'"
