"""Questions about pictures to the simulated engine, and the answers that it gives whatever happens."""

from typing import Any, Final

import numpy as np

from headwater.actors.media.item import media_id
from headwater.engines.sim import model
from headwater.engines.sim.embedding import content_of, embedding_of
from headwater.engines.sim.sequence import image_offset, token_at
from headwater.schemas.messages.media import PromptMedia
from tests.support.clients.pictures import HEIGHT, WIDTH, picture_url

TOKENS: Final = 56
"""Of a picture."""

ANSWER_TOKENS: Final = 24
SEED: Final = 1


def expected(*seeds: int, length: int = ANSWER_TOKENS) -> str:
    """The answer of `length` tokens about these pictures: the simulated engine's text from where the images shift it to."""
    contents = []
    for seed in seeds:
        shape = (HEIGHT, WIDTH, 3)
        pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8).tobytes()
        id_ = media_id("image", "uint8", shape, pixels, "")
        contents.append(content_of(embedding_of(PromptMedia("image", id_, 0, TOKENS, shape, pixels))))
    script = model.script()
    tokens = [token_at(script, SEED + image_offset(contents), number) for number in range(length)]
    return str(model.tokenizer().decode(tokens))


def question(*seeds: int, before: str, length: int = ANSWER_TOKENS) -> dict[str, Any]:
    """The body of a request about pictures, after some words."""
    content = [
        {"type": "text", "text": before},
        *({"type": "image_url", "image_url": {"url": picture_url(seed)}} for seed in seeds),
    ]
    fields = {"model": "sim", "seed": SEED, "max_tokens": length, "ignore_eos": True}
    return {**fields, "messages": [{"role": "user", "content": content}]}
