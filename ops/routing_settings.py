"""From settings to how a router chooses: policy, temperature, weights."""

from typing import Any

import msgspec

from headwater.ops.config import ConfigError, Settings
from headwater.router.policies import POLICIES
from headwater.schemas.route import Weights


def weights_of(text: str, base: Weights | None = None, *, option: str = "--weights") -> Weights:
    """Weights from NAME=VALUE,…, the others as in `base`; raises `ConfigError` for a name that is none."""
    fields = {field.name: field.type for field in msgspec.structs.fields(Weights)}
    values: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", ",").split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in fields:
            raise ConfigError(f"{option} {part}: give NAME=VALUE; names are {', '.join(fields)}")
        try:
            values[name] = msgspec.convert(value, fields[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{option} {part}: {error}") from error
    return msgspec.structs.replace(base or Weights(), **values)


def router_weights(settings: Settings) -> Weights:
    """The weights of a router. Raises `ConfigError`."""
    base = Weights(local_tokens=settings.local_prefill_tokens, apart=settings.disaggregate == "always")
    return weights_of(",".join(settings.router_weights), base, option="--router-weights")


def known_policy(name: str, *, option: str = "--policy") -> str:
    """The name. Raises `ConfigError` for one that is no policy."""
    if name not in POLICIES:
        raise ConfigError(f"{option} {name}: there are {', '.join(POLICIES)}")
    return name
