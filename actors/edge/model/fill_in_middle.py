"""Prompts for text between a prefix and a suffix, with the control tokens that code models have for it."""

from typing import Final, NamedTuple

import numpy as np

from headwater.actors.edge.model.chat_template import LiteralText
from headwater.actors.edge.model.tokenizer import Tokenizer
from headwater.schemas.hashing import U32


class _Form(NamedTuple):
    """The tokens before the prefix, before the suffix and at the end ("" for none); `suffix_first`: in that order."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


_FORMS: Final = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, Gemma, Granite
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Form("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


async def fill_in_middle(
    tokenizer: Tokenizer, prefix: str, suffix: str, *, special: bool = True
) -> U32 | None:
    """The prompt's token ids, None if the tokenizer has no tokens for it. `special`: with those that begin any prompt."""
    form = next((one for one in _FORMS if all(_ids(tokenizer, name) for name in one[:3] if name)), None)
    if form is None:
        return None
    before = await tokenizer.encode("", add_special_tokens=True) if special else np.array([], np.uint32)
    ids: list[list[int] | U32] = [
        _ids(tokenizer, form.prefix),
        await _text(tokenizer, prefix),
        _ids(tokenizer, form.suffix),
        await _text(tokenizer, suffix),
    ]
    if form.suffix_first:
        ids = ids[2:] + ids[:2]
    pieces = [before, *ids, _ids(tokenizer, form.middle)]
    return np.concatenate([np.array(piece, np.uint32) for piece in pieces])


async def _text(tokenizer: Tokenizer, text: str) -> U32:
    # A control token in a source file must not end the prefix.
    literal = LiteralText(tokenizer)
    return await literal.encode(literal.mark(text), add_special_tokens=False)


def _ids(tokenizer: Tokenizer, name: str) -> list[int]:
    number = tokenizer.reference.token_to_id(name) if name else None
    return [] if number is None else [number]
