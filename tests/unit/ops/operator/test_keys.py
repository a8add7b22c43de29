"""`headwater keys`: what a wanted key becomes, and what is refused."""

from typing import Any

import pytest

from headwater.ops.config.errors import ConfigError
from headwater.ops.operator import keys
from headwater.ops.operator.keys import WantedKey, model_limits_of, new_key, seconds_of, words_of
from headwater.schemas.tables.api_key import UsageLimits


def test_a_key_has_what_was_asked_for() -> None:
    wanted = WantedKey(
        "acme", "ci", ("m",), ("chat",), ("tier",), 60, UsageLimits(1, 2, 3, 4), {"m": UsageLimits(5)}, True
    )
    key, secret = new_key(wanted, 1000)
    assert (key.tenant, key.name, key.created_s, key.expires_s) == ("acme", "ci", 1000, 1060)
    assert (key.scopes.models, key.scopes.endpoints, key.scopes.permissions) == (("m",), ("chat",), ("tier",))
    assert (key.limits, key.model_limits) == (UsageLimits(1, 2, 3, 4), {"m": UsageLimits(5)})
    assert key.cache_sharing
    assert len(secret) == 64
    assert new_key(wanted, 1000)[0].id != key.id


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"tenant": ""}, "--tenant"),
        ({"tenant": "a b"}, "--tenant"),
        ({"tenant": "ü"}, "--tenant"),
        ({"tenant": "a" * 129}, "--tenant"),
        ({"name": "a\nb"}, "--name"),
        ({"endpoints": ("chats",)}, "--endpoints"),
        ({"permissions": ("root",)}, "--allow"),
    ],
)
def test_each_option_is_checked(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        new_key(WantedKey(**{"tenant": "acme", **changes}), 0)


@pytest.mark.parametrize(("text", "seconds"), [("90d", 7_776_000), ("12h", 43_200), ("5m", 300), ("0s", 0)])
def test_durations(text: str, seconds: int) -> None:
    assert seconds_of(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5h", "1w", "1 d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expires"):
        seconds_of(text, "--expires")


def test_limits_of_models_add_up() -> None:
    words = words_of(
        ["org/m:v1:requests_per_minute=10,n:tokens_per_minute=5", "org/m:v1:concurrent_requests=2"]
    )
    assert model_limits_of(words) == {
        "org/m:v1": UsageLimits(requests_per_minute=10, concurrent_requests=2),
        "n": UsageLimits(tokens_per_minute=5),
    }


@pytest.mark.parametrize(
    "word", ["m", "m:requests", "m:requests_per_minute", "m:requests_per_minute=-1", ":x=1"]
)
def test_what_is_no_limit_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--model-limits"):
        model_limits_of([word])


def test_an_id_may_have_the_prefix_and_a_whole_key_is_not_repeated() -> None:
    assert keys._id_of("hw-0123456789ab") == keys._id_of("0123456789ab") == "0123456789ab"
    whole = "hw-0123456789ab-" + "5" * 64
    with pytest.raises(ConfigError) as caught:
        keys._id_of(whole)
    assert "5555" not in str(caught.value)
