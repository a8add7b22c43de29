"""A prompt that is one image or one video alone, as vLLM takes it: to have that encoded."""

from typing import Any

from headwater.engines.media.prompt import image_of, values_of
from headwater.schemas.messages.media import PromptMedia


def item_prompt(item: PromptMedia, placeholder: int, name: str) -> dict[str, Any]:
    """VLLM is to know the item by `name`. Raises `RequestRejected` if its data is not all there."""
    return {
        "prompt_token_ids": [placeholder],
        "multi_modal_data": {item.kind: [image_of(item) if item.kind == "image" else values_of(item)]},
        "multi_modal_uuids": {item.kind: [name]},
    }
