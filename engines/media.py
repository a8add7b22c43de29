"""Media in prompts: how many tokens each becomes, learned by asking the engine's own processor, and their places in the prompt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from headwater.engines.engine import RequestRejected
from headwater.schemas.media import ONE, SEVERAL, VALUE_BYTES, PromptMedia
from headwater.schemas.tables import (
    AudioSupport,
    ImageSupport,
    MediaSupport,
    SpeechSupport,
    VideoSupport,
    count_audio_tokens,
    count_image_tokens,
    count_media_tokens,
    count_video_tokens,
)

PROBES: Final = ((64, 64), (120, 500), (900, 333), (2_000, 1_500))
"""Heights and widths of the images whose tokens are counted at the start."""


_log = structlog.get_logger("headwater.media")

RuleT = TypeVar("RuleT")


def log_not_served(kind: str, model: str, reason: str | Exception) -> None:
    """Log why media of a kind are not served: requests with them are rejected, and such a model serves what remains."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
    _log.warning("media_not_served", kind=kind, model=model, reason=text)


def learned(kind: str, model: str, learn: Callable[[], RuleT | None]) -> RuleT | None:
    """The rule that `learn` finds for a kind of media; None without one, or where it fails: processors of models fail in any way."""
    try:
        rule = learn()
    except Exception as error:
        log_not_served(kind, model, error)
        return None
    if rule is None:
        log_not_served(kind, model, "its tokens follow no known rule")
    return rule


def placeholder_of(config: Any, kind: str = "image") -> int | None:
    """The token id that stands for an item of this kind, in a model's configuration."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return None


def black_image(height: int, width: int) -> Any:
    """A black image, as engines take it."""
    from PIL import Image

    return Image.fromarray(np.zeros((height, width, 3), np.uint8))


def fitting_rule(
    config: Any, image_processor: Any, *, placeholder: int, limit: int, found: Mapping[tuple[int, int], int]
) -> ImageSupport | None:
    """The rule that gives exactly what was found, None without one.

    `found` has the tokens of an image by its height and width, -1 if there are other tokens than placeholders. `config` and
    `image_processor` are those of Hugging Face, `limit` is how many images a prompt may have.
    """
    if -1 in found.values():
        return None
    rules = [ImageSupport(placeholder=placeholder, per_prompt=limit, tokens=next(iter(found.values())))]
    vision = getattr(config, "vision_config", None)
    patch, merge = getattr(vision, "patch_size", 0), getattr(vision, "spatial_merge_size", 0)
    size = getattr(image_processor, "size", None)
    if patch and merge and size and "shortest_edge" in size:
        rules.append(
            ImageSupport(
                placeholder=placeholder,
                per_prompt=limit,
                side=patch * merge,
                pixels_min=int(size["shortest_edge"]),
                pixels_max=int(size["longest_edge"]),
            )
        )
    for rule in rules:
        if all(count_image_tokens(rule, *pixels) == tokens for pixels, tokens in found.items()):
            return rule
    return None


# The rule that counts video tokens, found from what the engine's processor makes of some videos.

VideoSize = tuple[int, int, int]
"""Frames, height, width."""


def probes(frames: int) -> tuple[VideoSize, ...]:
    """The videos whose tokens are counted at the start, of up to `frames` frames."""
    sizes = ((1, 64, 64), (2, 64, 64), (3, 120, 500), (frames, 900, 333))
    return tuple([size for size in sizes if size[0] <= frames])


def black_video(size: VideoSize) -> NDArray[np.uint8]:
    """A black video, as engines take it."""
    return np.zeros((*size, 3), np.uint8)


def frames_have_times(config: Any) -> bool:
    """Do the positions of a video's tokens depend on the times of its frames, as in Qwen2.5-VL? Then its grid is not enough for a reader of its embedding.

    `config` is that of Hugging Face.
    """
    vision = getattr(config, "vision_config", None)
    return getattr(vision, "tokens_per_second", None) is not None


def fitting_video_rule(
    config: Any,
    video_processor: Any,
    *,
    placeholder: int,
    limit: int,
    frames: int,
    found: Mapping[VideoSize, int],
) -> VideoSupport | None:
    """The rule that gives exactly what was found, None without one.

    `found` has the tokens of a video by its size, -1 if there are other tokens than placeholders. `config` and `video_processor` are those
    of Hugging Face; `limit` is how many videos a prompt may have, `frames` how many frames one is sampled to.
    """
    for group in {1, int(getattr(video_processor, "temporal_patch_size", 1) or 1)}:
        groups = {size: -(-size[0] // group) for size in found}
        if any(tokens < 0 or tokens % groups[size] for size, tokens in found.items()):
            continue
        frame = fitting_rule(
            config,
            video_processor,
            placeholder=placeholder,
            limit=limit,
            found={size[1:]: tokens // groups[size] for size, tokens in found.items()},
        )
        if frame is None:
            continue
        rule = VideoSupport(frame=frame, per_prompt=limit, frames=frames, group=group)
        if all(count_video_tokens(rule, *size) == tokens for size, tokens in found.items()):
            return rule
    return None


# The rule that counts audio tokens, found from what the engine's processor makes of some recordings.

F32 = NDArray[np.float32]

PROBES_S: Final = (0.1, 0.7531, 3.0, 12.3457)
"""Lengths that the rule has to give too, next to the longest."""


def fitting_audio_rule(
    count: Callable[[int], int], *, placeholder: int, limit: int, rate_hz: int, window_s: float, hop: int
) -> AudioSupport | None:
    """The rule that gives exactly what `count` does, None without one.

    `count` gives the tokens of this many samples, 0 if the model does not take them, -1 if there are other tokens than placeholders. A
    model hears `window_s` seconds at most and has a number of features every `hop` samples; each token stands for a number of these.
    """
    longest = int(window_s * rate_hz)
    most = count(longest)
    if most < 2:
        return None
    stride = hop * max(1, round(longest / (hop * most)))
    # The fewest samples with two tokens show how they are rounded.
    low, high = stride // 2, min(longest, 3 * stride)
    while high - low > 1:
        middle = (low + high) // 2
        if count(middle) >= 2:
            high = middle
        else:
            low = middle
    rule = AudioSupport(
        placeholder=placeholder,
        per_prompt=limit,
        rate_hz=rate_hz,
        samples_max=longest,
        stride=stride,
        offset=2 * stride - high,
    )
    lengths = (longest, *[int(seconds * rate_hz) for seconds in PROBES_S if seconds < window_s])
    return rule if all(count(samples) == _counted(rule, samples) for samples in lengths) else None


def learn_audio_rule(
    features: Any, expand: Callable[[F32], int], *, placeholder: int, limit: int
) -> AudioSupport | None:
    """The rule of a model with Hugging Face's feature extractor `features`; `expand` gives the placeholders of samples.

    `expand` raises `ValueError` for what is too short to be heard.
    """
    rate_hz = int(features.sampling_rate)

    def count(samples: int) -> int:
        try:
            return expand(np.zeros(samples, np.float32))
        except ValueError:
            return 0

    return fitting_audio_rule(
        count,
        placeholder=placeholder,
        limit=limit,
        rate_hz=rate_hz,
        window_s=float(features.chunk_length),
        hop=int(features.hop_length),
    )


def _counted(rule: AudioSupport, samples: int) -> int:
    try:
        return count_audio_tokens(rule, samples)
    except ValueError:
        return 0


# Items of media to try an engine with.

PROBE_ID: Final = "0" * 32
"""The id of the probe item. No real item has it: ids are hashes."""


def probe_item(support: MediaSupport) -> PromptMedia | None:
    """A black image, or for a model without images a second of silence; None for a model that takes neither."""
    if support.images is not None:
        return probe_image(support.images)
    return probe_clip(support.audio) if support.audio is not None else None


def probe_image(support: ImageSupport) -> PromptMedia:
    """A black image."""
    height, width = PROBES[0]
    tokens = count_image_tokens(support, height, width)
    return PromptMedia("image", PROBE_ID, 0, tokens, (height, width, 3), bytes(height * width * 3))


def probe_clip(support: AudioSupport) -> PromptMedia:
    """Silence of a second."""
    samples = min(support.rate_hz, support.samples_max)
    tokens = count_audio_tokens(support, samples)
    return PromptMedia("audio", PROBE_ID, 0, tokens, (samples,), bytes(samples * VALUE_BYTES["audio"]))


# Checks of prompts with media, and the values as engines take them.


def check_media(tokens: Sequence[int], media: Sequence[PromptMedia], support: MediaSupport) -> None:
    """Raises `RequestRejected` unless the prompt's placeholder tokens are those of its media, as many as the model makes of each.

    Engines end on a placeholder without an item, and blocks with other tokens than an engine's would have wrong names.
    """
    placeholders = support.placeholders
    at = 0
    for item in media:
        if item.kind not in placeholders:
            raise RequestRejected(f"this engine takes no {SEVERAL[item.kind]}", param="messages")
        end = item.start + item.tokens
        if item.start < at or list(tokens[item.start : end]) != [placeholders[item.kind]] * item.tokens:
            raise RequestRejected(
                f"tokens {item.start} to {end} of the prompt are not those of {ONE[item.kind]}",
                param="messages",
            )
        at = end
        if item.tokens != _count(support, item):
            raise RequestRejected(
                f"{_described(item)} came with {item.tokens} tokens; this engine makes {_count(support, item)} of it",
                param="messages",
            )
    for kind, most in support.limits.items():
        count = sum(item.kind == kind for item in media)
        if count > most:
            raise RequestRejected(f"{count} {SEVERAL[kind]}; at most {most} are possible", param="messages")
    for token in {*placeholders.values()}:
        kinds = [kind for kind, stands in placeholders.items() if stands == token]
        if tokens.count(token) != sum(item.tokens for item in media if item.kind in kinds):
            kind_names = " or ".join([ONE[kind] for kind in kinds])
            raise RequestRejected(
                f"the prompt has the token {token}, which stands for {kind_names}, without {kind_names}"
            )


def collapse_placeholders(tokens: list[int], media: Sequence[PromptMedia]) -> list[int]:
    """A prompt with one placeholder token for each item, for engines that repeat it themselves."""
    collapsed: list[int] = []
    at = 0
    for item in media:
        # The first of the item's own.
        collapsed += tokens[at : item.start + 1]
        at = item.start + item.tokens
    return [*collapsed, *tokens[at:]]


def _count(support: MediaSupport, item: PromptMedia) -> int:
    try:
        return count_media_tokens(support, item.kind, item.shape)
    except ValueError as error:
        raise RequestRejected(str(error), param="messages") from error


def _described(item: PromptMedia) -> str:
    if item.kind == "image":
        return f"an image of {item.shape[1]} x {item.shape[0]} pixels"
    if item.kind == "video":
        return f"a video of {item.shape[0]} frames of {item.shape[2]} x {item.shape[1]} pixels"
    return f"an audio clip of {item.shape[0]} samples"


def image_of(item: PromptMedia) -> Any:
    """The image as an object of Pillow. Raises `RequestRejected` if its data is not all there."""
    from PIL import Image

    return Image.fromarray(values_of(item))


def values_of(item: PromptMedia) -> NDArray[Any]:
    """The values of an item in its shape, without a copy. Raises `RequestRejected` if they are not all there."""
    check_data(item)
    kind = np.float32 if item.kind in ("audio", "recording") else np.uint8
    return np.frombuffer(item.data, kind).reshape(item.shape)


def check_data(item: PromptMedia) -> None:
    """Raises `RequestRejected` if an item's data is not all there."""
    if len(item.data) != item.size:
        raise RequestRejected(
            f"{ONE[item.kind]} of {item.size} bytes came with {len(item.data)}", param="messages"
        )


# Speech: how a Whisper model transcribes, from its own files, and the recording of a request.

WHISPER: Final = "whisper"
"""The type of such a model in its configuration."""

ENGLISH_VOCABULARY: Final = 51_864
"""Tokens of the models that know English only; the others have a token more, and more languages."""

TIMESTAMP_S: Final = 0.02


def whisper_support(
    features: Any, vocabulary: Mapping[str, int], *, size: int, context: int
) -> SpeechSupport:
    """Return how a Whisper model transcribes.

    `features` is its feature extractor, `vocabulary` its tokens by name, `size` how many its configuration has, `context` the tokens of a prompt
    and its answer.
    """
    no_timestamps = vocabulary["<|notimestamps|>"]
    start, translate = vocabulary["<|startoftranscript|>"], vocabulary["<|translate|>"]
    names = {number: name for name, number in vocabulary.items()}
    # The tokens between are those of languages.
    languages = {
        names[number].strip("<|>"): number for number in range(start + 1, translate) if number in names
    }
    return SpeechSupport(
        window_s=float(features.chunk_length),
        rate_hz=int(features.sampling_rate),
        start=start,
        previous=vocabulary["<|startofprev|>"],
        no_timestamps=no_timestamps,
        first_timestamp=no_timestamps + 1,
        timestamp_s=TIMESTAMP_S,
        prompt_max=context // 2 - 1,
        languages=languages if size > ENGLISH_VOCABULARY else {},
        transcribe=vocabulary["<|transcribe|>"],
        translate=translate,
    )


def check_recording(media: Sequence[PromptMedia], support: SpeechSupport) -> PromptMedia:
    """The one recording of a request, whole and of a length that the model hears at once. Raises `RequestRejected`."""
    if len(media) != 1:
        raise RequestRejected(f"{len(media)} recordings to transcribe: one at a time", param="file")
    (item,) = media
    if len(item.data) != item.size or not item.size:
        raise RequestRejected(f"a recording of {item.size} bytes came with {len(item.data)}", param="file")
    if item.shape[0] > support.window_s * support.rate_hz:
        raise RequestRejected(f"the recording is longer than {support.window_s:g} s", param="file")
    return item


def samples_of(item: PromptMedia) -> NDArray[np.float32]:
    """Its samples."""
    return np.frombuffer(item.data, np.float32)
