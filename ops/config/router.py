"""Settings of routers: how they choose a worker."""

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headwater.engines.traits import Text
from headwater.ops.config.setting import ConfigError
from headwater.router.decision.names import DEFAULT_POLICY, PolicyName
from headwater.schemas.events.route import Weights

WEIGHT_MAX: Final = 1e9
"""Above it costs stop being numbers that differ."""


OWN_FLAGS: Final = {"local_tokens": "--local-prefill-tokens", "apart": "--disaggregate"}
"""What a router is told of by flags of their own."""


def read_weights(text: str) -> dict[str, Any]:
    """Weights by name from NAME=VALUE,…; the message of a `ValueError` names the part that cannot be used."""
    fields = [field.name for field in msgspec.structs.fields(Weights)]
    values: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", ",").split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in fields:
            raise ValueError(f"{part}: give NAME=VALUE; names are {', '.join(fields)}")
        try:
            values[name] = _weight(name, value)
        except ValueError as error:
            raise ValueError(f"{part}: {error}") from error
    return values


def _weight(name: str, value: Any) -> Any:
    """One weight. Not as annotations of `Weights`: decisions in a log have them, and must be readable whatever the range is now.

    Raises `ValueError`.
    """
    kind = type(getattr(Weights(), name))
    converted = msgspec.convert(value, kind, strict=False)
    if kind is not bool and not 0 <= converted <= WEIGHT_MAX:
        raise ValueError(f"expected a number from 0 to {WEIGHT_MAX:g}")
    return converted


def write_weights(values: dict[str, Any]) -> str:
    """The opposite of `read_weights`."""
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()
    )


WeightValues = Annotated[dict[str, Any], Text(read_weights, write_weights, "NAME=VALUE,…")]


class RouterSettings(NamedTuple):
    """How a router chooses a worker."""

    policy: Annotated[PolicyName, Meta(description="routing policy")] = DEFAULT_POLICY
    temperature: Annotated[
        float,
        Meta(
            ge=0,
            description="policy kv: 0 takes the lowest cost; at T a worker that costs (1 + T) times as much is e times "
            "less likely",
        ),
    ] = 0.0
    weights: Annotated[
        WeightValues,
        Meta(
            description="cost weights that differ from their defaults; `headwater tune` searches for better ones",
            examples=["crowding=0.1,arrivals=10"],
        ),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    local_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="prompts with at most this many uncached tokens are prefilled by the decode worker",
        ),
    ] = Weights().local_tokens
    disaggregate: Annotated[
        Literal["estimate", "always"],
        Meta(
            description="longer prompts go to a prefill worker if that is estimated to be cheaper, or always"
        ),
    ] = "estimate"


def weights_of(settings: RouterSettings) -> Weights:
    """The weights of a router."""
    for name, flag in OWN_FLAGS.items():
        if name in settings.weights:
            raise ConfigError(f"--routing-weights {write_weights(settings.weights)}: {name} is {flag}")
    base = Weights(local_tokens=settings.local_prefill_tokens, apart=settings.disaggregate == "always")
    return replaced(base, settings.weights, "--routing-weights")


def replaced(base: Weights, values: dict[str, Any], option: str) -> Weights:
    """`base` with these values. Raises `ConfigError` for a name or value that a file has wrong."""
    try:
        known = msgspec.structs.asdict(base) | values
        return msgspec.structs.replace(
            base,
            **{name: _weight(name, value) for name, value in known.items()},
        )
    except (AttributeError, ValueError) as error:
        names = ", ".join(field.name for field in msgspec.structs.fields(Weights))
        raise ConfigError(f"{option} {write_weights(values)}: {error}; names are {names}") from error
