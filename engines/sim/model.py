"""The simulated engine's own model, which has a token per byte: how it takes media, and the text it answers with."""

from tokenizers import Tokenizer

from headwater.engines.model_files import AUDIO, IMAGE, VIDEO, ModelFiles, byte_tokenizer
from headwater.engines.sim import defaults
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, VideoSupport

SENTENCES = (
    "The headwater is where the stream begins. "
    "Every block that is stored and every block that is lost becomes an event, "
    "and a router that reads the events in order knows where the next request should go. "
)


def image_support() -> ImageSupport:
    """Return how the simulated model takes images: one token per square of 28 pixels, as Qwen2-VL does."""
    return _squares(IMAGE, defaults.IMAGES_PER_PROMPT, defaults.IMAGE_PIXELS_MAX)


def media_support() -> MediaSupport:
    """Return how the simulated model takes media: images and videos as Qwen2-VL does, with smaller frames, and audio as Qwen2-Audio does."""
    videos = VideoSupport(
        frame=_squares(VIDEO, defaults.VIDEOS_PER_PROMPT, defaults.FRAME_PIXELS_MAX),
        per_prompt=defaults.VIDEOS_PER_PROMPT,
        frames=defaults.VIDEO_FRAMES,
        group=2,
    )
    audio = AudioSupport(
        placeholder=_token(AUDIO),
        per_prompt=defaults.AUDIO_PER_PROMPT,
        rate_hz=defaults.AUDIO_RATE_HZ,
        samples_max=defaults.AUDIO_SAMPLES_MAX,
        stride=defaults.AUDIO_STRIDE,
        offset=defaults.AUDIO_STRIDE // 2 - 1,
    )
    return MediaSupport(image_support(), videos, audio)


def _squares(token: str, per_prompt: int, pixels_max: int) -> ImageSupport:
    return ImageSupport(
        placeholder=_token(token),
        per_prompt=per_prompt,
        side=defaults.IMAGE_SIDE,
        pixels_min=defaults.IMAGE_PIXELS_MIN,
        pixels_max=pixels_max,
    )


def _token(text: str) -> int:
    number = byte_tokenizer().token_to_id(text)
    assert number is not None, "one of its special tokens"
    return number


def script(files: ModelFiles | None = None) -> tuple[int, ...]:
    """Token ids of the text that the simulated engine repeats, in the vocabulary of a model's files or its own."""
    made = byte_tokenizer() if files is None else Tokenizer.from_buffer(files.tokenizer)
    return tuple(made.encode(SENTENCES, add_special_tokens=False).ids)
