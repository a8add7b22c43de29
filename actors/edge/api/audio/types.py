"""Forms of transcriptions and translations, and their validation."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from headwater.actors.edge.api.openai.types import Priority, Seed
from headwater.actors.http.decoding import invalid_field
from headwater.actors.http.errors import bad_request
from headwater.actors.http.form import FORM, UploadForm

__all__ = [
    "FORM",
    "REJECTED_IN_FORMS",
    "TranscriptFormat",
    "TranscriptionForm",
    "TranslationForm",
    "decode_form",
]

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

TIMED: Final = ("srt", "verbose_json", "vtt")
"""Formats with the times of segments."""

PROMPT_CHARACTERS_MAX: Final = 16_384

AudioFile = Annotated[bytes, msgspec.Meta(extra_json_schema={"contentEncoding": "binary"})]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Language = Annotated[str, msgspec.Meta(max_length=16)]
SaidBefore = Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]


class TranslationForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A recording, and how its transcript is wanted."""

    file: AudioFile
    model: str
    language: Language = ""
    prompt: SaidBefore = ""
    response_format: TranscriptFormat = "json"
    temperature: Temperature = 0.0
    stream: bool = False
    seed: Seed | None = None
    user: str | None = None
    priority: Priority | None = None

    @property
    def timed(self) -> bool:
        """Whether the transcript has the times of its segments."""
        return self.response_format in TIMED


class TranscriptionForm(TranslationForm, forbid_unknown_fields=True, kw_only=True):
    """The same with fields that only transcriptions have."""

    timestamp_granularities: list[str] = []
    chunking_strategy: str = "auto"
    include: list[str] = []
    keywords: list[str] = []
    languages: list[str] = []
    known_speaker_names: list[str] = []
    known_speaker_references: list[str] = []


REJECTED_IN_FORMS: Final[Mapping[str, tuple[Any, ...]]] = {
    "timestamp_granularities": (None, ["segment"]),
    "chunking_strategy": (None, "auto"),
    **dict.fromkeys(
        ("include", "keywords", "languages", "known_speaker_names", "known_speaker_references"), (None, [])
    ),
}
"""Fields that are refused, with the values that are accepted."""

LISTS: Final = frozenset(REJECTED_IN_FORMS) - {"chunking_strategy"}

FormT = TypeVar("FormT", bound=TranslationForm)


def decode_form(form: UploadForm, kind: type[FormT]) -> FormT:
    """A form as its type. Raises `ApiError` 400 naming the field."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, given in form.fields.items():
        if name == "file":
            raise bad_request(
                "file must be an uploaded file: a part of the form with a filename.", param="file"
            )
        if name not in known:
            raise bad_request(f"{name[:64]} is not supported; leave it out.", param=name)
        if name not in LISTS and len(given) > 1:
            raise bad_request(f"{name} comes {len(given)} times.", param=name)
        values[name] = given if name in LISTS else given[0]
    for name in form.files:
        if name != "file":
            raise bad_request(f"The file {name[:64]!r} is not expected; the recording is 'file'.", param=name)
    if "file" not in form.files:
        raise bad_request("The form has no file.", param="file")
    if len(form.files["file"]) > 1:
        raise bad_request("The form has several files; the recording is one.", param="file")
    try:
        wanted = msgspec.convert({**values, "file": form.files["file"][0]}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from error
    _refuse_unsupported(wanted)
    return wanted


def _refuse_unsupported(form: TranslationForm) -> None:
    for name, accepted in REJECTED_IN_FORMS.items():
        value = getattr(form, name, None)
        if value and value not in accepted:
            raise bad_request(f"{name} {value} is not supported; leave it out.", param=name)
    if form.stream and form.response_format not in ("json", "text"):
        raise bad_request(
            f"{form.response_format} cannot be streamed; use json or text.", param="response_format"
        )
