"""Where media are in a prompt: each placeholder token of the chat template repeated as often as its item has tokens. Pure."""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from headwater.actors.edge.generation.messages.embeddings import given_of
from headwater.actors.edge.generation.messages.load import LoadedMedia, prompt_shape, shown_as
from headwater.actors.edge.model.catalog import Model
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.media.item import ID_BYTES
from headwater.schemas.hashing import U32
from headwater.schemas.media_kind import ONE, SEVERAL, PromptMediaKind
from headwater.schemas.messages.media import PromptMedia


def expand_placeholders(
    tokens: U32, loaded: LoadedMedia, model: Model, param: str
) -> tuple[U32, tuple[PromptMedia, ...]]:
    """The prompt with each item's placeholder token repeated, and where each item is. Raises `ApiError` 400."""
    placeholders = model.card.media.placeholders
    if not loaded.items and not any((tokens == token).any() for token in placeholders.values()):
        return tokens, ()
    is_place = np.zeros(len(tokens), np.bool_)
    for token in placeholders.values():
        is_place |= tokens == token
    places = np.flatnonzero(is_place)
    kinds = [shown_as(item.kind) for item in loaded.items]
    if tokens[places].tolist() != [placeholders[kind] for kind in kinds]:
        raise _unmatched(tokens[places].tolist(), loaded, placeholders, param)
    repeats = np.ones(len(tokens), np.int64)
    repeats[places] = loaded.tokens
    starts = (np.cumsum(repeats) - repeats)[places].tolist()
    media = tuple(
        PromptMedia(
            kind,
            item.id,
            start,
            count,
            prompt_shape(item, model.card),
            given=given_of(item) if item.kind == "embedding" else None,
        )
        for kind, item, start, count in zip(kinds, loaded.items, starts, loaded.tokens, strict=True)
    )
    return np.repeat(tokens, repeats).astype(np.uint32, copy=False), media


def of_tenant(media: Sequence[PromptMedia], salt: str) -> tuple[PromptMedia, ...]:
    """The media under ids that tenants with other salts cannot have.

    Blocks are kept apart by the salt of their hashes, but engines and workers also keep media and embeddings by their ids alone: how soon
    an answer begins would reveal that another tenant has sent the same.
    """
    key = blake2b(salt.encode(), digest_size=ID_BYTES, person=b"headwater-tenant").digest()
    return tuple(
        msgspec.structs.replace(item, id=blake2b(item.id.encode(), digest_size=ID_BYTES, key=key).hexdigest())
        for item in media
    )


def _unmatched(
    found: Sequence[int], loaded: LoadedMedia, placeholders: dict[PromptMediaKind, int], param: str
) -> ApiError:
    places, items = Counter(found), Counter[str](shown_as(item.kind) for item in loaded.items)
    for kind, token in placeholders.items():
        count = items[kind]
        if places[token] == count:
            continue
        if not count:
            return bad_request(
                f"The prompt spells the token that stands for {ONE[kind]}, without {ONE[kind]}.", param=param
            )
        return bad_request(
            f"The model's chat template made {places[token]} places for {count} {SEVERAL[kind]}; it does not take "
            f"{SEVERAL[kind]} here.",
            param=param,
        )
    return bad_request("The model's chat template puts media in another order than the request.", param=param)
