"""Images in conversations: which are accepted, where their tokens are, and what is wrong with the others."""

from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.actors.edge.catalog import Model
from headwater.actors.edge.prompt.conversation import template_messages
from headwater.actors.edge.prompt.media import NO_MEDIA, LoadedMedia, load_media, url_media
from headwater.actors.edge.prompt.prompts import expand_placeholders, of_tenant
from headwater.actors.edge.prompt.request import MediaPart, TextPart, Turn
from headwater.actors.edge.saga.placement import TokenSequence
from headwater.actors.http.errors import ApiError
from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem
from headwater.schemas.hashing import U32, unpack_hashes
from headwater.schemas.media import ClientEmbedding, PromptMedia
from headwater.schemas.tables import EmbeddingSupport, ImageSupport, ModelCard
from tests.support.clients.pictures import HEIGHT, WIDTH, picture_url

PLACEHOLDER = 9
SUPPORT = ImageSupport(placeholder=PLACEHOLDER, per_prompt=2, side=28, pixels_min=784, pixels_max=784 * 64)
CARD = ModelCard(
    name="vision",
    pool="vision",
    block_size=4,
    context_length=1_000,
    tokenizer="",
    chat_template="",
    special_tokens={},
    eos_token_ids=(),
    engine="vllm",
    capabilities=("generate", "images"),
    created_s=0,
    images=SUPPORT,
)


def model(**fields: Any) -> Model:
    """A model that takes images; of it only the card is read."""
    tokenizer: Any = None
    return Model(msgspec.structs.replace(CARD, **fields), tokenizer, None)


def part(url: str, number: int = 0, kind: Any = "image") -> MediaPart:
    """The media part at a place of the first message."""
    return MediaPart(kind, f"messages[0].content[{number}].image_url", url=url)


def item(id_: str) -> MediaItem:
    return MediaItem("image", id_, "uint8", (2, 2, 3), memoryview(bytes(12)), "png")


def tokens(*given: int) -> U32:
    return np.array(given, np.uint32)


async def test_images_are_decoded_in_order_and_known_ones_are_not_fetched_again() -> None:
    """The count of tokens is that of the size; the same part of a later attempt is taken from what is known."""
    intake = MediaIntake()
    turn = Turn(role="user", parts=(part(picture_url(1)), TextPart("and"), part(picture_url(2), 2)))
    known: dict[MediaPart, MediaItem] = {}
    try:
        images = await load_media([turn], model(), intake, known)
    finally:
        await intake.close()
    assert images.tokens == (56, 56)
    assert [(one.width, one.height) for one in images.items] == [(WIDTH, HEIGHT)] * 2
    assert images.items[0].id != images.items[1].id
    # The intake is closed: it could fetch nothing.
    assert await load_media([turn], model(), intake, known) == images


async def test_the_settings_of_the_models_processor_are_part_of_ids() -> None:
    """With other settings the model sees other values, so no cached block of before may be used."""
    intake, turn = MediaIntake(), Turn(role="user", parts=(part(picture_url(1)),))
    try:
        ids = [
            (await load_media([turn], model(media_processor=digest), intake)).items[0].id
            for digest in ("a", "a", "b", "")
        ]
    finally:
        await intake.close()
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


async def test_an_image_of_more_tokens_than_an_engine_takes_is_rejected() -> None:
    """By the least of the pool's engines; a limit for another kind is none for images."""
    intake, turn = MediaIntake(), Turn(role="user", parts=(part(picture_url(1)),))
    known: dict[MediaPart, MediaItem] = {}
    try:
        fits = model(media_tokens_max={"vllm": {"image": 56, "video": 1}, "sglang": {"video": 1}})
        assert (await load_media([turn], fits, intake, known)).tokens == (56,)
        less = model(media_tokens_max={"vllm": {"image": 55}, "sglang": {"image": 90}})
        with pytest.raises(ApiError, match="has 56 tokens; vision takes at most 55") as raised:
            await load_media([turn], less, intake, known)
    finally:
        await intake.close()
    assert (raised.value.status, raised.value.code) == (400, "image_tokens")
    assert raised.value.param == "messages[0].content[0].image_url"


@pytest.mark.parametrize(
    ("parts", "fields", "message", "param"),
    [
        ((part("https://a"),), {"images": None}, "vision takes text only; .* is of kind image", 0),
        ((part("https://a", 0, "audio"),), {}, "takes text and images; .* is of kind audio", 0),
        (tuple(part("https://a", n) for n in range(3)), {}, "3 images; vision takes at most 2", 2),
        ((MediaPart("image", "messages[0].content[0].image_url", file_id="f"),), {}, "no files API", 0),
    ],
)
async def test_what_a_model_does_not_take_is_refused_by_name(
    parts: tuple[MediaPart, ...], fields: dict[str, Any], message: str, param: int
) -> None:
    """Before anything is fetched."""
    intake = MediaIntake()
    with pytest.raises(ApiError, match=message) as raised:
        await load_media([Turn(role="user", parts=parts)], model(**fields), intake)
    assert raised.value.status == 400
    assert raised.value.param == f"messages[0].content[{param}].image_url"
    with pytest.raises(ApiError, match="takes text only"):
        await load_media([Turn(role="user", parts=(part("https://a"),))], model(), None)


def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    """The others stay as they are, and the places are those in the new prompt."""
    found, media = expand_placeholders(
        tokens(1, PLACEHOLDER, 2, 3, PLACEHOLDER),
        LoadedMedia((item("a"), item("b")), (3, 2)),
        model(),
        "messages",
    )
    assert found.tolist() == [1, 9, 9, 9, 2, 3, 9, 9]
    assert found.dtype == np.uint32
    assert [(one.id, one.start, one.tokens) for one in media] == [("a", 1, 3), ("b", 6, 2)]
    plain = tokens(1, 2, 3)
    assert expand_placeholders(plain, NO_MEDIA, model(), "messages") == (plain, ())
    # What has a meaning for other models only.
    assert expand_placeholders(tokens(PLACEHOLDER), NO_MEDIA, model(images=None), "prompt")[1] == ()


@pytest.mark.parametrize(
    ("given", "images", "message"),
    [
        (tokens(1, PLACEHOLDER), NO_MEDIA, "without an image"),
        (tokens(1, 2), LoadedMedia((item("a"),), (3,)), "made 0 places for 1 images"),
        (tokens(PLACEHOLDER, PLACEHOLDER), LoadedMedia((item("a"),), (3,)), "made 2 places for 1 images"),
    ],
)
def test_places_without_images_and_images_without_places(
    given: U32, images: LoadedMedia, message: str
) -> None:
    """Neither reaches an engine."""
    with pytest.raises(ApiError, match=message):
        expand_placeholders(given, images, model(), "messages")


def test_templates_see_where_images_are() -> None:
    """As a list of parts, in order; a message with text only stays a text."""
    turns = [
        Turn(role="user", parts=(TextPart("a"), part("data:x"), TextPart("b"))),
        Turn(role="user", parts=(TextPart("c"), TextPart("d"))),
    ]
    first, second = template_messages(turns)
    assert first["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    assert second["content"] == "cd"


def test_blocks_are_named_by_their_images() -> None:
    """Equal tokens with another image differ from its first block on; tokens that follow do not change that."""
    prompt = tokens(1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 6, 7)

    def hashes(id_: str, emitted: list[int]) -> list[int]:
        media = (PromptMedia("image", id_, 5, 5, (2, 2, 3)),)
        sequence = TokenSequence(prompt, 4, "", "", media)
        found: list[int] = unpack_hashes(sequence.extend(emitted)[1]).tolist()
        return found

    one, other, plain = hashes("a", []), hashes("b", []), hashes("", [])
    assert one[0] == other[0] == plain[0]
    assert len({one[1], other[1], plain[1], one[2], other[2], plain[2]}) == 6
    assert hashes("a", [8, 8, 8, 8])[:3] == one


def test_an_image_has_an_id_of_its_own_for_each_tenant() -> None:
    """Engines and workers keep images and embeddings by id alone: one id for all would reveal what another tenant has sent."""
    one, two = (
        PromptMedia("image", "a" * 32, 3, 4, (28, 28, 3)),
        PromptMedia("image", "b" * 32, 9, 4, (28, 28, 3)),
    )
    ours, theirs = of_tenant((one, two), "tenant-1"), of_tenant((one, two), "tenant-2")
    ids = {item.id for item in (one, two, *ours, *theirs)}
    assert len(ids) == 6
    assert all(len(id_) == 32 for id_ in ids)
    assert of_tenant((one, two), "tenant-1") == ours
    assert [msgspec.structs.replace(item, id="") for item in ours] == [
        msgspec.structs.replace(item, id="") for item in (one, two)
    ]


EMBEDDINGS = EmbeddingSupport(width=4, dtype="float32", merge=2)


def embedded(rows: int, grid: tuple[int, ...], id_: str = "e") -> MediaItem:
    """A checked embedding of so many tokens."""
    return MediaItem(
        "embedding", id_, "F32", (rows, 4), memoryview(bytes(rows * 16)), "safetensors", grid=grid
    )


def embedding(number: int = 0) -> MediaPart:
    return MediaPart("embedding", f"messages[0].content[{number}].image_embeds", data="AAAA")


async def test_an_embedding_takes_the_place_of_its_image() -> None:
    """In the template, in the prompt, and in what workers are told: the shape of an image with as many tokens."""
    turn = Turn(role="user", parts=(TextPart("a"), embedding(1)))
    assert template_messages([turn])[0]["content"] == [{"type": "text", "text": "a"}, {"type": "image"}]
    taking = model(image_embeddings=EMBEDDINGS)
    loaded = await load_media([turn], taking, MediaIntake(), {embedding(1): embedded(6, (1, 4, 6))})
    assert loaded.tokens == (6,)
    found, media = expand_placeholders(tokens(1, PLACEHOLDER, 2), loaded, taking, "messages")
    assert found.tolist() == [1, *[PLACEHOLDER] * 6, 2]
    [one] = media
    assert (one.kind, one.id, one.start, one.tokens, one.shape) == ("image", "e", 1, 6, (56, 84, 3))
    assert one.given == ClientEmbedding("float32", 4, b'{"image_grid_thw":[1,4,6]}')
    assert one.size == 6 * 4 * 4


@pytest.mark.parametrize(
    ("parts", "item", "fields", "message", "code"),
    [
        (
            (embedding(),),
            embedded(6, (1, 4, 6)),
            {"image_embeddings": None},
            "no precomputed embeddings",
            "media_embeddings_not_allowed",
        ),
        (
            (embedding(),),
            embedded(6, (1, 4, 6)),
            {"images": None},
            "no precomputed embeddings",
            "media_embeddings_not_allowed",
        ),
        ((embedding(), part("https://a", 1)), embedded(6, (1, 4, 6)), {}, "not both", None),
        (
            (embedding(),),
            embedded(5, (1, 4, 6)),
            {},
            "has 5 tokens; an image of its grid has 6",
            "image_shape",
        ),
        ((embedding(),), embedded(6, (1, 3, 8)), {}, "not divisible by 2", "image_shape"),
        (
            tuple(embedding(n) for n in range(3)),
            embedded(6, (1, 4, 6)),
            {},
            "3 images; vision takes at most 2",
            "too_many_images",
        ),
    ],
)
async def test_embeddings_that_a_model_does_not_take(
    parts: tuple[MediaPart, ...], item: MediaItem, fields: dict[str, Any], message: str, code: str | None
) -> None:
    """An engine would end on most of them."""
    taking = model(**{"image_embeddings": EMBEDDINGS, **fields})
    known = {one: item for one in parts if one.kind == "embedding"}
    with pytest.raises(ApiError, match=message) as raised:
        await load_media([Turn(role="user", parts=parts)], taking, MediaIntake(), known)
    assert (raised.value.status, raised.value.code) == (400, code)


@pytest.mark.parametrize(
    "url", ["data:;base64,aGk=", "DATA:image/PNG;base64,aGk=", "data:image/png;charset=utf-8;BASE64,aGk="]
)
def test_data_urls_as_clients_write_them(url: str) -> None:
    """The scheme has no case, and the type may be left out: what the data is, its first bytes say."""
    assert url_media("image", url, "messages").url == url
