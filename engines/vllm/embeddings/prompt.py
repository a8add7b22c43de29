"""An item of media as vLLM takes it, and a prompt that is one alone: to have that encoded."""

from typing import Any

from headwater.engines.media.prompt import image_of, values_of
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables.card import MediaSupport


def item_prompt(item: PromptMedia, support: MediaSupport, name: str) -> dict[str, Any]:
    """VLLM is to know the item by `name`. Raises `RequestRejected` if its data is not all there."""
    return {
        "prompt_token_ids": [support.placeholders[item.kind]],
        "multi_modal_data": {item.kind: [item_value(item, support)]},
        "multi_modal_uuids": {item.kind: [name]},
    }


def item_value(item: PromptMedia, support: MediaSupport) -> Any:
    """An item as vLLM takes it: an image of Pillow, an array of frames, or samples with their rate."""
    if item.kind == "image":
        return image_of(item)
    if item.kind == "audio" and support.audio is not None:
        return values_of(item), support.audio.rate_hz
    return values_of(item)
