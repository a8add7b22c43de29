"""Questions about images, videos and audio through OpenAI's own client, and what the fleet's headers say of the answers."""

import asyncio
from typing import Any, Final

import openai

MODEL: Final = "tiny"
ANSWER_TOKENS: Final = 8


def content(*parts: str) -> list[Any]:
    """The content of a message: data URLs are images, videos or audio, the rest is text."""
    return [_part(part) for part in parts]


def _part(part: str) -> dict[str, Any]:
    head, _, data = part.partition(",")
    if head.startswith("data:image/"):
        return {"type": "image_url", "image_url": {"url": part}}
    if head.startswith("data:video/"):
        return {"type": "video_url", "video_url": {"url": part}}
    if head.startswith("data:audio/"):
        form = head.removeprefix("data:audio/").removesuffix(";base64")
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    return {"type": "text", "text": part}


class MediaAnswer:
    """An answer: its text, its request's id, the worker that gave it, the one that prefilled it apart, the prompt's tokens, those that the engine found cached and those of audio."""

    def __init__(self, raw: Any) -> None:
        answer = raw.parse()
        self.text = answer.choices[0].message.content
        self.request = raw.headers["x-request-id"]
        self.worker = raw.headers["x-headwater-worker"]
        self.prefilled = raw.headers.get("x-headwater-prefill-worker", "")
        self.expected = int(raw.headers["x-headwater-cached-blocks"])
        self.tokens = answer.usage.prompt_tokens
        details = answer.usage.prompt_tokens_details
        self.cached, self.audio = details.cached_tokens, details.audio_tokens


async def ask(client: openai.AsyncOpenAI, *parts: str, worker: str = "", **more: Any) -> MediaAnswer:
    """Ask about some parts, of this worker if one is named; `more` are fields of the request."""
    return await ask_content(client, content(*parts), worker=worker, **more)


async def ask_content(
    client: openai.AsyncOpenAI, parts: list[Any], worker: str = "", **more: Any
) -> MediaAnswer:
    """The same with the parts as the request has them."""
    return MediaAnswer(
        await client.chat.completions.with_raw_response.create(
            model=MODEL,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            messages=[{"role": "user", "content": parts}],
            extra_body={"ignore_eos": True, **more},
            extra_headers={"x-headwater-worker": worker} if worker else {},
        )
    )


async def ask_again(client: openai.AsyncOpenAI, *parts: str, worker: str, **more: Any) -> MediaAnswer:
    """Ask this worker what it has answered before, until the router expects its blocks: it learns of them by events, a little later."""
    async with asyncio.timeout(30):
        while not (answer := await ask(client, *parts, worker=worker, **more)).expected:
            pass
    return answer
