"""Settings with a decimal point: each has a range, and none takes what is no finite number."""

import math
from collections.abc import Iterable, Iterator
from typing import get_args, get_type_hints

import msgspec
import pytest

from headwater.ops.commands.config import commands
from headwater.ops.config.command import Command, _options_of
from headwater.ops.config.processes import all_settings
from headwater.ops.config.sections import RouterSettings, weights_of
from headwater.ops.config.setting import (
    ConfigError,
    Prefix,
    Setting,
    base_of,
    description_of,
    is_section,
    setting_of,
)
from headwater.schemas.routing import Weights

NO_NUMBERS = ("nan", "NaN", "inf", "-inf", "Infinity", "1e999")
WEIGHTS = tuple(field.name for field in msgspec.structs.fields(Weights) if base_of(field.type) is float)


def is_float(one: Setting) -> bool:
    """Does it take a number with a decimal point, or several?"""
    kind = get_args(one.base)[0] if one.repeatable else one.base
    return base_of(kind) is float


def every_command() -> Iterator[tuple[str, Command]]:
    """All commands, those below others too."""
    for _, name, one in commands():
        if isinstance(one, Command):
            yield name, one
            continue
        for below in one:
            if isinstance(inner := one[below].default_command, Command):
                yield f"{name} {below}", inner


def own_options(one: Command) -> Iterator[Setting]:
    """The options that a command has besides settings."""
    for name, kind in get_type_hints(one.function, include_extras=True).items():
        if described := _options_of(kind):
            yield from described
        elif description_of(kind) and not is_section(base_of(kind)):
            yield setting_of(name, kind, None, key="", group="", how=Prefix(), path=(name,))


FLOATS = {
    f"{name} {one.flag}": one for name, told in every_command() for one in own_options(told) if is_float(one)
}
FLOATS |= {one.flag: one for one in all_settings().values() if is_float(one)}


def test_there_are_such_settings() -> None:
    """Of the tree and of commands."""
    assert {"--trace-sample", "--drain-timeout", "ctl --drain-timeout", "ctl --timeout"} <= {*FLOATS}
    assert any(name.startswith("whatif ") for name in FLOATS)


def taken(one: Setting, values: Iterable[str | float]) -> list[str | float]:
    """Those of the values that it takes, or refuses without the flag and the value in front of the error."""
    found = []
    for value in values:
        try:
            one.read([value], f"{one.flag} ")
        except ConfigError as error:
            told = f"{error}".startswith(f"{one.flag} {value}: ")
        else:
            told = False
        found += [] if told else [value]
    return found


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_a_float_setting_takes_finite_numbers_that_are_not_negative(name: str) -> None:
    """They are seconds, shares, rates and sizes. A file has them as numbers: TOML has words for those that are not finite."""
    assert taken(FLOATS[name], (*NO_NUMBERS, "-1", "-0.001", math.nan, math.inf, -math.inf, -1.0)) == []


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_of_a_router_has_a_range(name: str) -> None:
    """Where it comes as text and where it comes from a file: a cost has to stay a finite number."""
    setting = all_settings()["router.weights"]
    assert taken(setting, [f"{name}={text}" for text in (*NO_NUMBERS, "-1", "1e300")]) == []
    for value in (math.nan, math.inf, -math.inf, -1.0, 1e300):
        with pytest.raises(ConfigError, match=name):
            weights_of(RouterSettings(weights={name: value}))


@pytest.mark.parametrize(
    ("name", "flag"), [("local_tokens", "--local-prefill-tokens"), ("apart", "--disaggregate")]
)
def test_what_has_a_flag_of_its_own_is_no_weight_of_a_router(name: str, flag: str) -> None:
    """Two sources of one number would contradict each other."""
    with pytest.raises(ConfigError, match=f"--routing-weights {name}=.*{name} is {flag}"):
        weights_of(RouterSettings(weights={name: 1}))


def test_the_weights_that_were_good_are_good() -> None:
    """Defaults, zeros, and what `headwater tune` finds."""
    for values in ({}, dict.fromkeys(WEIGHTS, 0.0), {"crowding": 0.25, "memory": 400.0, "arrivals": 40.0}):
        weights_of(RouterSettings(weights=values))
    text = ",".join(f"{name}={getattr(Weights(), name)}" for name in WEIGHTS)
    assert all_settings()["router.weights"].read([text], "--routing-weights ") == {
        name: getattr(Weights(), name) for name in WEIGHTS
    }
