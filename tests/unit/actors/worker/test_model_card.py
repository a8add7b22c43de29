"""The card of a pool whose workers have several engines."""

from msgspec.structs import replace

from headwater.actors.worker.model_card import media_processor, with_engines_of
from headwater.engines.engine import EngineInfo
from headwater.engines.model_files import byte_model_files
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, VideoSupport
from tests.unit.engines.vllm.test_checks import card


def test_a_card_has_the_capabilities_of_every_engine() -> None:
    """Each engine's are replaced by its own workers, and by no others."""
    vllm = replace(card(), capabilities=("generate", "bad_words"))
    sglang = replace(card(engine="sglang"), capabilities=("generate", "lora"))
    first = with_engines_of(vllm, None)
    assert (first.capabilities, first.engines) == (
        ("bad_words", "generate"),
        {"vllm": ("generate", "bad_words")},
    )
    both = with_engines_of(sglang, first)
    assert both.engine == "sglang"
    assert both.capabilities == ("bad_words", "generate", "lora")
    less = with_engines_of(replace(sglang, capabilities=("generate",)), both)
    assert less.capabilities == ("bad_words", "generate")
    assert with_engines_of(vllm, less).engines == {"vllm": ("generate", "bad_words"), "sglang": ("generate",)}


def test_a_card_says_how_images_are_taken_as_long_as_one_engine_takes_them() -> None:
    """Whichever worker starts last."""
    support = ImageSupport(placeholder=9, per_prompt=4, tokens=3)
    vllm = replace(card(), capabilities=("generate", "images"), images=support)
    sglang = replace(card(engine="sglang"), capabilities=("generate",))
    both = with_engines_of(sglang, with_engines_of(vllm, None))
    assert both.images == support
    neither = with_engines_of(replace(vllm, capabilities=("generate",), images=None), both)
    assert neither.images is None


def test_each_kind_of_media_is_of_the_engine_that_takes_it() -> None:
    """One engine takes images, another one videos and audio: the pool takes all, in whatever order they start."""
    frame = ImageSupport(placeholder=9, per_prompt=4, tokens=3)
    videos = VideoSupport(frame=frame, per_prompt=1, frames=8)
    audio = AudioSupport(placeholder=8, per_prompt=1, rate_hz=16_000, samples_max=480_000, stride=640)
    some = replace(card(), capabilities=("generate", "videos", "audio"), videos=videos, audio=audio)
    others = replace(card(engine="sglang"), capabilities=("generate", "images"), images=frame)
    for first, second in ((some, others), (others, some)):
        assert with_engines_of(second, with_engines_of(first, None)).media == MediaSupport(
            frame, videos, audio
        )
    without = replace(some, capabilities=("generate",), videos=None, audio=None)
    assert with_engines_of(without, with_engines_of(some, None)).media == MediaSupport()


def test_the_digest_of_media_settings_is_of_the_files_and_of_the_engines_arguments() -> None:
    """Whatever changes what the model sees changes it; a model without media has none."""
    files = byte_model_files("m")._replace(media_processor="files")
    image = ImageSupport(placeholder=9, per_prompt=4, tokens=3)
    info = EngineInfo("m", 16, 100, 8, 1_000, media=MediaSupport(image))
    digests = [
        media_processor(files, info),
        media_processor(files._replace(media_processor="others"), info),
        media_processor(files, info._replace(media_settings='{"max_pixels": 784}')),
    ]
    assert len({*digests, ""}) == 4
    # Whatever else an engine says of itself: with the same settings both engines see the same.
    assert (
        media_processor(files, info._replace(version="2", media=MediaSupport(image, audio=None)))
        == digests[0]
    )
    assert media_processor(files, info._replace(media=MediaSupport())) == ""


def test_limits_of_items_are_kept_by_engine() -> None:
    """An engine replaces its own, and the least counts."""
    support = ImageSupport(placeholder=9, per_prompt=4, tokens=3)
    vllm = replace(
        card(),
        capabilities=("generate", "images"),
        images=support,
        media_processor="digest",
        media_tokens_max={"vllm": {"image": 100}},
    )
    sglang = replace(
        card(engine="sglang"), capabilities=("generate",), media_tokens_max={"sglang": {"image": 60}}
    )
    both = with_engines_of(sglang, with_engines_of(vllm, None))
    assert both.media_processor == "digest"
    assert (both.tokens_of_item_max("image"), both.tokens_of_item_max("video")) == (60, None)
    less = with_engines_of(replace(vllm, media_tokens_max={"vllm": {"image": 50}}), both)
    assert less.media_tokens_max == {"sglang": {"image": 60}, "vllm": {"image": 50}}
    none = with_engines_of(replace(sglang, media_tokens_max={}), less)
    assert none.tokens_of_item_max("image") == 50
