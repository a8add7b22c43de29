"""Shapes of conversations that clients send, with words that are found again in the prompt."""

from typing import Any, Final, NamedTuple

from headwater.actors.edge.prompt.request import TextPart, Tool, ToolCall, Turn


class Shape(NamedTuple):
    """A conversation. `words` have to be in the prompt, in this order, or in the `other` one."""

    turns: tuple[Turn, ...]
    words: tuple[str, ...]
    tools: tuple[Tool, ...] = ()
    other: tuple[str, ...] = ()


WEATHER: Final = Tool(
    "get_weather",
    "Reads the weather of a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
CLOCK: Final = Tool("get_time", "Reads the clock of a city.", WEATHER.parameters)
TOOLS: Final = (WEATHER, CLOCK)


def _turn(role: Any, text: str | None = None, **more: Any) -> Turn:
    return Turn(role=role, parts=() if text is None else (TextPart(text),), **more)


def _user(text: str = "userword") -> Turn:
    return _turn("user", text)


def _call(city: str, number: str = "call_abcdef123", name: str = "get_weather") -> ToolCall:
    return ToolCall(number, name, f'{{"city": "{city}"}}')


def _calls(text: str | None, *calls: ToolCall, reasoning: str = "") -> Turn:
    return _turn("assistant", text, calls=calls, reasoning=reasoning)


def _result(text: str, number: str = "call_abcdef123") -> Turn:
    return _turn("tool", text, call_id=number)


_LOOP: Final = ("userword", "get_weather", "Beijing", "resultword")
_TWO: Final = (_call("Beijing", "call_1"), _call("Nairobi", "call_2", "get_time"))


def _loop(*calls: ToolCall, text: str | None = None, reasoning: str = "") -> tuple[Turn, ...]:
    return (
        _user(),
        _calls(text, *(calls or (_call("Beijing"),)), reasoning=reasoning),
        _result("resultword"),
    )


SHAPES: Final[dict[str, Shape]] = {
    "plain": Shape((_user(),), ("userword",)),
    "system": Shape((_turn("system", "systemword"), _user()), ("systemword", "userword")),
    "two turns": Shape(
        (_user("firstword"), _turn("assistant", "answerword"), _user()),
        ("firstword", "answerword", "userword"),
    ),
    "developer": Shape((_turn("developer", "developerword"), _user()), ("developerword", "userword")),
    "system and developer": Shape(
        (_turn("system", "systemword"), _turn("developer", "developerword"), _user()),
        ("systemword", "developerword", "userword"),
    ),
    "two systems": Shape(
        (_turn("system", "systemword"), _turn("system", "secondword"), _user()),
        ("systemword", "secondword", "userword"),
    ),
    "late system": Shape(
        (_user("firstword"), _turn("assistant", "answerword"), _turn("system", "systemword"), _user()),
        ("firstword", "answerword", "systemword", "userword"),
    ),
    "system last": Shape((_user(), _turn("system", "systemword")), ("userword", "systemword")),
    "two users in a row": Shape((_user("firstword"), _user()), ("firstword", "userword")),
    "empty assistant": Shape(
        (_user("firstword"), _turn("assistant", ""), _user()), ("firstword", "userword")
    ),
    "reasoning in history": Shape(
        (_user("firstword"), _turn("assistant", "answerword", reasoning="thoughtword"), _user()),
        ("firstword", "answerword", "userword"),
    ),
    "tools offered": Shape((_user(),), ("get_weather", "userword"), TOOLS),
    "loop": Shape(_loop(), _LOOP, TOOLS),
    "loop with empty text": Shape(_loop(text=""), _LOOP, TOOLS),
    "loop with text": Shape(
        _loop(text="answerword"), ("userword", "answerword", "get_weather", "Beijing", "resultword"), TOOLS
    ),
    "loop with reasoning": Shape(_loop(reasoning="thoughtword"), _LOOP, TOOLS),
    "loop with text and reasoning": Shape(
        _loop(text="answerword", reasoning="thoughtword"),
        ("userword", "answerword", "get_weather", "Beijing", "resultword"),
        TOOLS,
    ),
    "system and loop": Shape((_turn("system", "systemword"), *_loop()), ("systemword", *_LOOP), TOOLS),
    "two calls at once": Shape(
        (_user(), _calls(None, *_TWO), _result("resultword", "call_1"), _result("secondword", "call_2")),
        ("userword", "Beijing", "Nairobi", "resultword", "secondword"),
        TOOLS,
        # One call after the other, each with its result.
        ("userword", "Beijing", "resultword", "Nairobi", "secondword"),
    ),
    "two loops": Shape(
        (
            *_loop(_call("Beijing", "call_abcdef123")),
            _calls(None, _call("Nairobi", "call_2", "get_time")),
            _result("secondword", "call_2"),
        ),
        ("userword", "Beijing", "resultword", "Nairobi", "secondword"),
        TOOLS,
    ),
    "loop and answer": Shape(
        (*_loop(), _turn("assistant", "answerword"), _user("lastword")),
        (*_LOOP, "answerword", "lastword"),
        TOOLS,
    ),
    "user behind a result": Shape((*_loop(), _user("lastword")), (*_LOOP, "lastword"), TOOLS),
    "call without arguments": Shape(
        _loop(ToolCall("call_abcdef123", "get_weather", "")), ("userword", "get_weather", "resultword"), TOOLS
    ),
    "broken arguments": Shape(
        _loop(ToolCall("call_abcdef123", "get_weather", '{"city": "Beij')),
        ("userword", "get_weather", "Beij", "resultword"),
        TOOLS,
    ),
    "arguments are a text": Shape(
        _loop(ToolCall("call_abcdef123", "get_weather", '"Beijing"')), _LOOP, TOOLS
    ),
    "empty result": Shape(
        (_user(), _calls(None, _call("Beijing")), _result("")), ("userword", "get_weather", "Beijing"), TOOLS
    ),
    "calls without tools offered": Shape(_loop(), _LOOP),
    "late system behind a loop": Shape(
        (*_loop(), _turn("system", "systemword")), (*_LOOP, "systemword"), TOOLS
    ),
}
