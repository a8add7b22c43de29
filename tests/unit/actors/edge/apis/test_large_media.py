"""A request with 27 MB of base64: making turns of it costs the event loop what a small request does."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.anthropic_translate import to_generation
from headwater.actors.edge.apis.anthropic_types import MessagesRequest, decode_fields
from headwater.actors.edge.apis.chat import chat_request
from headwater.actors.edge.apis.chat_types import ChatRequest
from headwater.actors.edge.apis.responses_requests import generation_request
from headwater.actors.edge.apis.responses_types import CreateFields
from headwater.actors.edge.prompt.media import media_parts
from headwater.actors.edge.prompt.request import Turn
from headwater.actors.http.body import decode_body
from tests.support.media.images import data_url

FILE = bytes(20_300_000)
DATA = base64.b64encode(FILE).decode()
SHARE_MAX = 0.1
"""Of what decoding it takes the same thread; hashing it takes several times as much."""

TRIES = 5
"""The least counts: other processes cost this one its caches, and a garbage collection may come in any try."""

Translate = Callable[[], Sequence[Turn]]


def user(*content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def chat() -> Translate:
    image = {"type": "image_url", "image_url": {"url": data_url(FILE)}}
    request = decode_body(ChatRequest, msgspec.json.encode({"model": "m", "messages": user(image)}))
    return lambda: chat_request(request).messages


def responses() -> Translate:
    image = {"type": "input_image", "image_url": data_url(FILE)}
    fields = msgspec.json.decode(msgspec.json.encode({"model": "m", "input": user(image)}), type=CreateFields)
    return lambda: generation_request(fields, [], fields.items(), "1", stream=False)[0].messages


def messages() -> Translate:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    body = {"model": "m", "max_tokens": 9, "messages": user({"type": "image", "source": source})}
    request = decode_fields(MessagesRequest, msgspec.json.encode(body))
    return lambda: to_generation(request).messages


@pytest.mark.parametrize("form", [chat, responses, messages])
def test_the_contents_are_not_looked_at(form: Callable[[], Translate]) -> None:
    """Neither decoded nor hashed: parts are found by their places."""
    translate, spent_s, decoding_s = form(), [], []
    for _ in range(TRIES):
        times_s = [time.thread_time()]
        (part,) = {*media_parts(translate())}
        times_s.append(time.thread_time())
        base64.b64decode(DATA)
        times_s.append(time.thread_time())
        assert len(part.url or part.data) >= len(DATA)
        spent_s.append(times_s[1] - times_s[0])
        decoding_s.append(times_s[2] - times_s[1])
    assert min(spent_s) < SHARE_MAX * min(decoding_s), (spent_s, decoding_s)
