"""The simulated engine's own model: a byte tokenizer, a chat template, and the text it answers with."""

import hashlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.engines.model_files import ModelFiles
from headwater.engines.sim import defaults
from headwater.schemas.tables import AudioSupport, ImageSupport, MediaSupport, VideoSupport

CONTEXT_LENGTH = 131_072
EOS = "<|im_end|>"
IMAGE, VIDEO, AUDIO = "<|image|>", "<|video|>", "<|audio|>"

SENTENCES = (
    "The headwater is where the stream begins. "
    "Every block that is stored and every block that is lost becomes an event, "
    "and a router that reads the events in order knows where the next request should go. "
)

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|' + part['type'] + '|>' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> Tokenizer:
    """One token per byte, and the control tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(text, special=True)
            for text in ("<|endoftext|>", "<|im_start|>", EOS, IMAGE, VIDEO, AUDIO)
        ]
    )
    return made


def sim_model_files(name: str) -> ModelFiles:
    """The files of the simulated model."""
    made = tokenizer()
    return ModelFiles(
        made.to_str().encode(),
        TEMPLATE,
        {"bos_token": "<|im_start|>", "eos_token": EOS},
        tuple(number for text in (EOS,) if (number := made.token_to_id(text)) is not None),
        CONTEXT_LENGTH,
        name,
        identity=hashlib.sha256(made.to_str().encode()).hexdigest(),
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
    number = tokenizer().token_to_id(text)
    assert number is not None, "one of its special tokens"
    return number


def script(files: ModelFiles | None = None) -> tuple[int, ...]:
    """Token ids of the text that the simulated engine repeats, in the vocabulary of a model's files or its own."""
    made = tokenizer() if files is None else Tokenizer.from_buffer(files.tokenizer)
    return tuple(made.encode(SENTENCES, add_special_tokens=False).ids)
