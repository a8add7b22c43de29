"""Chats that clients send, beyond the shapes of turns: parts, continued answers, arguments of all kinds, tool choices, images."""

from typing import Final

from headwater.actors.edge.prompt.request import ToolCall
from tests.templates.conversations import Conversation, Json, call_body, tool_bodies
from tests.templates.shapes import TOOLS

ID: Final = "call_abcdef123"
LOOP: Final = ("userword", "get_weather", "Beijing", "resultword")
CITY: Final = '{"city": "Beijing"}'
PIXEL: Final = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
USER: Final[Json] = {"role": "user", "content": "userword"}
OFFERED: Final = tool_bodies(TOOLS, "chat")


def text(value: str) -> Json:
    return {"type": "text", "text": value}


def image() -> Json:
    return {"type": "image_url", "image_url": {"url": PIXEL}}


def answer(content: object, **more: object) -> Json:
    return {"role": "assistant", "content": content, **more}


def calls(*given: tuple[str, str, str], **more: object) -> Json:
    """A message that only calls: ids, names and arguments. Without `content` it has no such key."""
    return {"role": "assistant", "tool_calls": [call_body(ToolCall(*one)) for one in given], **more}


def result(content: object, number: str = ID) -> Json:
    return {"role": "tool", "tool_call_id": number, "content": content}


def chat(*messages: Json, words: tuple[str, ...], **more: object) -> Conversation:
    return Conversation("chat", {"messages": [*messages], **more}, words)


def with_tools(*messages: Json, words: tuple[str, ...], **more: object) -> Conversation:
    return chat(*messages, words=words, tools=OFFERED, **more)


def loop(arguments: str, *words: str) -> Conversation:
    """A call with these arguments, of which `words` have to be shown, and its result."""
    shown = ("userword", "get_weather", *words, "resultword")
    return with_tools(
        USER, calls((ID, "get_weather", arguments), content=None), result("resultword"), words=shown
    )


_PAIR: Final = (("call_1", "get_weather", CITY), ("call_2", "get_time", '{"city": "Nairobi"}'))
_TWICE: Final = ("userword", "Beijing", "resultword", "Nairobi", "secondword")
_CALL: Final = calls((ID, "get_weather", CITY), content=None)

CHATS: Final[dict[str, Conversation]] = {
    "text parts": chat(
        {"role": "user", "content": [text("firstword"), text("userword")]}, words=("firstword", "userword")
    ),
    "system in parts": chat(
        {"role": "system", "content": [text("systemword"), text("secondword")]},
        USER,
        words=("systemword", "secondword", "userword"),
    ),
    "assistant in parts": chat(
        USER,
        answer([text("answerword"), text("secondword")]),
        {"role": "user", "content": "lastword"},
        words=("userword", "answerword", "secondword", "lastword"),
    ),
    "refusal in history": chat(
        USER,
        answer(None, refusal="answerword"),
        {"role": "user", "content": "lastword"},
        words=("userword", "answerword", "lastword"),
    ),
    "user with a name": chat({**USER, "name": "ada"}, words=("userword",)),
    "assistant last": chat(USER, answer("answerword"), words=("userword", "answerword")),
    "assistant last, continued": chat(
        USER,
        answer("answerword"),
        words=("userword", "answerword"),
        continue_final_message=True,
        add_generation_prompt=False,
    )._replace(ends="answerword"),
    "assistant in parts last, continued": chat(
        USER,
        answer([text("answerword")]),
        words=("userword", "answerword"),
        continue_final_message=True,
        add_generation_prompt=False,
    )._replace(ends="answerword"),
    "assistant with reasoning last, continued": chat(
        USER,
        answer("answerword", reasoning="thoughtword"),
        words=("userword", "answerword"),
        continue_final_message=True,
        add_generation_prompt=False,
    )._replace(ends="answerword"),
    "image": chat(
        {"role": "user", "content": [text("firstword"), image(), text("userword")]},
        words=("firstword", "userword"),
    )._replace(images=True),
    "result with an image": with_tools(
        USER, _CALL, result([text("resultword"), image()]), words=LOOP
    )._replace(images=True),
    "result in parts": with_tools(
        USER, _CALL, result([text("resultword"), text("secondword")]), words=(*LOOP, "secondword")
    ),
    "loop with no content": with_tools(
        USER, calls((ID, "get_weather", CITY)), result("resultword"), words=LOOP
    ),
    "loop with null content": with_tools(USER, _CALL, result("resultword"), words=LOOP),
    "loop with content of no parts": with_tools(
        USER, calls((ID, "get_weather", CITY), content=[]), result("resultword"), words=LOOP
    ),
    "loop with text in parts": with_tools(
        USER,
        calls((ID, "get_weather", CITY), content=[text("answerword")]),
        result("resultword"),
        words=("userword", "answerword", *LOOP[1:]),
    ),
    "arguments null": loop("null"),
    "arguments of two objects": loop('{"city": "Beijing"}{"city": "Nairobi"}', "Beijing", "Nairobi"),
    "arguments with NaN": loop('{"degrees": NaN, "city": "Beijing"}', "Beijing"),
    "arguments with a lone surrogate": loop('{"city": "Beijing\\ud800", "place": "Nairobi"}', "Beijing"),
    "arguments in Chinese": loop('{"city": "北京"}', "北京")._replace(
        others=(("userword", "get_weather", "\\u5317\\u4eac", "resultword"),)
    ),
    "arguments of a list": loop('["Beijing"]', "Beijing"),
    "arguments with values of all types": loop(
        '{"city": "Beijing", "days": 3, "exact": true, "units": ["metric"], "place": {"street": "Wangfujing"}}',
        "Beijing",
        "metric",
        "Wangfujing",
    )._replace(others=(("userword", "get_weather", "Beijing", "Wangfujing", "metric", "resultword"),)),
    "same id twice": with_tools(
        USER,
        calls((ID, "get_weather", CITY), content=None),
        result("resultword"),
        calls((ID, "get_time", '{"city": "Nairobi"}'), content=None),
        result("secondword"),
        words=_TWICE,
    ),
    "same id twice at once": with_tools(
        USER,
        calls((ID, "get_weather", CITY), (ID, "get_time", '{"city": "Nairobi"}'), content=None),
        result("resultword"),
        result("secondword"),
        words=("userword", "Beijing", "Nairobi", "resultword", "secondword"),
    )._replace(others=(_TWICE,)),
    "results out of order": with_tools(
        USER,
        calls(*_PAIR, content=None),
        result("secondword", "call_2"),
        result("resultword", "call_1"),
        words=("userword", "Beijing", "Nairobi", "secondword", "resultword"),
    )._replace(others=(_TWICE, ("userword", "Beijing", "Nairobi", "resultword", "secondword"))),
    "call without a result": with_tools(
        USER, _CALL, {"role": "user", "content": "lastword"}, words=(*LOOP[:3], "lastword")
    )._replace(refusable=True),
    "result without its call": with_tools(
        USER, result("resultword"), words=("userword", "resultword")
    )._replace(refusable=True),
    "result of JSON": with_tools(USER, _CALL, result('{"sky": "resultword", "wind": null}'), words=LOOP),
    "tool choice none": with_tools(USER, words=("userword",), tool_choice="none"),
    "tool choice none behind a loop": with_tools(
        USER, _CALL, result("resultword"), words=LOOP, tool_choice="none"
    ),
    "tool choice required": with_tools(USER, words=("get_weather", "userword"), tool_choice="required"),
    "tool choice named": with_tools(
        USER,
        words=("get_weather", "userword"),
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ),
}
