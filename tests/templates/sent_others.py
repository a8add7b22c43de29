"""Conversations of the Responses API, as Codex has them, and of the Messages API, as Claude Code has them."""

from typing import Any, Final

from headwater.actors.edge.prompt.request import Tool
from tests.templates.conversations import Conversation, Json, tool_bodies
from tests.templates.sent_chats import CITY, ID, LOOP, PIXEL
from tests.templates.shapes import TOOLS

NAIROBI: Final = '{"city": "Nairobi"}'


def said(role: str, text: str, **more: Any) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    part: Json = {"type": kind, "text": text}
    if role == "assistant":
        part["annotations"] = []
        more = {"id": f"msg_{text}", "status": "completed", **more}
    return {"type": "message", "role": role, "content": [part], **more}


def call(number: str = ID, name: str = "get_weather", arguments: str = CITY) -> Json:
    return {"type": "function_call", "call_id": number, "name": name, "arguments": arguments}


def output(value: Any = "resultword", number: str = ID) -> Json:
    """What a call of the Responses API returned."""
    return {"type": "function_call_output", "call_id": number, "output": value}


def thought(**more: Any) -> Json:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **more}


def responses(
    *items: Json, words: tuple[str, ...], tools: tuple[Tool, ...] = TOOLS, **more: Any
) -> Conversation:
    return Conversation(
        "responses", {"input": [*items], "tools": tool_bodies(tools, "responses"), **more}, words
    )


def block(text: str) -> Json:
    return {"type": "text", "text": text}


def used(number: str = ID, name: str = "get_weather", city: str = "Beijing") -> Json:
    return {"type": "tool_use", "id": number, "name": name, "input": {"city": city}}


def returned(content: Any = "resultword", number: str = ID, **more: Any) -> Json:
    """What a call of the Messages API returned."""
    return {"type": "tool_result", "tool_use_id": number, "content": content, **more}


def messages(*given: Json, words: tuple[str, ...], **more: Any) -> Conversation:
    return Conversation(
        "messages", {"messages": [*given], "tools": tool_bodies(TOOLS, "messages"), **more}, words
    )


def by(role: str, *content: Json | str) -> Json:
    return {"role": role, "content": content[0] if isinstance(content[0], str) else [*content]}


_USER: Final = said("user", "userword")
_HOSTED: Final[Json] = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "lost"},
}
_BOTH: Final = ("userword", "Beijing", "Nairobi", "resultword", "secondword")
_IN_TURN: Final = ("userword", "Beijing", "resultword", "Nairobi", "secondword")

RESPONSES: Final[dict[str, Conversation]] = {
    "responses: codex": responses(
        said("developer", "developerword"),
        said("user", "environmentword"),
        _USER,
        thought(encrypted_content="gAAAforeign", content=None),
        call(),
        output(),
        instructions="systemword",
        words=("systemword", "developerword", "environmentword", *LOOP),
    ),
    "responses: reasoning and a call": responses(
        _USER,
        thought(content=[{"type": "reasoning_text", "text": "thoughtword"}]),
        call(),
        output(),
        words=LOOP,
    ),
    "responses: commentary": responses(
        _USER,
        said("assistant", "answerword", phase="commentary"),
        call(),
        output(),
        said("assistant", "secondword", phase="final_answer"),
        said("user", "lastword"),
        words=("userword", "answerword", "get_weather", "Beijing", "resultword", "secondword", "lastword"),
    ),
    "responses: two calls": responses(
        _USER,
        call("call_1"),
        call("call_2", "get_time", NAIROBI),
        output("resultword", "call_1"),
        output("secondword", "call_2"),
        words=_BOTH,
    )._replace(others=(_IN_TURN,)),
    "responses: a call, its result, a call": responses(
        _USER,
        call("call_1"),
        output("resultword", "call_1"),
        call("call_2", "get_time", NAIROBI),
        output("secondword", "call_2"),
        words=_IN_TURN,
    ),
    "responses: steps of another server": responses(
        _USER,
        _HOSTED,
        said("assistant", "answerword"),
        said("user", "lastword"),
        words=("userword", "answerword", "lastword"),
    ),
    "responses: a step of another server before a call": responses(
        _USER, _HOSTED, call(), output(), words=LOOP
    ),
    "responses: result in parts": responses(
        _USER,
        call(),
        output([{"type": "input_text", "text": "resultword"}, {"type": "input_text", "text": "secondword"}]),
        words=(*LOOP, "secondword"),
    ),
    "responses: result with an image": responses(
        _USER,
        call(),
        output([{"type": "input_text", "text": "resultword"}, {"type": "input_image", "image_url": PIXEL}]),
        words=LOOP,
    )._replace(images=True),
    "responses: a custom tool": responses(
        _USER,
        {"type": "custom_tool_call", "call_id": ID, "name": "apply", "input": "*** Begin\n+patchword"},
        {"type": "custom_tool_call_output", "call_id": ID, "output": "resultword"},
        words=("userword", "apply", "patchword", "resultword"),
    ),
    "responses: text as input": Conversation(
        "responses", {"input": "userword", "instructions": "systemword"}, ("systemword", "userword")
    ),
    "responses: continues another": responses(
        said("user", "lastword"),
        instructions="systemword",
        words=("systemword", "userword", "answerword", "lastword"),
    )._replace(
        earlier=([_USER], [said("assistant", "answerword")]),
        # Some templates have the system prompt in the last message.
        others=(("userword", "answerword", "systemword", "lastword"),),
    ),
    "responses: continues a call": responses(output(), words=LOOP)._replace(earlier=([_USER], [call()])),
    "responses: continues text and call": responses(
        output(), words=("userword", "answerword", *LOOP[1:])
    )._replace(earlier=([_USER], [said("assistant", "answerword"), call()])),
    "responses: developer last": responses(
        _USER, said("developer", "developerword"), words=("userword", "developerword")
    ),
}

MESSAGES: Final[dict[str, Conversation]] = {
    "messages: blocks": messages(
        by("user", block("firstword"), block("userword")),
        system=[block("systemword"), block("secondword")],
        words=("systemword", "secondword", "firstword", "userword"),
    ),
    "messages: thinking and a call": messages(
        by("user", "userword"),
        by(
            "assistant",
            {"type": "thinking", "thinking": "thoughtword", "signature": "x"},
            block("answerword"),
            used(),
        ),
        by("user", returned()),
        words=("userword", "answerword", *LOOP[1:]),
    ),
    "messages: redacted thinking": messages(
        by("user", "userword"),
        by("assistant", {"type": "redacted_thinking", "data": "x"}, used()),
        by("user", returned()),
        words=LOOP,
    ),
    "messages: lone call": messages(
        by("user", "userword"), by("assistant", used()), by("user", returned()), words=LOOP
    ),
    "messages: text behind a result": messages(
        by("user", "userword"),
        by("assistant", used()),
        by("user", returned(), block("lastword")),
        words=(*LOOP, "lastword"),
    ),
    "messages: text between results": messages(
        by("user", "userword"),
        by("assistant", used("call_1"), used("call_2", "get_time", "Nairobi")),
        by("user", returned(number="call_1"), block("lastword"), returned("secondword", "call_2")),
        words=("userword", "Beijing", "Nairobi", "resultword", "lastword", "secondword"),
    )._replace(
        others=(
            ("userword", "Beijing", "Nairobi", "resultword", "secondword", "lastword"),
            ("userword", "Beijing", "resultword", "lastword", "Nairobi", "secondword"),
            ("userword", "Beijing", "resultword", "Nairobi", "secondword", "lastword"),
        )
    ),
    "messages: two calls": messages(
        by("user", "userword"),
        by("assistant", used("call_1"), used("call_2", "get_time", "Nairobi")),
        by("user", returned(number="call_1"), returned("secondword", "call_2")),
        words=_BOTH,
    )._replace(others=(_IN_TURN,)),
    "messages: result of blocks that is an error": messages(
        by("user", "userword"),
        by("assistant", used()),
        by("user", returned([block("resultword"), block("secondword")], is_error=True)),
        words=(*LOOP, "secondword"),
    ),
    "messages: result with an image": messages(
        by("user", "userword"),
        by("assistant", used()),
        by(
            "user",
            returned(
                [
                    block("resultword"),
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": PIXEL.partition(",")[2],
                        },
                    },
                ]
            ),
        ),
        words=LOOP,
    )._replace(images=True),
    "messages: system last": messages(
        by("user", "userword"),
        by("system", "secondword"),
        system="systemword",
        words=("systemword", "userword", "secondword"),
    ),
    "messages: system behind a result": messages(
        by("user", "userword"),
        by("assistant", used()),
        by("user", returned()),
        by("system", "secondword"),
        system="systemword",
        words=("systemword", *LOOP, "secondword"),
    ),
    "messages: beginning of an answer": messages(
        by("user", "userword"), by("assistant", "answerword"), words=("userword", "answerword")
    )._replace(ends="answerword"),
}
