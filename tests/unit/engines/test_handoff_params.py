"""Sealed parameters of hand-offs: whole, for their own prompt, or not at all."""

import pytest

from headwater.engines.engine import Unusable, seal, unseal
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling

PARAMS = b'{"remote_block_ids": [[1, 2, 3]]}'


def request(tokens: tuple[int, ...] = (1, 2, 3), name: str = "r-1", **fields: str) -> GenerateRequest:
    """A leg with this prompt."""
    return GenerateRequest(name, "e", 1, pack_tokens(list(tokens)), Sampling(4), **fields)  # type: ignore[arg-type]


def test_what_was_sealed_is_opened_for_the_same_prompt() -> None:
    """By another attempt, and by whoever releases it."""
    sealed = seal(PARAMS, request())
    assert unseal(sealed, request(name="r-2")) == unseal(sealed) == PARAMS


@pytest.mark.parametrize(
    "other", [request((1, 2, 4)), request((1, 2)), request(lora_name="a"), request(cache_salt="s")]
)
def test_another_prompt_opens_nothing(other: GenerateRequest) -> None:
    """Nor does the same prompt with another adapter or salt: its KV is another."""
    with pytest.raises(Unusable, match="another prompt's"):
        unseal(seal(PARAMS, request()), other)


def test_a_changed_byte_is_noticed_wherever_it_is() -> None:
    """A block id that is out of range, say, would be read all the same."""
    sealed = seal(PARAMS, request())
    for at in range(len(sealed)):
        with pytest.raises(Unusable):
            unseal(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], request())
        with pytest.raises(Unusable):
            unseal(sealed[:at], request())
