"""Wire types that requests for images and for videos have in common: their fields, their size, how a form becomes fields."""

import re
import secrets
from collections.abc import Iterable, Mapping, Set
from typing import Annotated, Any, Final, TypeVar

import msgspec

from headwater.actors.edge.apis.chat_types import Priority
from headwater.actors.edge.catalog import Model, endpoint_of
from headwater.actors.edge.prompt.prompts import tokens_of
from headwater.actors.edge.saga.fields import UnsupportedFields
from headwater.actors.edge.saga.http_call import Call, RoutingHints, Serving, parse_routing_headers
from headwater.actors.http.body import invalid_field
from headwater.actors.http.errors import bad_field, bad_request
from headwater.schemas.tables import Capability, ImageGenerationSupport, ModelCard, VideoGenerationSupport

T = TypeVar("T")
Fields = TypeVar("Fields", bound=msgspec.Struct)

PROMPT_CHARACTERS_MAX: Final = 32_000
"""The limit of OpenAI's servers."""

_SIZE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

Prompt = Annotated[str, msgspec.Meta(min_length=1, max_length=PROMPT_CHARACTERS_MAX)]
NegativePrompt = Annotated[str, msgspec.Meta(max_length=PROMPT_CHARACTERS_MAX)]
ImageCount = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Guidance = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]


class FileFields(UnsupportedFields, kw_only=True):
    """The fields of both. `negative_prompt`, `seed`, `steps`, `guidance_scale` and `priority` are extensions."""

    model: str
    prompt: Prompt
    size: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    negative_prompt: NegativePrompt | None = None
    seed: Seed | None = None
    steps: ImageCount | None = None
    guidance_scale: Guidance | None = None
    priority: Priority | None = None

    async def routed(self, serving: Serving, call: Call, model: Model) -> tuple[int, RoutingHints]:
        """The tokens of the prompt, and what the call says about routing. Raises `ApiError` 400."""
        tokens = len(await tokens_of(model, self.prompt, "prompt"))
        user = self.user or self.safety_identifier
        hints = parse_routing_headers(
            call.headers, serving.settings.client, call.principal, user=user, priority=self.priority
        )
        return tokens, hints

    def common(
        self, support: ImageGenerationSupport | VideoGenerationSupport, model: str, media_kind: str
    ) -> dict[str, Any]:
        """Return what an order has of these fields, without a name yet. Raises `ApiError` 400 for what the model cannot."""
        width, height = _sides(self.size, support, model, media_kind)
        steps = self.steps or support.steps
        if steps > support.steps_max:
            raise bad_field(
                "steps", f"is {steps}; {model} computes at most {support.steps_max} per {media_kind}."
            )
        return {
            "request": "",
            "prompt": self.prompt,
            "width": width,
            "height": height,
            "steps": steps,
            # Chosen here: a worker that continues after another one must begin with the same noise.
            "seed": self.seed if self.seed is not None else secrets.randbits(32),
            "negative_prompt": self.negative_prompt or "",
            "guidance": self.guidance_scale,
            "priority": self.priority or 0,
        }


def _sides(
    size: str | None, support: ImageGenerationSupport | VideoGenerationSupport, model: str, media_kind: str
) -> tuple[int, int]:
    """Width and height. Raises `ApiError` 400 that says which sizes the model has."""
    if size is None or size == "auto":
        return support.width, support.height
    match = _SIZE.fullmatch(size)
    if match is not None:
        sides = int(match[1]), int(match[2])
        if all(
            support.side_min <= side <= support.side_max and side % support.side_multiple == 0
            for side in sides
        ):
            return sides
    raise bad_request(
        f"{model} does not generate {media_kind}s of this size: give auto, or WIDTHxHEIGHT with sides from {support.side_min} "
        f"to {support.side_max} pixels that are multiples of {support.side_multiple}.",
        param="size",
        code="invalid_size",
    )


def support_of(card: ModelCard, capability: Capability, support: T | None, work: str, instead: str = "") -> T:
    """The `support` that a model has for what needs this capability. Raises `ApiError` 400 if it has none."""
    if capability not in card.capabilities or support is None:
        raise bad_request(f"{card.name} does not {work}; use {endpoint_of(card)}{instead}.", param="model")
    return support


def own_fields(kind: type[FileFields]) -> frozenset[str]:
    """The names of all fields that a form may have: not the reserved ones."""
    return frozenset(
        name for base in kind.__mro__ if issubclass(base, FileFields) for name in base.__annotations__
    )


def form_values(
    fields: Mapping[str, list[Any]],
    allowed_names: Set[str],
    *,
    files: Iterable[str] = (),
    lists: Set[str] = frozenset(),
) -> dict[str, Any]:
    """The values of a form's fields, each of which comes once unless it is one of `lists`. Those of `files` are none: they are uploaded.

    Raises `ApiError` 400 naming the field.
    """
    for name in files:
        if name in fields:
            raise bad_field(name, "must be an uploaded file: a part of the form with a filename.")
    values: dict[str, Any] = {}
    for name, field_values in fields.items():
        if name not in allowed_names:
            raise bad_request(f"{name[:64]} is not supported; leave it out.", param=name)
        if name not in lists and len(field_values) > 1:
            raise bad_field(name, f"comes {len(field_values)} times.")
        values[name] = field_values if name in lists else field_values[0]
    return values


def converted(values: dict[str, Any], kind: type[Fields]) -> Fields:
    """The fields with these values. Raises `ApiError` 400 naming the field."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from error
