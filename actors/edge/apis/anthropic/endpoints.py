"""POST /v1/messages and /v1/messages/count_tokens."""

import re
from typing import Final

import msgspec

from headwater.actors.edge.answer.run import Generator
from headwater.actors.edge.apis.anthropic.encoder import MessageEncoder
from headwater.actors.edge.apis.anthropic.translate import to_generation, to_prompt
from headwater.actors.edge.apis.anthropic.types import TokenCount, decode_count, decode_messages
from headwater.actors.edge.saga.context import Call, Serving
from headwater.actors.http.asgi import HeaderAdder, Headers, respond
from headwater.actors.http.errors import bad_request

VERSION: Final = re.compile(rb"20\d\d-\d\d-\d\d")
"""A value of the header anthropic-version, which a request may leave out.

Versions up to 2026-10-21 differ in what Anthropic's servers refuse, not in the format: each gets the same answer. So do
later ones, which a client sends after an upgrade.
"""

REQUEST_PREFIX: Final = "req_"


def request_id_header(id_: str) -> tuple[bytes, bytes]:
    """The header in which Anthropic's clients look for the id of a request."""
    return b"request-id", (REQUEST_PREFIX + id_).encode()


class AnthropicApi:
    """The endpoints of Anthropic's Messages API."""

    def __init__(self, serving: Serving, generator: Generator) -> None:
        self._serving = serving
        self._generator = generator

    async def messages(self, call: Call) -> None:
        """POST /v1/messages."""
        check_version(call.headers)
        request = decode_messages(call.body)
        self._serving.fields.count(request)
        id_ = call.make_id(self._serving.workers.ports.ids)
        omit = request.thinking is not None and request.thinking.display == "omitted"
        encoder = MessageEncoder(request.max_tokens, omit_thinking=omit)
        send = HeaderAdder(call.send, lambda: [request_id_header(id_)])
        wanted = to_generation(request, id_)
        await self._generator.run(wanted, encoder, call._replace(send=send))

    async def count_tokens(self, call: Call) -> None:
        """POST /v1/messages/count_tokens: renders and encodes the prompt; no engine is involved."""
        check_version(call.headers)
        request = decode_count(call.body)
        self._serving.fields.count(request)
        wanted = to_prompt(request)
        prepared = await self._generator.prepare(wanted, call)
        header = request_id_header(self._serving.workers.ports.ids())
        await respond(call.send, 200, msgspec.json.encode(TokenCount(prepared.prompt_tokens)), [header])


def check_version(headers: Headers) -> None:
    """Raises `ApiError` 400 for what is no version of the API."""
    for name, value in headers:
        if name == b"anthropic-version" and not VERSION.fullmatch(value):
            raise bad_request(
                "The header anthropic-version must be a date, such as 2026-10-21.", param="anthropic-version"
            )
