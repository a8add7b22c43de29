"""A request and a model: everything that is known before a worker is asked for. Raises `ApiError` for what cannot be served."""

from typing import NamedTuple

from headwater.actors.edge.access.salts import NO_SALT, CacheSalt
from headwater.actors.edge.generation.prompts import prompts_of
from headwater.actors.edge.generation.request import GenerationRequest
from headwater.actors.edge.generation.sampling import sampling_for
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import bad_request
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Sampling

CHOICES_MAX = 128
"""Choices of one request, over all its prompts."""


class Prepared(NamedTuple):
    """A request whose prompts are token ids and whose sampling is what engines get."""

    request: GenerationRequest
    model: Model
    prompts: list[U32]
    sampling: Sampling
    salt: CacheSalt = NO_SALT

    @property
    def prompt_tokens(self) -> int:
        """Tokens over all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


async def prepare(
    request: GenerationRequest,
    model: Model,
    context: int,
    salt: CacheSalt = NO_SALT,
    *,
    special_tokens_in_text: bool = False,
) -> Prepared:
    """Check a request against its model, and encode its prompts. Raises `ApiError` 400.

    `context`: tokens that prompt and answer may have together, for this client.
    """
    if "generate" not in model.card.capabilities:
        raise bad_request(f"{model.card.name} does not generate text; use /v1/embeddings.", param="model")
    if len(request.prompts) * request.choices > CHOICES_MAX:
        raise bad_request(f"At most {CHOICES_MAX} choices over all prompts.", param=request.param)
    prompts = await prompts_of(request, model, context, special_tokens_in_text=special_tokens_in_text)
    sampling = sampling_for(request, model, context, max(len(prompt) for prompt in prompts))
    return Prepared(request, model, prompts, sampling, salt)
