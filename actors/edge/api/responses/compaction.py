"""POST /v1/responses/compact: a conversation as its user messages and a summary, which the model itself writes."""

from typing import Any, Final

from headwater.actors.edge.api.responses.items.opaque import encode_opaque
from headwater.actors.edge.api.responses.items.stored import item_id, listed
from headwater.actors.edge.api.responses.items.turns import turns_of
from headwater.actors.edge.api.responses.items.types import Item
from headwater.actors.edge.api.responses.resource import usage_document
from headwater.actors.edge.api.responses.translate import ENDPOINT, ID_PREFIX
from headwater.actors.edge.api.responses.types import CompactFields
from headwater.actors.edge.generation.events import GenerationResult
from headwater.actors.edge.generation.messages.turn import TextPart, Turn
from headwater.actors.edge.generation.request import GenerationRequest, Hints, SamplingFields

SUMMARY_TOKENS_MAX: Final = 2_048

INSTRUCTION: Final = (
    "Summarize the conversation above so that it can be continued from the summary alone. State the goals and "
    "constraints of the user, every decision and fact that was established, what was done with its results, and what "
    "remains open. Keep names, numbers, identifiers and code exactly. Answer with the summary only."
)


def compaction_request(
    fields: CompactFields, items: list[Item], history: tuple[Item, ...], id_: str, context: int
) -> GenerationRequest:
    """The internal request for the summary. `context`: tokens that the model takes. Raises `ApiError` 400."""
    turns = turns_of(history, "previous_response_id", fields.instructions or "")
    turns += turns_of(items, "input", earlier=history)
    return GenerationRequest(
        model=fields.model,
        param="input",
        endpoint=ENDPOINT,
        id_prefix=ID_PREFIX,
        id=id_,
        messages=(*turns, Turn(role="user", parts=(TextPart(INSTRUCTION),))),
        sampling=SamplingFields(temperature=0.0),
        max_tokens=min(SUMMARY_TOKENS_MAX, context // 4),
        max_tokens_param="input",
        hints=Hints(session=fields.prompt_cache_key),
    )


def compacted(items: list[Item], result: GenerationResult) -> dict[str, Any]:
    """The response: all messages of users, then one item with the summary. `items` is the whole conversation."""
    id_ = result.start.id
    users = [
        item for item in items if item.get("role") == "user" and item.get("type", "message") == "message"
    ]
    summary = {
        "id": item_id("compaction", id_, 0),
        "type": "compaction",
        "encrypted_content": encode_opaque(result.choices[0].text),
    }
    return {
        "id": ID_PREFIX + id_,
        "object": "response.compaction",
        "created_at": result.start.created_s,
        "output": [*listed(users, id_), summary],
        "usage": usage_document(result.usage),
    }
