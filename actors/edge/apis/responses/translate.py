"""Translation of a request of the Responses API into the internal request. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from headwater.actors.edge.apis.responses.items import Item, additional_tools, turns_of
from headwater.actors.edge.apis.responses.tools import ToolSet, tools_of
from headwater.actors.edge.apis.responses.types import (
    LOGPROBS,
    CreateFields,
    InputFields,
    TextFormat,
)
from headwater.actors.edge.prompt.guides import VALUE_BYTES_MAX, check_schema, too_large
from headwater.actors.edge.prompt.messages import Turn
from headwater.actors.edge.prompt.request import GenerationRequest, Hints, Reasoning, SamplingFields
from headwater.actors.http.errors import bad_request
from headwater.schemas.messages.inference import Guide

ENDPOINT: Final = "responses"
ID_PREFIX: Final = "resp_"


def generation_request(
    fields: CreateFields, history: Sequence[Item], items: Sequence[Item], id_: str, *, stream: bool
) -> tuple[GenerationRequest, ToolSet]:
    """The internal request, and its tools. `items` is the input, `history` comes before it.

    `id_`: the response's id without its prefix. Raises `ApiError` 400 naming the field.
    """
    tools, turns, guide = _prompt(fields, history, items)
    logprobs = (fields.top_logprobs or 0) if fields.includes(LOGPROBS) or fields.top_logprobs else None
    request = GenerationRequest(
        model=fields.model,
        param="input",
        endpoint=ENDPOINT,
        id_prefix=ID_PREFIX,
        id=id_,
        messages=turns,
        tools=tools.tools,
        omitted_tools=tools.omitted,
        tool_choice=tools.choice,
        reasoning=Reasoning(effort=fields.reasoning.effort if fields.reasoning else None),
        sampling=SamplingFields(
            temperature=fields.temperature,
            top_p=fields.top_p,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logprobs=logprobs,
        ),
        max_tokens=fields.max_output_tokens,
        max_tokens_param="max_output_tokens",
        logprobs_param="top_logprobs",
        guide=guide,
        guide_param="text.format" if guide else "",
        stream=stream,
        hints=Hints(
            user=fields.user or fields.safety_identifier,
            session=fields.prompt_cache_key or fields.conversation_id or None,
            priority=fields.priority,
            cache_salt=fields.cache_salt or "",
        ),
    )
    return request, tools


def count_request(fields: InputFields, history: Sequence[Item], items: Sequence[Item]) -> GenerationRequest:
    """The internal request for counting the prompt's tokens. Raises `ApiError` 400."""
    tools, turns, guide = _prompt(fields, history, items)
    return GenerationRequest(
        model=fields.model,
        param="input",
        endpoint=ENDPOINT,
        messages=turns,
        tools=tools.tools,
        omitted_tools=tools.omitted,
        tool_choice=tools.choice,
        reasoning=Reasoning(effort=fields.reasoning.effort if fields.reasoning else None),
        max_tokens=1,
        guide=guide,
        guide_param="text.format" if guide else "",
    )


def _prompt(
    fields: InputFields, history: Sequence[Item], items: Sequence[Item]
) -> tuple[ToolSet, tuple[Turn, ...], Guide | None]:
    # A tool that is offered again, by a later item too, is the same one.
    added = additional_tools([*history, *items])
    given = [*(fields.tools or []), *(tool for tool in added if tool not in (fields.tools or []))]
    tools = tools_of(
        given if added else fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls is not False
    )
    earlier = turns_of(history, "previous_response_id", fields.instructions or "")
    # A call of the earlier response and a text of the input are of different turns.
    turns = earlier + turns_of(items, "input", earlier=history)
    guide = guide_of(fields.text.format) if fields.text and fields.text.format else None
    return tools, turns, guide


def guide_of(wanted: TextFormat) -> Guide | None:
    """Return what the answer must conform to, None for anything. Raises `ApiError` 400."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Guide("json_object")
    if wanted.name is None:
        raise bad_request("text.format.name is missing.", param="text.format.name")
    check_schema(wanted.json_schema, "text.format.schema")
    # The schema is always enforced, with or without `strict`.
    text = msgspec.json.encode(wanted.json_schema)
    if len(text) > VALUE_BYTES_MAX:
        raise too_large("text.format.schema")
    return Guide("json_schema", text.decode())


def keep_last(request: GenerationRequest, count: int) -> GenerationRequest:
    """The request with the last `count` turns: see `truncated`."""
    return msgspec.structs.replace(request, messages=truncated(request.messages, count))


def truncated(turns: tuple[Turn, ...], count: int) -> tuple[Turn, ...]:
    """System messages, and the last `count` other turns. Results of calls that were dropped go too."""
    others = [turn for turn in turns if turn.role not in _KEPT]
    kept = others[len(others) - min(count, len(others)) :]
    while kept and kept[0].role == "tool":
        kept.pop(0)
    remaining = {id(turn) for turn in kept}
    return tuple(turn for turn in turns if turn.role in _KEPT or id(turn) in remaining)


_KEPT: Final = ("system", "developer")
