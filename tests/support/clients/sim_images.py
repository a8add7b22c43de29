"""Questions about pictures to the simulated engine, and the answers that it gives whatever happens."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.actors.media.item import media_id
from headwater.engines.model_files import byte_tokenizer
from headwater.engines.sim import model
from headwater.engines.sim.model import content_of, embedding_of
from headwater.engines.sim.scheduler import image_offset, token_at
from headwater.schemas.media import PromptMedia
from tests.support.clients.pictures import HEIGHT, WIDTH, picture_url

TOKENS: Final = 56
"""Of a picture."""

SQUARE: Final = 28
"""Pixels of the sides of a token."""

ANSWER_TOKENS: Final = 24
SEED: Final = 1


def expected(*seeds: int, length: int = ANSWER_TOKENS) -> str:
    """The answer of `length` tokens about these pictures: the simulated engine's text from where the images shift it to."""
    shape = (HEIGHT, WIDTH, 3)
    draws = [np.random.default_rng(seed) for seed in seeds]
    return answer_about(*(draw.integers(0, 255, shape, dtype=np.uint8) for draw in draws), length=length)


def answer_about(*images: NDArray[np.uint8], length: int = ANSWER_TOKENS) -> str:
    """The same about images of any size, as arrays of RGB whose sides are multiples of `SQUARE`."""
    contents = []
    for pixels in images:
        data, shape = pixels.tobytes(), pixels.shape
        tokens = (shape[0] // SQUARE) * (shape[1] // SQUARE)
        id_ = media_id("image", "uint8", shape, data, "")
        contents.append(content_of(embedding_of(PromptMedia("image", id_, 0, tokens, shape, data))))
    script = model.script()
    tokens = [token_at(script, SEED + image_offset(contents), number) for number in range(length)]
    return str(byte_tokenizer().decode(tokens))


def question(*seeds: int, before: str, length: int = ANSWER_TOKENS) -> dict[str, Any]:
    """The body of a request about pictures, after some words."""
    return question_about(*map(picture_url, seeds), before=before, length=length)


def question_about(*urls: str, before: str, length: int = ANSWER_TOKENS) -> dict[str, Any]:
    """The same about images by URL."""
    content = [
        {"type": "text", "text": before},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
    ]
    fields = {"model": "sim", "seed": SEED, "max_tokens": length, "ignore_eos": True}
    return {**fields, "messages": [{"role": "user", "content": content}]}
