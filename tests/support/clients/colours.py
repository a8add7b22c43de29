"""Questions about pictures of one colour, for the model that names colours."""

import base64
import io
from typing import Final

import openai
from PIL import Image

from tests.support.clients.media_chat import MediaAnswer, ask
from tests.support.clients.pictures import HEIGHT, WIDTH
from tests.support.engines.multimodal.colour_model import COLOURS

ANSWERS: Final = {
    "red": "The answer is red.\n",
    "green": "The picture is a green green green green",
    "blue": "The blue color of the blue is blue",
}
"""What Hugging Face's implementation answers to `ask_colour`: its first tokens, in float32."""


def colour_url(name: str) -> str:
    """A picture of one colour as a data URL."""
    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), COLOURS[name]).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


async def ask_colour(client: openai.AsyncOpenAI, name: str, salt: str, worker: str = "") -> MediaAnswer:
    """Ask about a picture of this colour. With another cache salt, nothing that was asked before is used."""
    parts = ("The picture is", colour_url(name), ". What colour is the picture?")
    return await ask(client, *parts, worker=worker, cache_salt=salt)


async def answers(client: openai.AsyncOpenAI, salt: str, worker: str = "") -> dict[str, str]:
    """The answers about all colours, nothing of which was cached."""
    found = {name: await ask_colour(client, name, salt, worker) for name in ANSWERS}
    assert not any(one.cached for one in found.values())
    return {name: one.text for name, one in found.items()}
