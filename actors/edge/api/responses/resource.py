"""The `Response` object. Pure."""

from typing import Any, Final

from headwater.actors.edge.api.responses.translate import ID_PREFIX
from headwater.actors.edge.api.responses.types import CreateFields, TextFormat
from headwater.actors.edge.generation.events import TokenUsage

Resource = dict[str, Any]
"""A response as JSON. Every member that a client may require is present; those that are never null are not."""

MODEL_DEFAULTS: Final = {"temperature": 1.0, "top_p": 1.0}


def new_resource(
    fields: CreateFields,
    id_: str,
    tools: list[dict[str, Any]],
    defaults: dict[str, float],
    *,
    stored: bool,
    created_s: int = 0,
) -> Resource:
    """A response that has just begun. `defaults`: the model's own sampling. `id_`: without its prefix."""

    def number(name: str) -> float:
        given: float | None = getattr(fields, name)
        return given if given is not None else defaults.get(name, MODEL_DEFAULTS[name])

    reasoning = fields.reasoning
    return {
        "id": ID_PREFIX + id_,
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": fields.model,
        "instructions": fields.instructions,
        "previous_response_id": fields.previous_response_id,
        "conversation": {"id": fields.conversation_id} if fields.conversation_id else None,
        "output": [],
        "tools": tools,
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "max_tool_calls": fields.max_tool_calls,
        "max_output_tokens": fields.max_output_tokens,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "text": _text(fields),
        "temperature": number("temperature"),
        "top_p": number("top_p"),
        "presence_penalty": fields.presence_penalty or 0.0,
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "service_tier": "default",
        "store": stored,
        "metadata": fields.metadata or {},
        "user": fields.user,
        "safety_identifier": fields.safety_identifier,
        "prompt_cache_key": fields.prompt_cache_key,
        "usage": None,
    }


def _text(fields: CreateFields) -> dict[str, Any]:
    text: dict[str, Any] = {"format": _format(fields.text.format if fields.text else None)}
    if fields.text and fields.text.verbosity:
        text["verbosity"] = fields.text.verbosity
    return text


def _format(wanted: TextFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return {
        "type": "json_schema",
        "name": wanted.name,
        "description": wanted.description,
        "schema": wanted.json_schema,
        # The schema is always enforced.
        "strict": True,
    }


def usage_document(usage: TokenUsage) -> dict[str, Any]:
    """Usage as the API spells it. Counts that are not disclosed are 0: clients require integers."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": usage.cache_write_tokens or 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
